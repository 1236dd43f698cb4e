"""Lines of a user's text file, numbered from 1."""

import lzma
import zlib
from collections.abc import Iterator

from moe.data.locations import Location
from moe.spec import Problem, SpecError

MAX_LINE_BYTES = 1 << 20


class Lines:
    """Iterates (number, line) over a UTF-8 file; lines end in a newline and in nothing else.

    Stops after `limit_bytes` (None: never), but not before the first line; `ended` tells whether the file's
    end was reached. Raises SpecError at `place`, naming file and line, for what cannot be read; `remedy` is that of a
    line that is too long.
    """

    def __init__(
        self,
        place: str,
        location: Location,
        limit_bytes: int | None = None,
        *,
        max_line_bytes: int = MAX_LINE_BYTES,
        remedy: str = "write one pair a line",
    ) -> None:
        self.place = place
        self.location = location
        self.ended = False
        self._limit_bytes = limit_bytes
        self._max_line_bytes, self._remedy = max_line_bytes, remedy

    def broken(self, number: int, rule: str, remedy: str) -> SpecError:
        """The error for line `number`."""
        return SpecError(Problem(self.place, f"{self.location}, line {number}", rule, remedy))

    def __iter__(self) -> Iterator[tuple[int, str]]:
        number, num_bytes = 0, 0
        try:
            with self.location.open() as file:
                while self._limit_bytes is None or num_bytes < self._limit_bytes or number == 0:
                    raw = file.readline(self._max_line_bytes + 1)
                    if not raw:
                        self.ended = True
                        return
                    number, num_bytes = number + 1, num_bytes + len(raw)
                    yield number, self._text(number, raw)
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            raise self.broken(number + 1, f"cannot be read: {error}", "make the file whole again") from None

    def _text(self, number: int, raw: bytes) -> str:
        if len(raw) > self._max_line_bytes:
            raise self.broken(number, f"is longer than {self._max_line_bytes} bytes", self._remedy)
        if number == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        try:
            return raw.decode("utf-8").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            rule = f"is not UTF-8 text at byte {error.start + 1} of the line"
            raise self.broken(number, rule, "save the file as UTF-8") from None
