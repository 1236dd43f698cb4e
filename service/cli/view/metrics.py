"""A run's steps as rows: numbers in columns, for a terminal and for other programs."""

import csv
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO

from rich.text import Text

from service.cli.view.amounts import moment
from service.cli.view.listing import Column
from service.cli.view.printable import printable

KEYS = ("step", "time", "attempt")
_LEAST_ASKED_FOR = {"attempt": 10_000, "time": 9_999}
"""Columns to be left out before any figure."""


def metric_rows(points: Sequence[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """A flat row a step: `held_out.seen` of what is nested, `layers.0.dropped` of what is listed.

    With `names`, only what they name and what lies below it. Lists of numbers, such as the loads of experts, are
    columns only where they are named.
    """
    return [
        {key: point.get(key) for key in KEYS}
        | {name: value for name, value in _flat(point, names) if not names or _matches_column(name, names)}
        for point in points
    ]


def columns(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Columns of all rows, in order of appearance: some steps are evaluated, others are not."""
    return list(dict.fromkeys((*KEYS, *(name for row in rows for name in row))))


def has_column(rows: Sequence[dict[str, Any]], name: str) -> bool:
    """Whether any row has this column, or one below it."""
    return any(_matches_column(column, [name]) for row in rows for column in row)


def write_csv(rows: Sequence[dict[str, Any]], out: TextIO) -> None:
    """RFC 4180, with a head; what a step does not have is empty."""
    writer = csv.DictWriter(out, columns(rows), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def metric_columns(rows: Sequence[dict[str, Any]]) -> list[Column]:
    """Columns of the table: figures are never cut, the last ones are left out where there is no room, then attempt and
    time."""
    names = columns(rows)
    return [
        Column(
            printable(name).upper(),
            [Text(_format_value(name, row.get(name))) for row in rows],
            gives_way=_LEAST_ASKED_FOR.get(name, 0 if name == "step" else place),
            right=name != "time",
        )
        for place, name in enumerate(names)
    ]


def _flat(point: dict[str, Any], names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for name, value in point.items():
        if name not in KEYS:
            yield from _leaves(name, value, names)


def _leaves(name: str, value: Any, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, below in value.items():
            yield from _leaves(f"{name}.{key}", below, names)
    elif isinstance(value, list):
        if any(isinstance(element, dict) for element in value) or _matches_column(name, names):
            for index, below in enumerate(value):
                yield from _leaves(f"{name}.{index}", below, names)
    elif value is None or isinstance(value, int | float):
        yield name, value


def _matches_column(name: str, names: Iterable[str]) -> bool:
    """Whether one of `names` is this column, or what it lies below."""
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in names)


def _format_value(name: str, value: Any) -> str:
    if name == "time":
        return moment(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else f"{value:,}"
