"""Sequence parallelism: tokens sharded over the ranks that attention and feed-forward layers are split over.

Between these layers each rank processes its own share of the tokens (arXiv 2205.05198, section 4.2.2); within them it
has all tokens and a part of the weights.
"""

import math
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from moe.parallel.collective import PairedCollective, all_gather_single, collective, reduce_scatter_single
from moe.parallel.context import ContextShard
from moe.spec.parallel import ContextExchange


@runtime_checkable
class SequenceParallel(Protocol):
    """Module in which each tensor-parallel rank has a share of the tokens, between layers that have all of them."""

    tensor_group: dist.ProcessGroup | None
    """Tensor-parallel ranks; None on one process, and before the module is applied to a layout."""


@dataclass(frozen=True)
class SequenceShard:
    """Sharding of T tokens over n tensor ranks: ceil(T / n) consecutive tokens each; the last shares may be shorter, or
    empty. If context ranks have parts of each row, tensor ranks share the tokens of these parts."""

    num_tokens: int
    """T, on all ranks."""
    group: dist.ProcessGroup | None = None
    """Tensor ranks; None if there is one."""
    label: str = "between layers"
    """Name of the exchange in errors of collectives."""
    shape: tuple[int, int] | None = None
    """(B, L), if the tokens are rows of equal length."""
    context: ContextShard | None = None
    """This context rank's positions of the rows; None if it has all."""

    @classmethod
    def of_rows(
        cls,
        num_rows: int,
        num_positions: int,
        group: dist.ProcessGroup | None = None,
        context_group: dist.ProcessGroup | None = None,
        context_exchange: ContextExchange = "gather",
    ) -> "SequenceShard":
        """Sharding of rows `[B, L]` over tensor and context ranks."""
        context = None
        if context_group is not None:
            context = ContextShard(num_positions, context_group, exchange=context_exchange)
        return cls(num_rows * num_positions, group, shape=(num_rows, num_positions), context=context)

    def check(self) -> None:
        """Raise ValueError for an invalid field."""
        number = self.num_tokens
        if not isinstance(number, Integral) or isinstance(number, bool) or number < 0:
            raise ValueError(f"shard.num_tokens (={number!r}) must be a whole number, 0 or above")
        if not isinstance(self.group, dist.ProcessGroup | None):
            raise ValueError(f"shard.group (={type(self.group).__name__}) must be a process group, or None")
        if not isinstance(self.label, str):
            raise ValueError(f"shard.label (={self.label!r}) must be text")
        if not isinstance(self.context, ContextShard | None):
            raise ValueError(f"shard.context (={type(self.context).__name__}) must be a ContextShard, or None")
        if self.context is not None and self.shape is None:
            raise ValueError("shard.shape (=None) must be the shape of the rows that context ranks share")

    def with_label(self, label: str) -> "SequenceShard":
        """The same sharding, with `label` in errors of collectives."""
        context = None if self.context is None else replace(self.context, label=label)
        return replace(self, label=label, context=context)

    @property
    def is_whole(self) -> bool:
        """Whether one rank has all tokens."""
        return self.group is None and self.context is None

    @property
    def num_ranks(self) -> int:
        """Tensor ranks."""
        return 1 if self.group is None else self.group.size()

    @property
    def num_token_ranks(self) -> int:
        """Ranks over which all tokens are sharded: tensor times context ranks."""
        return self.num_ranks * (1 if self.context is None else self.context.num_ranks)

    @property
    def local_shape(self) -> tuple[int, int]:
        """(B, N): rows and their positions on this context rank."""
        assert self.shape is not None
        return self.shape if self.context is None else (self.shape[0], self.context.num_local)

    @property
    def num_local_tokens(self) -> int:
        """Tokens of this context rank."""
        return self.num_tokens if self.context is None else math.prod(self.local_shape)

    @property
    def shard_size(self) -> int:
        """Tokens of the largest share of this context rank's tokens."""
        return -(-self.num_local_tokens // self.num_ranks)

    @property
    def first(self) -> int:
        """First token of this rank's share, counted in this context rank's tokens."""
        return 0 if self.group is None else min(self.group.rank() * self.shard_size, self.num_local_tokens)

    @property
    def stop(self) -> int:
        return min(self.first + self.shard_size, self.num_local_tokens)

    def take(self, tokens: Tensor) -> Tensor:
        """This rank's share `[t, ...]` of `tokens` `[T, ...]`, which all ranks have."""
        if self.context is not None:
            assert self.shape is not None
            tokens = self.context.take(tokens.unflatten(0, self.shape)).flatten(0, 1)
        return tokens if self.group is None else tokens[self.first : self.stop]

    def gather(self, share: Tensor) -> Tensor:
        """All-gather the shares `[t, ...]` of the tensor ranks into this context rank's tokens. The backward pass sums
        the gradients of these ranks (reduce-scatter)."""
        return share if self.group is None else PairedCollective.apply(share, self, _all_gather, _reduce_scatter)

    def gather_rows(self, share: Tensor) -> Tensor:
        """`gather` into rows `[B, N, ...]`."""
        return self.gather(share).view(*self.local_shape, *share.shape[1:])

    def gather_all(self, share: Tensor) -> Tensor:
        """All-gather the shares `[t, ...]` of tensor and context ranks into `[T, ...]`. The backward pass sums the
        gradients of all these ranks."""
        if self.context is None:
            return self.gather(share)
        return self.context.gather(self.gather_rows(share))[0].flatten(0, 1)

    def gather_results(self, share: Tensor) -> Tensor:
        """`gather_all` for results that all ranks use alike: the backward pass takes the gradient of this rank's share,
        without a sum."""
        if self.group is not None:
            share = PairedCollective.apply(share, self, _all_gather, _take_shard)
        if self.context is None:
            return share
        return self.context.gather_results(share.view(*self.local_shape, *share.shape[1:])).flatten(0, 1)

    def split(self, tokens: Tensor) -> Tensor:
        """This rank's share `[t, ...]` of the context rank's `tokens`, which are equal on all tensor ranks. The
        backward pass all-gathers."""
        return tokens if self.group is None else PairedCollective.apply(tokens, self, _take_shard, _all_gather)

    def scatter(self, parts: Tensor) -> Tensor:
        """Reduce-scatter: this rank's share `[t, ...]` of the sum of the tensor ranks' `parts` of the context rank's
        tokens."""
        return parts if self.group is None else PairedCollective.apply(parts, self, _reduce_scatter, _all_gather)

    def total(self, part: Tensor) -> Tensor:
        """All-reduce `part` to its sum over tensor ranks. The backward pass sums gradients too."""
        return part if self.group is None else PairedCollective.apply(part, self, _all_reduce, _all_reduce)

    def scatter_rows(self, parts: Tensor) -> Tensor:
        """`scatter` of rows `[B, N, ...]`."""
        return self.scatter(parts.reshape(self.num_local_tokens, *parts.shape[2:]))


def _all_gather(share: Tensor, shard: SequenceShard) -> Tensor:
    padded_share = _pad_rows(share, shard.shard_size)
    gathered_rows = padded_share.new_empty(shard.num_ranks * shard.shard_size, *share.shape[1:])
    with collective(f"all-gather of tokens over the tensor axis, {shard.label}"):
        all_gather_single(gathered_rows, padded_share, group=shard.group)
    return gathered_rows[: shard.num_local_tokens]


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
    return tokens[shard.first : shard.stop]


def _pad_rows(rows: Tensor, num_rows: int) -> Tensor:
    missing = num_rows - rows.shape[0]
    return functional.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)) if missing else rows.contiguous()
