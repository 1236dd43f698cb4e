"""Attention over the context ranks of a sequence, with the heads split instead (DeepSpeed-Ulysses, arXiv 2309.14509,
section 3): an all-to-all gives each rank all positions of some heads, and another returns the outputs.

Shapes: B rows, n query heads, m key and value heads (n a multiple of m), c ranks, N positions of this rank, of L in
all, d and dv head widths.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from moe.layers.attention_mask import AttentionMask
from moe.layers.softmax_attention import attend
from moe.parallel.collective import collective
from moe.parallel.context import ContextShard
from moe.parallel.zigzag import ZigzagChunks
from moe.plan.fit import can_split_heads


def attend_by_heads(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    context: ContextShard,
    scale: float,
    attention_mask: AttentionMask,
    sinks: Tensor | None = None,
) -> Tensor:
    """`moe.layers.softmax_attention.attend` over context ranks, `[B, n, N, dv]`.

    `queries` `[B, n, N, d]`, `keys` `[B, m, N, d]` and `values` `[B, m, N, dv]` are those of this rank's positions;
    `attention_mask` is that of whole rows. c must divide n, and either divide m or be a multiple of it: heads of keys
    and values then go to several ranks. The gradient of `sinks` `[n]` is that of this rank's heads. Collective. Raises
    ValueError for heads that do not divide, and CollectiveError if an exchange fails.
    """
    num_ranks, key_heads = context.num_ranks, keys.shape[1]
    if not can_split_heads(queries.shape[1], key_heads, num_ranks):
        heads = f"{queries.shape[1]} heads of queries and {key_heads} of keys and values"
        raise ValueError(f"{num_ranks} context ranks cannot split {heads}")
    if key_heads < num_ranks:
        keys, values = (tensor.repeat_interleave(num_ranks // key_heads, dim=1) for tensor in (keys, values))
    exchange = _HeadExchange(context.chunks, context.group, context.label)
    outputs = attend(
        *exchange.to_heads(queries, keys, values), scale=scale, attention_mask=attention_mask,
        sinks=None if sinks is None else sinks.unflatten(0, (num_ranks, -1))[context.group.rank()],
    )  # fmt: skip
    return exchange.to_positions(outputs)


@dataclass(frozen=True)
class _HeadExchange:
    """All-to-alls between some positions of all heads and all positions of some heads. Chunks are padded to one size C,
    so that all ranks exchange as much."""

    chunks: ZigzagChunks
    group: dist.ProcessGroup
    label: str
    """Layer, for errors."""

    def to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """`[B, h / c, L, d]` of this rank's heads from `[B, h, N, d]`, by one collective for all tensors."""
        parts = [self._by_rank(tensor) for tensor in tensors]
        received = _AllToAll.apply(torch.cat(parts, dim=-1), self)  # [c, 2, C, B, widths], by rank of the positions
        chunks = torch.cat((received[:, 0], received[:, 1].flip(0)))  # in order of positions
        rows = chunks.flatten(0, 1)[: self.chunks.num_positions]
        return tuple(
            part.unflatten(-1, (-1, tensor.shape[-1])).permute(1, 2, 0, 3)
            for part, tensor in zip(rows.split([part.shape[-1] for part in parts], dim=-1), tensors, strict=True)
        )

    def to_positions(self, x: Tensor) -> Tensor:
        """`[B, h, N, d]` of this rank's positions from `[B, h / c, L, d]`."""
        num_ranks, chunk_size = self.chunks.num_ranks, self.chunks.chunk_size
        rows = x.permute(2, 0, 1, 3).flatten(2)
        missing = 2 * num_ranks * chunk_size - len(rows)
        chunks = functional.pad(rows, (0, 0, 0, 0, 0, missing)).unflatten(0, (-1, chunk_size))
        sent = torch.stack((chunks[:num_ranks], chunks[num_ranks:].flip(0)), dim=1)
        received = _AllToAll.apply(sent, self)  # [c, 2, C, B, widths], by rank of the heads
        own = [received[:, chunk, : len(positions)] for chunk, positions in enumerate(self._own_chunks)]
        heads = torch.cat(own, dim=1).unflatten(-1, (-1, x.shape[-1]))  # [c, N, B, h / c, d]
        return heads.permute(2, 0, 3, 1, 4).flatten(1, 2)

    def _by_rank(self, x: Tensor) -> Tensor:
        """`[c, 2, C, B, h / c · d]` from `[B, h, N, d]`."""
        lengths = [len(positions) for positions in self._own_chunks]
        padded = torch.stack(
            [functional.pad(chunk, (0, 0, 0, self.chunks.chunk_size - chunk.shape[2])) for chunk in x.split(lengths, 2)]
        )  # [2, B, h, C, d]
        return padded.unflatten(2, (self.chunks.num_ranks, -1)).permute(2, 0, 4, 1, 3, 5).flatten(4)

    @property
    def _own_chunks(self) -> Sequence[range]:
        return self.chunks.rank_chunks(self.group.rank())


class _AllToAll(torch.autograd.Function):
    """All-to-all of `[c, ...]`, whose transpose is an all-to-all."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, exchange: _HeadExchange) -> Tensor:
        ctx.exchange = exchange
        received = torch.empty_like(sent, memory_format=torch.contiguous_format)
        with collective(f"all-to-all of heads over the context axis, {exchange.label}"):
            dist.all_to_all_single(received, sent.contiguous(), group=exchange.group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(gradients[0], ctx.exchange), None
