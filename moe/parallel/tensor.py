"""Sequence parallelism: tokens sharded over the ranks that attention and feed-forward layers are split over.

Between these layers each rank processes its own share of the tokens (arXiv 2205.05198, section 4.2.2); within them it
has all tokens and a part of the weights.
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
class SequenceParallel(Protocol):
    """Module in which each tensor-parallel rank has a share of the tokens, between layers that have all of them."""

    tensor_group: dist.ProcessGroup | None
    """Tensor-parallel ranks; None on one process, and before the module is applied to a layout."""


@dataclass(frozen=True)
class SequenceShard:
    """Sharding of T tokens over n ranks: ceil(T / n) consecutive tokens each; the last shares may be shorter, or
    empty."""

    num_tokens: int
    group: dist.ProcessGroup | None = None
    """None if one rank has all tokens."""
    label: str = "between layers"
    """Name of the exchange in errors of collectives."""
    shape: tuple[int, int] | None = None
    """(B, L), if the tokens are rows of equal length."""

    def check(self) -> None:
        """Raise ValueError for an invalid field."""
        number = self.num_tokens
        if not isinstance(number, Integral) or isinstance(number, bool) or number < 0:
            raise ValueError(f"shard.num_tokens (={number!r}) must be a whole number, 0 or above")
        if not isinstance(self.group, dist.ProcessGroup | None):
            raise ValueError(f"shard.group (={type(self.group).__name__}) must be a process group, or None")
        if not isinstance(self.label, str):
            raise ValueError(f"shard.label (={self.label!r}) must be text")

    @property
    def num_ranks(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def shard_size(self) -> int:
        """Tokens of the largest share."""
        return -(-self.num_tokens // self.num_ranks)

    @property
    def first(self) -> int:
        return 0 if self.group is None else min(self.group.rank() * self.shard_size, self.num_tokens)

    @property
    def stop(self) -> int:
        return min(self.first + self.shard_size, self.num_tokens)

    def take(self, tokens: Tensor) -> Tensor:
        """This rank's share of `tokens` `[T, ...]`, which all ranks have."""
        return tokens if self.group is None else tokens[self.first : self.stop]

    def gather(self, share: Tensor) -> Tensor:
        """All-gather the shares `[t, ...]` into `[T, ...]`. The backward pass sums the gradients of all ranks
        (reduce-scatter)."""
        return share if self.group is None else _ShardCollective.apply(share, self, _all_gather, _reduce_scatter)

    def gather_rows(self, share: Tensor) -> Tensor:
        """`gather` into rows `[B, L, ...]`."""
        assert self.shape is not None
        return self.gather(share).view(*self.shape, *share.shape[1:])

    def gather_results(self, share: Tensor) -> Tensor:
        """`gather` for results that all ranks use alike: the backward pass takes the gradient of this rank's share,
        without a sum."""
        return share if self.group is None else _ShardCollective.apply(share, self, _all_gather, _take_shard)

    def split(self, tokens: Tensor) -> Tensor:
        """This rank's share `[t, ...]` of `tokens` `[T, ...]`, which are equal on all ranks. The backward pass
        all-gathers."""
        return tokens if self.group is None else _ShardCollective.apply(tokens, self, _take_shard, _all_gather)

    def scatter(self, parts: Tensor) -> Tensor:
        """Reduce-scatter: this rank's share `[t, ...]` of the sum of all ranks' `parts` `[T, ...]`."""
        return parts if self.group is None else _ShardCollective.apply(parts, self, _reduce_scatter, _all_gather)

    def total(self, part: Tensor) -> Tensor:
        """All-reduce `part` to its sum over ranks. The backward pass sums gradients too."""
        return part if self.group is None else _ShardCollective.apply(part, self, _all_reduce, _all_reduce)

    def scatter_rows(self, parts: Tensor) -> Tensor:
        """`scatter` of rows `[B, L, ...]`."""
        return self.scatter(parts.reshape(self.num_tokens, *parts.shape[2:]))


Collective = Callable[[Tensor, SequenceShard], Tensor]


def _all_gather(share: Tensor, shard: SequenceShard) -> Tensor:
    padded_share = _pad_rows(share, shard.shard_size)
    gathered_rows = padded_share.new_empty(shard.num_ranks * shard.shard_size, *share.shape[1:])
    with collective(f"all-gather of tokens over the tensor axis, {shard.label}"):
        all_gather_single(gathered_rows, padded_share, group=shard.group)
    return gathered_rows[: shard.num_tokens]


def _reduce_scatter(parts: Tensor, shard: SequenceShard) -> Tensor:
    padded_parts = _pad_rows(parts, shard.num_ranks * shard.shard_size)
    share = padded_parts.new_empty(shard.shard_size, *parts.shape[1:])
    with collective(f"reduce-scatter of tokens over the tensor axis, {shard.label}"):
        reduce_scatter_single(share, padded_parts, group=shard.group)
    return share[: shard.stop - shard.first]


def _all_reduce(part: Tensor, shard: SequenceShard) -> Tensor:
    total = part.clone(memory_format=torch.contiguous_format)
    with collective(f"all-reduce over the tensor axis, {shard.label}"):
        dist.all_reduce(total, group=shard.group)
    return total


def _take_shard(tokens: Tensor, shard: SequenceShard) -> Tensor:
    return shard.take(tokens)


def _pad_rows(rows: Tensor, num_rows: int) -> Tensor:
    missing = num_rows - rows.shape[0]
    return functional.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)) if missing else rows.contiguous()


class _ShardCollective(torch.autograd.Function):
    """One collective in the forward pass and another in the backward pass: its transpose, if ranks use the result
    differently."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, shard: SequenceShard, forward_collective: Collective, backward_collective: Collective
    ) -> Tensor:
        ctx.settings = shard, backward_collective
        return forward_collective(rows, shard)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        shard, backward_collective = ctx.settings
        return backward_collective(gradients[0], shard), None, None, None
