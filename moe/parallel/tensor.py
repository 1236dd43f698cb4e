"""The tokens of a rank shared out over the ranks that attention and feed-forward layers are split over.

Between those layers each of them works on its own share (sequence parallelism, arXiv 2205.05198, section 4.2.2);
within, each has all of the tokens and a part of the weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from moe.parallel.collective import all_gather_single, collective, reduce_scatter_single


@runtime_checkable
class SequenceSharded(Protocol):
    """A module within which tensor ranks have a share of the tokens each, between layers that have all of them."""

    tensor_group: dist.ProcessGroup | None
    """These ranks; None in one process, and until it is applied to a layout."""


@dataclass(frozen=True)
class SequenceShard:
    """T tokens over n ranks: consecutive ones, ceil(T / n) each, and what is left for the last."""

    num_tokens: int
    group: dist.ProcessGroup | None = None
    """None where one rank has all of them."""
    label: str = "between layers"
    """Name of the exchange, for the error of a collective that fails."""
    shape: tuple[int, int] | None = None
    """(B, L), where they are rows as long as each other."""

    def check(self) -> None:
        """Raises ValueError where a field is not what it is said to be."""
        number = self.num_tokens
        if not isinstance(number, Integral) or isinstance(number, bool) or number < 0:
            raise ValueError(f"shares.num_tokens (={number!r}) must be a whole number, 0 or above")
        if not isinstance(self.group, dist.ProcessGroup | None):
            raise ValueError(f"shares.group (={type(self.group).__name__}) must be a process group, or None")
        if not isinstance(self.label, str):
            raise ValueError(f"shares.label (={self.label!r}) must be words")

    @property
    def num_ranks(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def share_size(self) -> int:
        """Tokens of the largest share."""
        return -(-self.num_tokens // self.num_ranks)

    @property
    def first(self) -> int:
        return 0 if self.group is None else min(self.group.rank() * self.share_size, self.num_tokens)

    @property
    def stop(self) -> int:
        return min(self.first + self.share_size, self.num_tokens)

    def take(self, tokens: Tensor) -> Tensor:
        """This rank's share of `tokens` `[T, ...]`, which all of them have."""
        return tokens if self.group is None else tokens[self.first : self.stop]

    def gather(self, share: Tensor) -> Tensor:
        """`[T, ...]` of every rank's share `[t, ...]`. Gradients of all ranks add up on the way back."""
        return (
            share if self.group is None else _ShardCollective.apply(share, self, _all_gather, _reduce_scatter)
        )

    def gather_rows(self, share: Tensor) -> Tensor:
        """`[B, L, ...]` of every rank's share `[t, ...]`, likewise."""
        assert self.shape is not None
        return self.gather(share).view(*self.shape, *share.shape[1:])

    def gather_results(self, share: Tensor) -> Tensor:
        """The same where all ranks then do the same with it: each takes back the gradient of its own share alone."""
        return share if self.group is None else _ShardCollective.apply(share, self, _all_gather, _take_share)

    def split(self, tokens: Tensor) -> Tensor:
        """This rank's share `[t, ...]` of `tokens` `[T, ...]` that all ranks made alike. Gradients are gathered."""
        return (
            tokens if self.group is None else _ShardCollective.apply(tokens, self, _take_share, _all_gather)
        )

    def scatter(self, parts: Tensor) -> Tensor:
        """This rank's share `[t, ...]` of the sum of every rank's `parts` `[T, ...]`."""
        return (
            parts if self.group is None else _ShardCollective.apply(parts, self, _reduce_scatter, _all_gather)
        )

    def total(self, part: Tensor) -> Tensor:
        """Sum of every rank's `part`, the same on all of them. Gradients of all ranks add up on the way back."""
        return part if self.group is None else _ShardCollective.apply(part, self, _all_reduce, _all_reduce)

    def scatter_rows(self, parts: Tensor) -> Tensor:
        """This rank's share `[t, ...]` of the sum of every rank's `parts` `[B, L, ...]`."""
        return self.scatter(parts.reshape(self.num_tokens, *parts.shape[2:]))


Collective = Callable[[Tensor, SequenceShard], Tensor]


def _all_gather(share: Tensor, shares: SequenceShard) -> Tensor:
    padded_share = _fill_up(share, shares.share_size)
    gathered_rows = padded_share.new_empty(shares.num_ranks * shares.share_size, *share.shape[1:])
    with collective(f"all-gather of tokens over the tensor axis, {shares.label}"):
        all_gather_single(gathered_rows, padded_share, group=shares.group)
    return gathered_rows[: shares.num_tokens]


def _reduce_scatter(parts: Tensor, shares: SequenceShard) -> Tensor:
    padded_parts = _fill_up(parts, shares.num_ranks * shares.share_size)
    share = padded_parts.new_empty(shares.share_size, *parts.shape[1:])
    with collective(f"reduce-scatter of tokens over the tensor axis, {shares.label}"):
        reduce_scatter_single(share, padded_parts, group=shares.group)
    return share[: shares.stop - shares.first]


def _all_reduce(part: Tensor, shares: SequenceShard) -> Tensor:
    total = part.clone(memory_format=torch.contiguous_format)
    with collective(f"all-reduce over the tensor axis, {shares.label}"):
        dist.all_reduce(total, group=shares.group)
    return total


def _take_share(tokens: Tensor, shares: SequenceShard) -> Tensor:
    return shares.take(tokens)


def _fill_up(rows: Tensor, num_rows: int) -> Tensor:
    missing = num_rows - rows.shape[0]
    return functional.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)) if missing else rows.contiguous()


class _ShardCollective(torch.autograd.Function):
    """A collective forward, and backward what its gradient takes: its transpose, where ranks go on differently."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, shares: SequenceShard, there: Collective, back: Collective) -> Tensor:
        ctx.settings = shares, back
        return there(rows, shares)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        shares, back = ctx.settings
        return back(gradients[0], shares), None, None, None
