"""Lines of a user's text file, numbered from 1."""

from collections.abc import Iterator

from moe.data.compression import DAMAGED
from moe.data.data_file import DataFile
from moe.data.faults import Faults
from moe.data.file_kinds import HEAD_BYTES, not_text_problem
from moe.spec import ProblemCode, SpecError

MAX_LINE_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"


class Lines:
    """(number, line) of a UTF-8 file. Lines end with a newline only.

    Stops after `limit_bytes` (None: never), but not before the first line; `has_ended` says whether the end of the file
    was reached. Raises SpecError, with file and line, for unreadable content; `remedy` is for lines that are too long.
    With `faults`, a line that is too long or not UTF-8 is added to them and read as empty.
    """

    def __init__(
        self,
        file: DataFile,
        limit_bytes: int | None = None,
        *,
        max_line_bytes: int = MAX_LINE_BYTES,
        remedy: str = "write one pair per line",
        faults: Faults | None = None,
    ) -> None:
        self.file = file
        self.has_ended = False
        self.limit_bytes, self.max_line_bytes = limit_bytes, max_line_bytes
        self._remedy = remedy
        self._faults = faults

    def broken(self, code: ProblemCode, number: int, rule: str, remedy: str) -> SpecError:
        """Error in line `number`."""
        return self.file.broken(code, rule, remedy, f", line {number}")

    def __iter__(self) -> Iterator[tuple[int, str]]:
        number, num_bytes = 0, 0
        try:
            with self.file.location.open() as file:
                while self.limit_bytes is None or num_bytes < self.limit_bytes or number == 0:
                    raw = file.readline(self.max_line_bytes + 1)
                    if not raw:
                        self.has_ended = True
                        return
                    number, num_bytes = number + 1, num_bytes + len(raw)
                    yield number, self._line(number, raw)
                    while len(raw) > self.max_line_bytes and not raw.endswith(b"\n"):  # the rest of a long line
                        if self.limit_bytes is not None and num_bytes >= self.limit_bytes:
                            return
                        raw = file.readline(self.max_line_bytes + 1)
                        num_bytes += len(raw)
        except DAMAGED as error:
            raise self.file.unreadable(error, f", line {number + 1}") from None

    def _line(self, number: int, raw: bytes) -> str:
        if number == 1 and (reason := not_text_problem(raw[:HEAD_BYTES])) is not None:
            raise self.file.broken(*reason)
        try:
            return self._text(number, raw)
        except SpecError as error:
            if self._faults is None:
                raise
            self._faults.read()
            self._faults.add(error)
            return ""

    def _text(self, number: int, raw: bytes) -> str:
        if len(raw) > self.max_line_bytes:
            raise self.broken("too_large", number, f"is longer than {self.max_line_bytes} bytes", self._remedy)
        if number == 1:
            raw = raw.removeprefix(_BOM)
        try:
            return raw.decode("utf-8").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            rule = f"is not UTF-8 text at byte {error.start + 1} of the line"
            raise self.broken("invalid_encoding", number, rule, "save the file as UTF-8") from None
