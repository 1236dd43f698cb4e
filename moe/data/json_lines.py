"""Objects of a JSON Lines file, one per line, or of a JSON file that is one array."""

import codecs
import json
from collections.abc import Iterator
from typing import IO, NamedTuple

from moe.data.compression import DAMAGED
from moe.data.faults import Faults
from moe.data.lines import Lines
from moe.spec import ProblemCode, SpecError

_CHUNK_BYTES = 1 << 18
_HEAD_BYTES = 1 << 12
_SPACE = " \t\r\n"
_ONE_PER_LINE = "write one JSON object per line"


class JsonRow(NamedTuple):
    position: str
    """`, line 3` or `, item 3`, to be appended to the file's name."""
    values: dict[str, object]
    num_bytes: int
    """Approximate number of bytes of its text."""


def rows(lines: Lines, faults: Faults) -> Iterator[JsonRow]:
    """Objects of a file, in order: one per line, or the items of one array. Empty lines are skipped.

    Anything other than an object is added to `faults`. Raises SpecError, with file and line or item, if reading cannot
    continue.
    """
    is_array = _is_array(lines)
    for position, raw_value, num_bytes in _Items(lines) if is_array else _line_values(lines):
        faults.read()
        try:
            value = raw_value if is_array else _value(lines, position, str(raw_value))
            row = JsonRow(position, _object(lines, position, value), num_bytes)
        except SpecError as error:
            faults.add(error)
        else:
            yield row


def parse_object(lines: Lines, number: int, line: str) -> dict[str, object]:
    """Object on a line. Raises SpecError, with file and line, for anything else."""
    position = f", line {number}"
    return _object(lines, position, _value(lines, position, line))


def kind_of(value: object) -> str:
    """A JSON value's kind, in words."""
    names = {type(None): "null", bool: "a boolean", list: "a list", dict: "an object", str: "a string"}
    return names.get(type(value), "a number")


def _value(lines: Lines, position: str, line: str) -> object:
    """Parse a line as JSON. Raises SpecError."""
    try:
        value: object = json.loads(line)
    except json.JSONDecodeError as error:
        rule = f"is not JSON: {error.msg} at column {error.colno}"
        raise lines.file.broken("invalid_syntax", rule, _ONE_PER_LINE, position) from None
    except (RecursionError, ValueError) as error:
        raise lines.file.broken("invalid_syntax", f"is not JSON: {error}", _ONE_PER_LINE, position) from None
    return value


def _object(lines: Lines, position: str, value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise lines.file.broken("wrong_type", f"is {kind_of(value)}, not an object", _ONE_PER_LINE, position)
    return value


def _line_values(lines: Lines) -> Iterator[tuple[str, object, int]]:
    opening: tuple[int, str] | None = None
    is_first = True
    for number, line in lines:
        if not line.strip():
            continue
        if is_first and line.strip() == "{":  # an object over several lines, or one bad record
            opening, is_first = (number, line), False
            continue
        if opening is not None:
            if line.lstrip()[0] in '"}':
                rule = "is a JSON object over several lines, not one per line"
                remedy = "write one JSON object per line, or one array of objects"
                raise lines.file.broken("invalid_syntax", rule, remedy)
            yield f", line {opening[0]}", opening[1], len(opening[1])
            opening = None
        is_first = False
        yield f", line {number}", line, len(line)
    if opening is not None:
        yield f", line {opening[0]}", opening[1], len(opening[1])


def _is_array(lines: Lines) -> bool:
    """Whether a file begins with a bracket, which no JSON Lines file does. Raises SpecError."""
    try:
        with lines.file.location.open() as file:
            head = file.read(_HEAD_BYTES)
    except DAMAGED as error:
        raise lines.file.unreadable(error) from None
    return head.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["


class _Items:
    """Items of a file that is one JSON array. They are read one by one, since such files may have gigabytes."""

    def __init__(self, lines: Lines) -> None:
        self._lines, self._limit_bytes = lines, lines.limit_bytes
        self._max_item_bytes = lines.max_line_bytes
        self._decode = json.JSONDecoder().raw_decode
        self._text, self._offset, self._has_more = "", 0, True
        self._number = 0
        """Number of the current item, for messages."""

    def __iter__(self) -> Iterator[tuple[str, object, int]]:
        to_text = codecs.getincrementaldecoder("utf-8-sig")()
        num_bytes = 0
        try:
            with self._lines.file.location.open() as file:
                self._next(file, to_text)  # the bracket
                self._offset += 1
                while self._next(file, to_text) != "]":
                    self._number += 1
                    value, end = self._value(file, to_text)
                    size, self._offset = end - self._offset, end
                    num_bytes += size
                    yield f", item {self._number}", value, size
                    if self._limit_bytes is not None and num_bytes >= self._limit_bytes:
                        return
                    self._separate(file, to_text)
                self._offset += 1
                if self._next(file, to_text):
                    raise self._broken("invalid_syntax", "is followed by more than one array", _ONE_PER_LINE)
                self._lines.has_ended = True
        except UnicodeDecodeError:
            raise self._broken("invalid_encoding", "is not UTF-8 text", "save the file as UTF-8") from None
        except DAMAGED as error:
            raise self._lines.file.unreadable(error, self._position()) from None

    def _separate(self, file: IO[bytes], to_text: codecs.IncrementalDecoder) -> None:
        """Skip the comma after an item; another item must follow it."""
        if self._next(file, to_text) == ",":
            self._offset += 1
            if self._next(file, to_text) == "]":
                raise self._broken("invalid_syntax", "is followed by a comma but no other item", "remove the comma")
        elif self._next(file, to_text) != "]":
            rule = "is followed by neither a comma nor the end of the array"
            raise self._broken("invalid_syntax", rule, "write the array again: json.dump(list_of_objects, file)")

    def _value(self, file: IO[bytes], to_text: codecs.IncrementalDecoder) -> tuple[object, int]:
        """The item that begins here, and its end."""
        while True:
            try:
                value, end = self._decode(self._text, self._offset)
                if end < len(self._text) or not self._has_more:
                    return value, end
                reason = "has no end"
            except json.JSONDecodeError as error:
                reason = error.msg
            except (RecursionError, ValueError) as error:
                raise self._broken("invalid_syntax", f"is not JSON: {error}", "correct it") from None
            if not self._has_more or len(self._text) - self._offset > self._max_item_bytes:
                raise self._broken("invalid_syntax", f"is not JSON: {reason}", "write the array again, with all items")
            self._read(file, to_text)

    def _next(self, file: IO[bytes], to_text: codecs.IncrementalDecoder) -> str:
        """The next character that is not white space; "" at the end of the file."""
        num_spaces = 0
        while True:
            while self._offset < len(self._text):
                if self._text[self._offset] not in _SPACE:
                    return self._text[self._offset]
                self._offset += 1
            if not self._has_more:
                return ""
            num_spaces += len(self._text)
            if num_spaces > self._max_item_bytes:
                rule = f"is followed by more than {self._max_item_bytes} bytes of white space"
                raise self._broken("too_large", rule, "write the array again, without it")
            self._read(file, to_text)

    def _read(self, file: IO[bytes], to_text: codecs.IncrementalDecoder) -> None:
        """Read at least as much as the buffer holds, since an incomplete item is parsed again each time."""
        self._text, self._offset = self._text[self._offset :], 0
        content = file.read(max(_CHUNK_BYTES, len(self._text)))
        self._has_more = bool(content)
        self._text += to_text.decode(content, final=not content)

    def _broken(self, code: ProblemCode, rule: str, remedy: str) -> SpecError:
        return self._lines.file.broken(code, rule, remedy, self._position())

    def _position(self) -> str:
        return f", item {self._number}" if self._number else ""
