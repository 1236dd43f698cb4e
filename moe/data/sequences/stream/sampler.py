"""Rows of a stream for the token groups of one rank, in step order."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe.data.sequences.batch import SequenceBatchPart
from moe.data.sequences.store import SequenceRows, SequenceStore
from moe.data.sequences.stream.builder import WindowBuilder
from moe.data.sequences.stream.order import WindowPosition, row_order
from moe.data.sequences.stream.plan import StreamPlan
from moe.data.sequences.stream.window import TOKENS_BY_SOURCE
from moe.data.sequences.stream.window_folder import WindowFolder

_NUM_STORED_STEPS = 3
"""Number of steps whose positions are stored, since batches are made ahead of the step that trains."""


@dataclass(frozen=True)
class StreamRows:
    """Rows of consecutive token groups at one step."""

    step: int
    first_row: int
    """Index of the first row in the global batch."""
    rows: SequenceRows
    rows_per_group: int
    num_targets: int
    tokens_by_source: NDArray[np.int64]
    """[num_sources]"""

    def part(self, first_group: int, stop_group: int) -> SequenceBatchPart:
        """The rows of groups `first_group` to `stop_group` (exclusive), which are among these."""
        first_row = first_group * self.rows_per_group
        rows = slice(first_row - self.first_row, stop_group * self.rows_per_group - self.first_row)
        tokens, documents, labels = self.rows
        return SequenceBatchPart(first_row, tokens[rows], documents[rows], labels[rows])


class StreamSampler:
    """Rows of a range of token groups at each step: a function of the plan and the step alone, for any ranges.

    `builder` writes the windows of the partitions of these groups, one window ahead. A window's files are removed as
    soon as they are memory-mapped, and their space is free when the next window begins.
    """

    def __init__(self, plan: StreamPlan, groups: range, folder: Path, builder: WindowBuilder) -> None:
        """`folder`: parent of a folder for windows, on this machine. `builder` is closed with the sampler."""
        self._plan, self._groups = plan, groups
        self._folder, self._builder = WindowFolder(folder), builder
        numbers = sorted({plan.partition_of(group) for group in groups})
        self._partitions = [_Partition(plan, number, self._folder, self._builder) for number in numbers]

    def seek(self, step: int, positions: Mapping[int, Any]) -> None:
        """Begin at `step`, with the positions of partitions that `positions` of the same plan gave; at the beginning of
        the stream without them."""
        for partition in self._partitions:
            partition.seek(step, positions.get(partition.number))

    def batch(self, step: int) -> StreamRows:
        """Rows of a step. Raises SpecError for faults of the user's files."""
        parts = []
        rows_per_group = self._plan.rows_per_group
        for partition in self._partitions:
            partition.start()
        for partition in self._partitions:
            groups = self._plan.groups_of(partition.number)
            own = range(max(groups.start, self._groups.start), min(groups.stop, self._groups.stop))
            first, stop = ((group - groups.start) * rows_per_group for group in (own.start, own.stop))
            parts += partition.rows(step, first, stop)
        empty = _Part.empty(self._plan)
        return StreamRows(
            step,
            self._groups.start * rows_per_group,
            SequenceRows(
                *(np.concatenate(arrays) for arrays in zip(*(part.rows for part in parts or [empty]), strict=True))
            ),
            rows_per_group,
            sum(part.num_targets for part in parts),
            sum((part.tokens_by_source for part in parts), empty.tokens_by_source),
        )

    def positions(self, step: int) -> dict[int, Any]:
        """Positions of this rank's partitions before `step`, one of the last few steps: JSON values by number."""
        return {partition.number: partition.position(step) for partition in self._partitions}

    def close(self) -> None:
        """End the background work and remove the windows."""
        self._builder.close()
        self._folder.remove()


@dataclass(frozen=True)
class _Part:
    """Rows of one window."""

    rows: SequenceRows
    num_targets: int
    tokens_by_source: NDArray[np.int64]

    @classmethod
    def empty(cls, plan: StreamPlan) -> "_Part":
        shape = (0, plan.data.max_tokens)
        rows = SequenceRows(np.zeros(shape, np.int64), np.zeros(shape, np.int32), np.zeros(shape, np.int64))
        return cls(rows, 0, np.zeros(len(plan.data.source_names), np.int64))


class _Window:
    """A window that is in use."""

    def __init__(self, plan: StreamPlan, partition: int, start: WindowPosition, folder: Path) -> None:
        self.first_row = start.first_row
        self._store = SequenceStore(folder)
        self._tokens_by_source = np.load(folder / TOKENS_BY_SOURCE)
        self.stop_row = self.first_row + self._store.num_rows
        self._order = row_order(plan.seed, partition, start.number, self._store.num_rows)

    def part(self, first: int, stop: int) -> _Part:
        """Rows `first` to `stop` (exclusive) of the partition, which lie in this window."""
        rows = self._order[first - self.first_row : stop - self.first_row]
        num_targets = int(self._store.row_targets[rows].sum())
        return _Part(self._store.rows(rows), num_targets, self._tokens_by_source[rows].sum(0))


class _Partition:
    """Rows of one partition, in order."""

    def __init__(self, plan: StreamPlan, number: int, folder: WindowFolder, builder: WindowBuilder) -> None:
        self.number = number
        self._plan, self._folder, self._builder = plan, folder, builder
        self._rows_per_step = plan.rows_per_step(number)
        self._requested: Path | None = None
        self._window: _Window | None = None
        self.seek(0, None)

    def seek(self, step: int, position: Any) -> None:
        """Begin at `step`, at `position` or the beginning."""
        self._drain()
        start = WindowPosition.start(len(self._plan.data.source_names))
        rows = 0
        if position is not None:
            rows, start = position["rows"], WindowPosition.of_plain(position["window"])
        self._step, self._rows_before = step, rows
        self._starts: tuple[WindowPosition, ...] = (start,)
        """Beginnings of windows, ascending; the last is that of the next window to open."""
        self._window = None

    def start(self) -> None:
        """Request the first window."""
        if self._requested is None:
            self._request(self._starts[-1])

    def rows(self, step: int, first: int, stop: int) -> list[_Part]:
        """Rows `first` to `stop` (exclusive) of those that a step takes."""
        begin = self._row_of(step)
        first, stop = begin + first, begin + stop
        if self._window is not None and first < self._window.first_row:
            self._rewind(first)
        parts = []
        while first < stop:
            window = self._window
            if window is None or window.stop_row <= first:
                self._open_next()
                continue
            end = min(stop, window.stop_row)
            parts.append(window.part(first, end))
            first = end
        self._forget(self._row_of(step - _NUM_STORED_STEPS))
        return parts

    def position(self, step: int) -> Any:
        """Position before a step, as JSON."""
        rows = self._row_of(step)
        return {"rows": rows, "window": max(self._started_by(rows), key=lambda start: start.first_row)}

    def _row_of(self, step: int) -> int:
        """Number of the first row of a step."""
        return self._rows_before + (step - self._step) * self._rows_per_step

    def _started_by(self, row: int) -> list[WindowPosition]:
        starts = [start for start in self._starts if start.first_row <= row]
        return starts or [self._starts[0]]

    def _open_next(self) -> None:
        self.start()
        start = self._starts[-1]
        assert self._requested is not None
        following = self._builder.wait(self.number)
        self._window = _Window(self._plan, self.number, start, self._requested)
        self._folder.discard(self._requested)
        self._starts = (*self._starts, following)
        self._request(following)

    def _request(self, start: WindowPosition) -> None:
        self._requested = self._folder.new()
        self._builder.request(self.number, start, self._requested)

    def _rewind(self, row: int) -> None:
        """Go back to the window of an earlier row."""
        self._drain()
        starts = [start for start in self._starts if start.first_row <= row]
        self._starts, self._window = tuple(starts), None
        if not starts:
            raise ValueError(f"row {row} lies before the windows that are remembered")

    def _drain(self) -> None:
        """Wait for the window that was requested, and discard it."""
        if self._requested is not None:
            self._builder.wait(self.number)
            self._folder.discard(self._requested)
            self._requested = None

    def _forget(self, row: int) -> None:
        """Forget the beginnings of windows before that of a row."""
        first = max((start.first_row for start in self._starts if start.first_row <= row), default=0)
        self._starts = tuple(start for start in self._starts if start.first_row >= first)
