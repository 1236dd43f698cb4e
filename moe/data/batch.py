"""The global batch of a step."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class GlobalBatch(ABC):
    """B = G x R rows in G token groups of R, for any number of ranks."""

    step: int
    rows: NDArray[np.int64]
    """[B], indices into the store."""
    rows_per_group: int
    """R"""
    num_groups: int
    """G"""

    @property
    @abstractmethod
    def num_positions(self) -> int:
        """Positions of all rows, padding included."""

    def rows_of(self, first_group: int, stop_group: int) -> tuple[int, NDArray[np.int64]]:
        """(index of the first row in the batch, rows) of groups `first_group` to `stop_group` (exclusive)."""
        if not 0 <= first_group <= stop_group <= self.num_groups:
            group_range = f"groups {first_group} to {stop_group}"
            raise ValueError(f"{group_range} are outside the {self.num_groups} groups of step {self.step}")
        first_row = first_group * self.rows_per_group
        return first_row, self.rows[first_row : stop_group * self.rows_per_group]
