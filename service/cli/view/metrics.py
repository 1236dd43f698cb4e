"""Metrics of a run's steps as rows and columns."""

import csv
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO

from rich.text import Text

from service.cli.view.amounts import moment
from service.cli.view.listing import Column
from service.cli.view.printable import printable

KEYS = ("step", "time", "attempt")
_LEAST_ASKED_FOR = {"attempt": 10_000, "time": 9_999}
"""Columns that are dropped before any metric."""


def metric_rows(points: Sequence[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """A flat row per step: `held_out.seen` for nested values, `layers.0.dropped` for lists; with `names`, only these
    and nested ones. Lists of numbers (expert loads) become columns only if named."""
    return [
        {key: point.get(key) for key in KEYS}
        | {name: value for name, value in _flat(point, names) if not names or _matches_column(name, names)}
        for point in points
    ]


def columns(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Columns of all rows, in order of appearance."""
    return list(dict.fromkeys((*KEYS, *(name for row in rows for name in row))))


def has_column(rows: Sequence[dict[str, Any]], name: str) -> bool:
    """Whether any row has this column or a nested one."""
    return any(_matches_column(column, [name]) for row in rows for column in row)


def write_csv(rows: Sequence[dict[str, Any]], out: TextIO) -> None:
    """RFC 4180 with a header; missing values are empty."""
    writer = csv.DictWriter(out, columns(rows), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def metric_columns(rows: Sequence[dict[str, Any]]) -> list[Column]:
    """Columns of the table. Numbers are never cut: attempt and time are dropped first, then the last metrics."""
    names = columns(rows)
    return [
        Column(
            printable(name).upper(),
            [Text(_format_value(name, row.get(name))) for row in rows],
            can_shrink=_LEAST_ASKED_FOR.get(name, 0 if name == "step" else index),
            right=name != "time",
        )
        for index, name in enumerate(names)
    ]


def _flat(point: dict[str, Any], names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for name, value in point.items():
        if name not in KEYS:
            yield from _leaves(name, value, names)


def _leaves(name: str, value: Any, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _leaves(f"{name}.{key}", child, names)
    elif isinstance(value, list):
        if any(isinstance(element, dict) for element in value) or _matches_column(name, names):
            for index, child in enumerate(value):
                yield from _leaves(f"{name}.{index}", child, names)
    elif value is None or isinstance(value, int | float):
        yield name, value


def _matches_column(name: str, names: Iterable[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in names)


def _format_value(name: str, value: Any) -> str:
    if name == "time":
        return moment(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else f"{value:,}"
