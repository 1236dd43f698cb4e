"""Contract of backends of expert arithmetic: the products of rows with the matrix of their expert."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from moe.parallel.accelerator import accelerator


class GroupedProducts(ABC):
    """Products of rows sorted by expert, `counts[e]` of them for expert e; an expert may have none.

    `x` `[n, A]` and `d_y` `[n, B]` contiguous, `w` `[E, A, B]`, all of one dtype; A and B are any two widths.
    """

    @abstractmethod
    def supports(self, dtype: torch.dtype, device_type: str, widths: tuple[int, ...]) -> bool:
        """Whether it takes this dtype, device and widths (A, B and whatever else is multiplied)."""

    def padded(self, counts: list[int]) -> list[int]:
        """Number of rows of each expert that it prefers: whoever makes the rows may fill them up to that, with
        zeros whose scale is zero."""
        return counts

    def row_multiple(self, dtype: torch.dtype, device_type: str) -> int:
        """It multiplies a multiple of this many rows for each expert, or of more where these are many."""
        return 1

    def multiplied(self, counts: list[int], row_multiple: int) -> list[int]:
        """Number of rows of each expert that it multiplies: multiples of `row_multiple`."""
        return counts

    @abstractmethod
    def forward(self, x: Tensor, w: Tensor, counts: list[int]) -> Tensor:
        """`[n, B]`: row · w[its expert]."""

    @abstractmethod
    def input_gradient(self, d_y: Tensor, w: Tensor, counts: list[int], onto: Tensor | None = None) -> Tensor:
        """`[n, A]`: row of `d_y` · w[its expert] transposed; added to `onto` in place where that is given."""

    @abstractmethod
    def weight_gradient(
        self, x: Tensor, d_y: Tensor, counts: list[int], into: Tensor | None = None, *, adds: bool = False
    ) -> Tensor:
        """`[E, A, B]`: x transposed · d_y over each expert's rows; zeros for one without. Written into `into`, where
        that is given, which may be wider than the rows, or added to it."""


def segments(counts: list[int]) -> list[tuple[int, slice]]:
    """(expert, its rows) of every expert that has any."""
    expert_rows, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            expert_rows.append((expert, slice(start, start + count)))
        start += count
    return expert_rows


def slots(counts: list[int], padded: list[int], device: torch.device) -> Tensor:
    """int64 `[n]`: where each row goes when expert e's rows, `counts[e]` of them, are filled up to `padded[e]`."""
    row_counts, slot_counts = torch.tensor(counts), torch.tensor(padded)
    shift = (slot_counts.cumsum(0) - slot_counts) - (row_counts.cumsum(0) - row_counts)
    return accelerator(device).take(torch.arange(int(row_counts.sum())) + shift.repeat_interleave(row_counts))


def padding_slots(counts: list[int], padded: list[int], device: torch.device) -> Tensor:
    """int64 `[m]`: the rows that `slots` leaves free, which fill up."""
    row_counts, missing = torch.tensor(counts), torch.tensor(padded) - torch.tensor(counts)
    filling = torch.arange(int(missing.sum())) + row_counts.cumsum(0).repeat_interleave(missing)
    return accelerator(device).take(filling)


def put(gradient: Tensor, into: Tensor, *, adds: bool) -> Tensor:
    """`into`, with `gradient` in its place or added to it."""
    return into.add_(gradient) if adds else into.copy_(gradient)
