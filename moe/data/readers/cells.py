"""Cells of Arrow's columns as plain values."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from moe.spec import ProblemCode

_JSON = "arrow.json"
"""Name of the type of JSON text, which `datasets` uses for objects with different keys."""
_Convert = Callable[[Any], Any]


class Row(NamedTuple):
    """A row, or what is wrong with it."""

    values: dict[str, Any]
    num_chars: int
    """Characters of its text."""
    problem: tuple[ProblemCode, str, str] | None = None
    """(code, rule, remedy)"""


class Cells:
    """Converts columns of these Arrow fields. Nulls in objects are left out, since they fill keys that only other rows
    use; columns of JSON text are parsed."""

    def __init__(self, fields: Sequence[Any]) -> None:
        self._columns = [(str(field.name), _converter(field)) for field in fields]

    def rows(self, batch: Any) -> Iterator[Row]:
        """Rows of a record batch with these columns. Its offsets are checked first: in a damaged file they may point
        anywhere."""
        import pyarrow

        try:
            batch.validate(full=True)
        except pyarrow.ArrowInvalid:
            for index in range(batch.num_rows):
                problem = self._damage(batch.slice(index, 1))
                yield from self._rows(batch.slice(index, 1)) if problem is None else [Row({}, 0, problem)]
        else:
            yield from self._rows(batch)

    def _rows(self, batch: Any) -> Iterator[Row]:
        columns = [column.to_pylist() for column in batch.columns]
        for cells in zip(*columns, strict=True):
            values: dict[str, Any] = {}
            problem: tuple[ProblemCode, str, str] | None = None
            for (name, convert), cell in zip(self._columns, cells, strict=True):
                try:
                    values[name] = cell if convert is None else convert(cell)
                except (ValueError, RecursionError) as error:
                    problem = "invalid_syntax", f"has a {name!r} that is not JSON: {error}", "write it again"
            yield Row(values, sum(map(_num_chars, values.values())), problem)

    def _damage(self, row: Any) -> tuple[ProblemCode, str, str] | None:
        import pyarrow

        for (name, _), column in zip(self._columns, row.columns, strict=True):
            try:
                column.validate(full=True)
            except pyarrow.ArrowInvalid as error:
                if "UTF8" in str(error):
                    return "invalid_encoding", f"has a {name!r} that is not UTF-8", "write text, or remove the row"
                return "unreadable", f"has a damaged {name!r}: {error}", "write the file again"
        return None


def _num_chars(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_num_chars, value.values()))
    return sum(map(_num_chars, value)) if isinstance(value, list) else 0


def _converter(field: Any) -> _Convert | None:
    """Conversion of the values that pyarrow gives for a field; None if they stay as they are."""
    import pyarrow

    kind, metadata = field.type, field.metadata or {}
    if getattr(kind, "extension_name", None) == _JSON or metadata.get(b"ARROW:extension:name") == _JSON.encode():
        return lambda value: None if value is None else json.loads(value)
    if pyarrow.types.is_struct(kind):
        return _struct_converter([kind.field(index) for index in range(kind.num_fields)])
    if (
        pyarrow.types.is_list(kind)
        or pyarrow.types.is_large_list(kind)
        or pyarrow.types.is_fixed_size_list(kind)
        or "list_view" in str(kind).partition("<")[0]
    ):
        convert = _converter(kind.value_field)
        if convert is not None:
            return lambda value: None if value is None else [convert(element) for element in value]
    return None


def _struct_converter(fields: Sequence[Any]) -> _Convert:
    converters = {field.name: _converter(field) for field in fields}

    def convert(value: Any) -> Any:
        if value is None:
            return None
        return {
            name: element if (own := converters[name]) is None else own(element)
            for name, element in value.items()
            if element is not None
        }

    return convert
