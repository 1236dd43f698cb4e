"""A run's steps as rows: numbers in columns, for a terminal and for other programs."""

import csv
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO

from rich.table import Table

from service.cli.view.amounts import moment
from service.cli.view.printable import printable

KEYS = ("step", "time", "attempt")


def metric_rows(points: Sequence[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """A flat row a step: `held_out.seen` of what is nested, `layers.0.dropped` of what is listed.

    With `names`, only what they name and what lies below it. Lists of numbers, such as the loads of experts, are
    columns only where they are named.
    """
    return [
        {key: point.get(key) for key in KEYS}
        | {name: value for name, value in _flat(point, names) if not names or _named(name, names)}
        for point in points
    ]


def columns(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Every column that any row has, in the order in which they come up: some steps are evaluated, others are not."""
    return list(dict.fromkeys((*KEYS, *(name for row in rows for name in row))))


def write_csv(rows: Sequence[dict[str, Any]], out: TextIO) -> None:
    """RFC 4180, with a head; what a step does not have is empty."""
    writer = csv.DictWriter(out, columns(rows), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def metric_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    names = columns(rows)
    for name in names:
        table.add_column(printable(name).upper(), justify="left" if name == "time" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(_shown(name, row.get(name)) for name in names))
    return table


def _flat(point: dict[str, Any], names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for name, value in point.items():
        if name not in KEYS:
            yield from _leaves(name, value, names)


def _leaves(name: str, value: Any, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, below in value.items():
            yield from _leaves(f"{name}.{key}", below, names)
    elif isinstance(value, list):
        if any(isinstance(each, dict) for each in value) or _named(name, names):
            for index, below in enumerate(value):
                yield from _leaves(f"{name}.{index}", below, names)
    elif value is None or isinstance(value, int | float):
        yield name, value


def _named(name: str, names: Iterable[str]) -> bool:
    """Whether one of `names` is this column, or what it lies below."""
    return any(name == each or name.startswith(f"{each}.") for each in names)


def _shown(name: str, value: Any) -> str:
    if name == "time":
        return moment(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else f"{value:,}"
