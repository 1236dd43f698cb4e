"""Curves of a job: its recorded numbers by step, as columns in memory, thinned so that extremes stay visible."""

import io
import json
import math
import threading
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json

from service.control.report.event_text import without_layers
from service.control.store.events import MetricRow

MAX_NAMES = 500
"""Maximum number of curves of a job. Names that appear later are left out, and only in the job's metrics."""
NESTED = ("held_out", "numbers", "source_tokens")
"""Fields of a step record that hold numbers by name: `held_out.books`."""
WITHOUT_NUMBER = frozenset({*NESTED, "samples", "label_loads"})
"""Fields of a step record that are not numbers themselves, and that many steps lack."""
_SKIPPED = frozenset({"step", "time", "layers", "samples", "label_loads"})
_ABSENT = object()
_ROW_KEYS = ("ids", "steps", "times", "attempts", "groups")
"""Names of the rows' keys in an archive."""
_NUMBERS = frozenset({float, int, type(None)})
"""Types of numbers; not bool, which is an int to `isinstance`."""


@dataclass
class _Column:
    """Values of one name, and the index of each value's row in the job's columns. NaN: recorded, but not finite."""

    row: "array[int]" = field(default_factory=lambda: array("q"))
    value: "array[float]" = field(default_factory=lambda: array("d"))


@dataclass(frozen=True)
class Curve:
    """Points of one name in order of steps."""

    step: list[int]
    time_us: list[int]
    attempt: list[int | None]
    value: list[float | None]
    """None: not a number, or infinite."""


@dataclass
class JobCurves:
    """Columns of one job, extended by each read."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    read_to: int = 0
    """All metric events up to this id are read."""
    _ids: "array[int]" = field(default_factory=lambda: array("q"))
    _steps: "array[int]" = field(default_factory=lambda: array("q"))
    _times: "array[int]" = field(default_factory=lambda: array("q"))
    _attempts: "array[int]" = field(default_factory=lambda: array("q"))
    _groups: "array[int]" = field(default_factory=lambda: array("q"))
    _columns: dict[str, _Column] = field(default_factory=dict)
    _texts: dict[str, _Column] = field(default_factory=dict)
    """Rows with a field that is not a number: samples, or numbers by name. The values are 0."""
    has_more_names: bool = False
    """Whether names beyond `MAX_NAMES` were left out."""
    _repeats: bool = False
    """Whether a step was recorded more than once, or out of order."""

    @property
    def num_bytes(self) -> int:
        """Approximate memory of the columns."""
        columns = [*self._columns.values(), *self._texts.values()]
        return 8 * (5 * len(self._ids) + 2 * sum(len(column.row) for column in columns))

    @property
    def names(self) -> list[str]:
        return list(self._columns)

    def extend(self, rows: Sequence[MetricRow]) -> None:
        """Append records in order of their ids."""
        records = _parse([row.data for row in rows])  # first: a failure must leave the columns as they are
        first = len(self._ids)
        ids, steps, attempts, groups, times, _ = zip(*rows, strict=True)
        attempts = tuple(attempt or 0 for attempt in attempts)
        groups = tuple(-1 if group is None else group for group in groups)
        self._append_rows(ids, steps, times, attempts, groups)
        for name in dict.fromkeys(chain.from_iterable(records)):
            if name in WITHOUT_NUMBER:
                row_indices = [row_index for row_index, record in enumerate(records, first) if record.get(name)]
                column = self._texts.setdefault(name, _Column())
                column.row.extend(row_indices)
                column.value.extend([0.0] * len(row_indices))
            if name in NESTED:
                nested = [record.get(name) for record in records]
                inner = [entry if isinstance(entry, dict) else {} for entry in nested]
                for key in dict.fromkeys(chain.from_iterable(inner)):
                    self._append(f"{name}.{key}", first, [entry.get(key, _ABSENT) for entry in inner])
            elif name not in _SKIPPED:
                self._append(name, first, [record.get(name, _ABSENT) for record in records])

    def packed(self) -> bytes:
        """The columns as a NumPy archive, which `extend_packed` reads."""
        columns = [*self._columns.values(), *self._texts.values()]
        rows = [np.array(column.row, dtype=np.int64) for column in columns]
        values = [np.array(column.value, dtype=np.float64) for column in self._columns.values()]
        names = json.dumps([list(self._columns), list(self._texts)]).encode()
        keys = [np.array(key, dtype=np.int64) for key in self._row_keys]
        arrays: dict[str, NDArray[Any]] = {
            "names": np.frombuffer(names, dtype=np.uint8),
            "has_more_names": np.array(self.has_more_names),
            "lengths": np.array([len(column.row) for column in columns], dtype=np.int64),
            "places": np.concatenate([np.empty(0, dtype=np.int64), *rows]),
            "values": np.concatenate([np.empty(0, dtype=np.float64), *values]),
            **dict(zip(_ROW_KEYS, keys, strict=True)),
        }
        stream = io.BytesIO()
        np.savez_compressed(stream, allow_pickle=False, **arrays)
        return stream.getvalue()

    def extend_packed(self, archive: bytes) -> None:
        """Append the columns of an archive, whose events follow those appended so far."""
        with np.load(io.BytesIO(archive), allow_pickle=False) as arrays:
            keys = [arrays[name] for name in _ROW_KEYS]
            names, texts = json.loads(arrays["names"].tobytes())
            self.has_more_names |= "has_more_names" in arrays and bool(arrays["has_more_names"])
            lengths, rows, values = arrays["lengths"].tolist(), arrays["places"] + len(self._ids), arrays["values"]
        if not len(keys[0]):
            return
        self._append_rows(*keys)
        ends = list(accumulate(lengths))
        for index, name in enumerate((*names, *texts)):
            entries = slice(ends[index] - lengths[index], ends[index])
            is_text = index >= len(names)
            column = self._texts.setdefault(name, _Column()) if is_text else self._column(name)
            if column is not None:
                column.row.frombytes(rows[entries].tobytes())
                column.value.frombytes((np.zeros(lengths[index]) if is_text else values[entries]).tobytes())

    @property
    def _row_keys(self) -> "tuple[array[int], ...]":
        """In the order of `_ROW_KEYS`."""
        return self._ids, self._steps, self._times, self._attempts, self._groups

    def _append_rows(self, *keys: Sequence[int] | NDArray[np.int64]) -> None:
        """Append the keys of rows, in the order of `_ROW_KEYS`."""
        _, steps, *_ = arrays = [np.asarray(key, dtype=np.int64) for key in keys]
        self._repeats = (
            self._repeats or bool(self._steps and steps[0] <= self._steps[-1]) or bool((np.diff(steps) <= 0).any())
        )
        for column, values in zip(self._row_keys, arrays, strict=True):
            column.frombytes(values.tobytes())

    def _column(self, name: str) -> _Column | None:
        """The column of a name; None for a new one beyond `MAX_NAMES`."""
        column = self._columns.get(name)
        if column is None and len(self._columns) < MAX_NAMES:
            column = self._columns[name] = _Column()
        self.has_more_names |= column is None
        return column

    def _append(self, name: str, first: int, values: Sequence[Any]) -> None:
        """Append the numbers among `values`, of the rows from `first` on."""
        types = set(map(type, values))
        rows: Iterable[int] = range(first, first + len(values))
        if types != {float}:
            entries = [(row, value) for row, value in zip(rows, values, strict=True) if type(value) in _NUMBERS]
            rows, values = [row for row, _ in entries], [_float(value) for _, value in entries]
        if not values:
            return
        if (column := self._column(name)) is not None:
            column.row.extend(rows)
            column.value.extend(values)

    def step_ids(self, since_step: int, until_step: int | None, max_points: int) -> list[int]:
        """Ids of at most `max_points` events, evenly spread over the recorded steps, including first and last."""
        all_rows = self._in_order(None)
        rows = all_rows[self._range(all_rows, since_step, until_step)]
        return [self._ids[row] for row in _spread(rows, max_points)]

    def num_steps(self) -> int:
        """Number of distinct recorded steps."""
        return len(self._in_order(None))

    def curve(self, name: str, since_step: int, until_step: int | None, max_points: int) -> Curve:
        """At most `max_points` points of a name, including the extremes of each stretch, the first value that is not
        finite in it, and both ends. Of a repeated step, the newest attempt's and group's."""
        column = self._columns.get(name) or _Column()
        entries = self._thinned(column, since_step, until_step, max_points)
        rows = [column.row[entry] for entry in entries]
        return Curve(
            [self._steps[row] for row in rows],
            [self._times[row] for row in rows],
            [self._attempts[row] or None for row in rows],
            [value if math.isfinite(value := column.value[entry]) else None for entry in entries],
        )

    def curve_ids(self, name: str, since_step: int, max_points: int) -> list[int]:
        """Ids of the events of `curve`."""
        column = self._columns[name]
        return [self._ids[column.row[entry]] for entry in self._thinned(column, since_step, None, max_points)]

    def text_ids(self, name: str, since_step: int, until_step: int | None, max_points: int) -> list[int]:
        """Ids of at most `max_points` events with a field of `WITHOUT_NUMBER`, evenly spread, the last one included."""
        column = self._texts.get(name) or _Column()
        entries = self._in_order(column)
        rows = np.array(column.row, dtype=np.int64)[entries]
        rows = rows[self._range(rows, since_step, until_step)]
        return [self._ids[row] for row in _spread(rows, max_points)]

    def _thinned(self, column: _Column, since_step: int, until_step: int | None, max_points: int) -> NDArray[np.int64]:
        entries = self._in_order(column)
        rows = np.array(column.row, dtype=np.int64)[entries]
        in_range = entries[self._range(rows, since_step, until_step)]
        return in_range[thin(np.array(column.value, dtype=np.float64)[in_range], max_points)]

    def _in_order(self, column: _Column | None) -> NDArray[np.int64]:
        """Indices of a column's entries (of all rows: None) by step, only the newest of each."""
        num_entries = len(self._ids) if column is None else len(column.row)
        entries = np.arange(num_entries, dtype=np.int64)
        if not self._repeats or not num_entries:
            return entries
        rows = entries if column is None else np.array(column.row, dtype=np.int64)
        steps = np.array(self._steps, dtype=np.int64)[rows]
        attempts, groups = (np.array(key, dtype=np.int64)[rows] for key in (self._attempts, self._groups))
        order: NDArray[np.int64] = np.lexsort((rows, groups, attempts, steps))
        is_newest: NDArray[np.bool_] = np.append(np.diff(steps[order]) != 0, True)
        return order[is_newest]

    def _range(self, rows: NDArray[np.int64], since_step: int, until_step: int | None) -> slice:
        """Slice of `rows`, which are in order of steps, from `since_step` to `until_step`."""
        steps = np.array(self._steps, dtype=np.int64)[rows]
        end = len(steps) if until_step is None else int(np.searchsorted(steps, until_step, side="right"))
        return slice(int(np.searchsorted(steps, since_step)), end)


def _spread(rows: NDArray[np.int64], max_points: int) -> NDArray[np.int64]:
    """At most `max_points` of these rows, evenly spread, including the last one, and the first one if there are two."""
    if len(rows) <= max_points:
        return rows
    return rows[np.linspace(len(rows) - 1, 0, max_points).round().astype(np.int64)[::-1]]


def thin(values: NDArray[np.float64], max_points: int) -> NDArray[np.int64]:
    """Indices of at most `max_points` values: both ends, and the least, greatest and first NaN of equal stretches."""
    num_values = len(values)
    if num_values <= max_points:
        return np.arange(num_values, dtype=np.int64)
    if max_points < 3:
        return np.array([0, num_values - 1][-max_points:], dtype=np.int64)
    missing = np.isnan(values)
    per_stretch = 3 if missing.any() else 2
    num_stretches = max(1, (max_points - 2) // per_stretch)
    length = -(-num_values // num_stretches)
    padding = (0, -num_values % length)
    low = np.pad(np.where(missing, np.inf, values), padding, constant_values=np.inf).reshape(-1, length)
    high = np.pad(np.where(missing, -np.inf, values), padding, constant_values=-np.inf).reshape(-1, length)
    is_missing = np.pad(missing, padding).reshape(-1, length)
    starts = np.arange(len(low)) * length
    has_number = np.isfinite(low).any(axis=1)
    extremes = [
        (starts + low.argmin(axis=1))[has_number],
        (starts + high.argmax(axis=1))[has_number],
        (starts + is_missing.argmax(axis=1))[is_missing.any(axis=1)],
    ]
    inner = np.unique(np.concatenate(extremes))
    ends = np.array([0, num_values - 1])
    indices = np.union1d(inner, ends)
    # With one stretch and few points, the ends come before its extremes.
    return indices if len(indices) <= max_points else np.union1d(inner[: max_points - 2], ends)[:max_points]


def _parse(texts: Sequence[str]) -> list[dict[str, Any]]:
    """Records without their expert loads. All texts are parsed in one call, since calls dominate the time of short
    texts."""
    try:
        records = from_json(f"[{','.join(map(without_layers, texts))}]")
    except ValueError:
        records = [from_json(text) for text in texts]
    return [record if isinstance(record, dict) else {} for record in records]


def _float(number: float | None) -> float:
    """The number, or NaN for null, which stands for a number that is not finite."""
    try:
        return math.nan if number is None else float(number)
    except OverflowError:  # an integer of hundreds of digits
        return math.nan
