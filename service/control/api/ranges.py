"""Byte ranges of a download (RFC 9110, 14): the part of a file that a request asks for."""

import re
from dataclasses import dataclass

from moe.spec.errors import Problem
from service.control.errors import OutOfRange

_RANGE = re.compile(r"bytes=\s*(?P<first>[0-9]{0,18})-(?P<last>[0-9]{0,18})\s*", re.IGNORECASE)


@dataclass(frozen=True)
class ByteRange:
    start: int
    end: int
    """Exclusive."""

    def content_range(self, size_bytes: int) -> str:
        return f"bytes {self.start}-{self.end - 1}/{size_bytes}"


def requested_range(range: str | None, if_range: str | None, size_bytes: int, etag: str) -> ByteRange | None:
    """Requested part of a file; None for the whole, as for several ranges, for a header that is no range, and for
    another version of the file in `if_range`. Raises OutOfRange for a part of which the file has nothing."""
    match = _RANGE.fullmatch(range or "")
    if match is None or (if_range is not None and if_range.strip() != etag):
        return None
    first, last = match["first"], match["last"]
    if not first and not last:
        return None
    if first and last and int(last) < int(first):
        return None
    start = int(first) if first else max(0, size_bytes - int(last))
    end = min(int(last) + 1, size_bytes) if first and last else size_bytes
    if start >= end:
        rule = f"must begin before the end of the file: it has {size_bytes} bytes"
        remedy = "check the file: the download is complete, or of another file"
        problem = Problem("out_of_range", "header.range", range, rule, remedy)
        raise OutOfRange(str(problem), problem, headers={"content-range": f"bytes */{size_bytes}", "etag": etag})
    return ByteRange(start, end)
