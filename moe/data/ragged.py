"""Rows of different lengths, memory-mapped: training loads only the pages that it reads, once for all ranks of a
node."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


class RaggedArray:
    """R rows of different lengths, stored one after another."""

    def __init__(self, values: NDArray[Any], starts: NDArray[np.int64]) -> None:
        """`starts` `[R + 1]`: offset of each row's first element in `values`, then the number of elements."""
        self.values, self.starts = values, starts

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> NDArray[Any]:
        start, end = self.starts[index : index + 2]
        return self.values[start:end]

    def lengths(self) -> NDArray[np.int32]:
        """`[R]`: number of elements of each row."""
        return np.diff(self.starts).astype(np.int32)

    def pad_rows(self, rows: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """int64 `[len(rows), length]`: the rows of these indices, cut to `length`, with zeros after each row's end."""
        starts = self.starts
        ends = starts[rows + 1]
        positions = starts[rows][:, None] + np.arange(length)
        is_within = positions < ends[:, None]
        return np.where(is_within, self.values[np.where(is_within, positions, 0)], 0).astype(np.int64)


def starts_of(lengths: Iterable[int]) -> NDArray[np.int64]:
    """int64 `[R + 1]`: offsets of R consecutive rows of these lengths, then the number of elements."""
    return np.cumsum([0, *lengths], dtype=np.int64)


def map_npy(path: Path) -> NDArray[Any]:
    """A `.npy` file as a plain array over a memory map: numpy.memmap itself spends microseconds on every slice."""
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))


def map_raw(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    """A file of bare elements as a plain array over a memory map."""
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.zeros(0, dtype)
    return np.asarray(np.memmap(path, dtype, mode="r"))
