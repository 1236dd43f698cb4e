"""Base class of the backends of grouped matrix products: rows times the matrix of their expert."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from moe.parallel.accelerator import accelerator


class GroupedProducts(ABC):
    """Products of rows sorted by expert, `counts[e]` rows for expert e, possibly zero.

    `x` `[n, A]` and `d_y` `[n, B]` contiguous, `w` `[E, A, B]`, all of one dtype; A and B are any two widths.
    """

    @abstractmethod
    def supports(self, dtype: torch.dtype, device_type: str, widths: tuple[int, ...]) -> bool:
        """Whether it supports this dtype, device and these widths (A, B and others)."""

    def padded(self, counts: list[int]) -> list[int]:
        """Rows per expert that it prefers: callers may pad with zero rows of zero scale."""
        return counts

    def row_multiple(self, dtype: torch.dtype, device_type: str) -> int:
        """The rows it multiplies per expert are a multiple of this, or of more for large counts."""
        return 1

    def multiplied(self, counts: list[int], row_multiple: int) -> list[int]:
        """Rows that it multiplies per expert: multiples of `row_multiple`."""
        return counts

    @abstractmethod
    def forward(self, x: Tensor, w: Tensor, counts: list[int]) -> Tensor:
        """`[n, B]`: row · w[its expert]."""

    @abstractmethod
    def input_gradient(self, d_y: Tensor, w: Tensor, counts: list[int], onto: Tensor | None = None) -> Tensor:
        """`[n, A]`: row of `d_y` · w[its expert] transposed; added in place to `onto` if given."""

    @abstractmethod
    def weight_gradient(
        self, x: Tensor, d_y: Tensor, counts: list[int], into: Tensor | None = None, *, adds: bool = False
    ) -> Tensor:
        """`[E, A, B]`: x transposed · d_y over each expert's rows; zeros for an expert without rows. Written to `into`
        if given, which may have a wider dtype, or added to it if `adds`."""


def segments(counts: list[int]) -> list[tuple[int, slice]]:
    """(expert, its rows) for every expert with rows."""
    expert_rows, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            expert_rows.append((expert, slice(start, start + count)))
        start += count
    return expert_rows


def slots(counts: list[int], padded: list[int], device: torch.device) -> Tensor:
    """int64 `[n]`: index of each row after padding expert e's rows from `counts[e]` to `padded[e]`."""
    row_counts, slot_counts = torch.tensor(counts), torch.tensor(padded)
    shift = (slot_counts.cumsum(0) - slot_counts) - (row_counts.cumsum(0) - row_counts)
    return accelerator(device).take(torch.arange(int(row_counts.sum())) + shift.repeat_interleave(row_counts))


def padding_slots(counts: list[int], padded: list[int], device: torch.device) -> Tensor:
    """int64 `[m]`: indices of the padding rows, which `slots` leaves free."""
    row_counts, missing = torch.tensor(counts), torch.tensor(padded) - torch.tensor(counts)
    filling = torch.arange(int(missing.sum())) + row_counts.cumsum(0).repeat_interleave(missing)
    return accelerator(device).take(filling)


def put(gradient: Tensor, into: Tensor, *, adds: bool) -> Tensor:
    """Copy `gradient` to `into`, or add it."""
    return into.add_(gradient) if adds else into.copy_(gradient)
