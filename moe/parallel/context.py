"""Context parallelism: the positions of each row sharded over ranks, in zigzag chunks."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from moe.parallel.collective import PairedCollective, all_gather_single, collective, reduce_scatter_single
from moe.parallel.zigzag import ZigzagChunks
from moe.spec.parallel import ContextExchange


@runtime_checkable
class ContextParallel(Protocol):
    """Module in which each context rank has some positions of each row."""

    context_group: dist.ProcessGroup | None
    """Context ranks; None on one process, and before the module is applied to a layout."""
    context_exchange: ContextExchange
    """Exchange of keys and values between them."""


@dataclass(frozen=True)
class ContextShard:
    """This rank's positions of rows of L positions. `N` is their number, which may differ between ranks."""

    num_positions: int
    """L"""
    group: dist.ProcessGroup
    label: str = "between layers"
    """Name of the exchange in errors of collectives."""
    exchange: ContextExchange = "gather"
    """Exchange by which softmax attention gets other ranks' keys and values."""

    @property
    def num_ranks(self) -> int:
        return self.group.size()

    @property
    def chunks(self) -> ZigzagChunks:
        """Chunks of the rows, of which each rank has two."""
        return ZigzagChunks(self.num_positions, self.num_ranks)

    @property
    def runs(self) -> tuple[range, ...]:
        """This rank's runs of consecutive positions, in order: its two chunks, or one run if they are neighbours or the
        second is empty."""
        first, second = self.chunks.rank_chunks(self.group.rank())
        if not second:
            return (first or range(0),)
        return (range(first.start, second.stop),) if first.stop == second.start else (first, second)

    @property
    def num_local(self) -> int:
        """N"""
        return self.chunks.num_rank_positions(self.group.rank())

    def local_slices(self) -> list[tuple[range, slice]]:
        """Runs, with the indices of their positions among this rank's."""
        slices, start = [], 0
        for run in self.runs:
            slices.append((run, slice(start, start + len(run))))
            start += len(run)
        return slices

    def positions(self, device: torch.device | str) -> Tensor:
        """int64 `[N]`: this rank's positions, in order."""
        return self.take(torch.arange(self.num_positions, device=device), dim=0)

    def take(self, rows: Tensor, dim: int = 1) -> Tensor:
        """This rank's positions `[B, N, ...]` of `rows` `[B, L, ...]`, or along another dimension."""
        parts = [rows.narrow(dim, run.start, len(run)) for run in self.runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def gather(self, *parts: Tensor, dim: int = 1) -> tuple[Tensor, ...]:
        """All-gather `parts` `[B, N, ...]` of one dtype into rows `[B, L, ...]`, in the order of positions, by one
        collective. The backward pass sums the gradients of all ranks (reduce-scatter)."""
        flat_parts = [part.movedim(dim, 0).flatten(1) for part in parts]
        flat_rows = self.gather_flat(torch.cat(flat_parts, 1) if len(parts) > 1 else flat_parts[0])
        widths = [flat_part.shape[1] for flat_part in flat_parts]
        return tuple(
            rows.unflatten(1, part.movedim(dim, 0).shape[1:]).movedim(0, dim)
            for rows, part in zip(flat_rows.split(widths, 1), parts, strict=True)
        )

    def gather_flat(self, part: Tensor) -> Tensor:
        """`gather` of `[N, width]` into `[L, width]`."""
        gathered: Tensor = PairedCollective.apply(part, self, _all_gather, _reduce_scatter)
        return gathered

    def gather_results(self, part: Tensor) -> Tensor:
        """`gather` for results `[B, N, ...]` that all ranks use alike: the backward pass takes the gradient of this
        rank's positions, without a sum."""
        rows = PairedCollective.apply(part.transpose(0, 1), self, _all_gather, _take)
        return rows.transpose(0, 1)


def _all_gather(part: Tensor, shard: ContextShard) -> Tensor:
    """`[L, ...]` from the parts `[N, ...]` of all ranks."""
    chunk_size = shard.chunks.chunk_size
    missing = 2 * chunk_size - part.shape[0]
    padded_part = functional.pad(part, (0, 0) * (part.dim() - 1) + (0, missing)) if missing else part.contiguous()
    by_rank = padded_part.new_empty(shard.num_ranks * padded_part.shape[0], *part.shape[1:])
    with collective(f"all-gather of positions over the context axis, {shard.label}"):
        all_gather_single(by_rank, padded_part, group=shard.group)
    chunks = by_rank.unflatten(0, (shard.num_ranks, 2, chunk_size))
    return torch.cat((chunks[:, 0], chunks[:, 1].flip(0))).flatten(0, 1)[: shard.num_positions]


def _reduce_scatter(rows: Tensor, shard: ContextShard) -> Tensor:
    """This rank's part `[N, ...]` of the sum of all ranks' `rows` `[L, ...]`."""
    num_ranks, chunk_size = shard.num_ranks, shard.chunks.chunk_size
    missing = 2 * num_ranks * chunk_size - rows.shape[0]
    padded_rows = functional.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)) if missing else rows
    chunks = padded_rows.unflatten(0, (2 * num_ranks, chunk_size))
    by_rank = torch.stack((chunks[:num_ranks], chunks[num_ranks:].flip(0)), dim=1).flatten(0, 2)
    part = by_rank.new_empty(2 * chunk_size, *rows.shape[1:])
    with collective(f"reduce-scatter of positions over the context axis, {shard.label}"):
        reduce_scatter_single(part, by_rank, group=shard.group)
    return part[: shard.num_local]


def _take(rows: Tensor, shard: ContextShard) -> Tensor:
    return shard.take(rows, dim=0)
