"""Text files."""

import codecs
from collections.abc import Iterator

from moe.data.compression import DAMAGED
from moe.data.data_file import DataFile
from moe.data.faults import Faults
from moe.data.file_kinds import HEAD_BYTES, not_text_problem
from moe.data.readers.reader import MAX_RECORD_BYTES, Record, RecordReader
from moe.spec import SpecError

TEXT = "text"
"""Key of the text in a record."""


class TextReader(RecordReader):
    """One record per file: its text as it is, except for a byte-order mark."""

    def records(self, file: DataFile, faults: Faults, limit_bytes: int | None = None) -> Iterator[Record]:
        faults.read()
        try:
            text = _text(file, limit_bytes)
        except SpecError as error:
            faults.add(error)
        else:
            yield Record("", {TEXT: text}, len(text))


def _text(file: DataFile, limit_bytes: int | None) -> str:
    max_bytes = MAX_RECORD_BYTES if limit_bytes is None else min(limit_bytes, MAX_RECORD_BYTES)
    try:
        with file.location.open() as stream:
            content = stream.read(max_bytes + 1)
    except DAMAGED as error:
        raise file.unreadable(error) from None
    if len(content) > MAX_RECORD_BYTES:
        raise file.broken("too_large", f"is longer than {MAX_RECORD_BYTES} bytes", "split it into several files")
    if (reason := not_text_problem(content[:HEAD_BYTES])) is not None:
        raise file.broken(*reason)
    is_cut, text = len(content) > max_bytes, content.removeprefix(codecs.BOM_UTF8)
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        if not is_cut or error.start < len(text) - 4:  # else a character that the limit cut
            line = 1 + text.count(b"\n", 0, error.start)
            byte = len(content) - len(text) + error.start + 1
            rule = f"is not UTF-8 text at byte {byte} of the file"
            raise file.broken("invalid_encoding", rule, "save the file as UTF-8", f", line {line}") from None
        return text[: error.start].decode()
