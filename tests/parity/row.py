"""A row of the grid, and one training of it."""

import sys
from dataclasses import dataclass
from functools import cache

from moe.spec import TrainSpec
from tests.parity.combinations import assert_same, run_on
from tests.parity.digests import digests_of
from tests.parity.gloo_ranks import Pools
from tests.parity.trajectory import Degrees, Model, Shape, run

TOLERANCE = 1e-10


@dataclass(frozen=True)
class Row:
    """Results of one line of a table: of a layout, or of a family under all layouts."""

    name: str
    num_ranks: int
    num_same: dict[str, int]
    """Number of trainings, by column, that compute the same as one process. Columns that do not apply are left out."""
    num_trainings: dict[str, int]
    """Number of all trainings, by column."""
    digests: dict[str, dict[str, str]]
    """Digests of records by trajectory; empty for a trajectory that did not end."""

    @property
    def differs(self) -> bool:
        """Whether any training differs from one process."""
        return self.num_same != self.num_trainings


class RowResults:
    """Results of a row, filled in training by training."""

    def __init__(self, ranks: Pools, name: str) -> None:
        self._ranks, self._name = ranks, name
        self._num_same: dict[str, int] = {}
        self._num_trainings: dict[str, int] = {}
        self._digests: dict[str, dict[str, str]] = {}

    def train(self, label: str, column: str, model: Model, train: TrainSpec, degrees: Degrees, num_steps: int) -> None:
        """Train on ranks and on one process, and count the training in its column."""
        trajectory = f"{label}, under {self._name}, {column}"
        self._num_trainings[column] = self._num_trainings.get(column, 0) + 1
        self._num_same.setdefault(column, 0)
        self._digests[trajectory] = {}
        try:
            records = run_on(self._ranks, degrees, model, train, Shape(), num_steps)
            self._digests[trajectory] = digests_of(records)
            assert_same(records, _reference(model, train, num_steps), TOLERANCE)
            self._num_same[column] += 1
        except Exception as error:  # any error goes into the table
            print(f"{trajectory}: {error!s:.2000}", file=sys.stderr, flush=True)

    def row(self, num_ranks: int) -> Row:
        return Row(self._name, num_ranks, self._num_same, self._num_trainings, self._digests)


@cache
def _reference(model: Model, train: TrainSpec, num_steps: int) -> list[dict]:
    return run(model, train, Degrees(), Shape(), num_steps)
