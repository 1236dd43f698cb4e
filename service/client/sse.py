"""Server-sent events from bytes, by the WHATWG rules."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class ServerSentEvent:
    """One complete event; those cut off by a broken connection are dropped."""

    event: str
    data: str
    id: str


def messages(chunks: Iterable[bytes]) -> Iterator[ServerSentEvent]:
    """Every complete message in the stream."""
    event, id, data = "message", "", list[str]()
    for raw in lines(chunks):
        line = raw.decode("utf-8", errors="replace")
        if not line:
            if data:
                yield ServerSentEvent(event, "\n".join(data), id)
            event, data = "message", []
            continue
        field, _, value = line.partition(":")  # a comment has an empty field
        value = value.removeprefix(" ")
        if field == "data":
            data.append(value)
        elif field == "event":
            event = value or "message"
        elif field == "id" and "\0" not in value:
            id = value


def lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Lines ended by LF, CR or CRLF only: U+2028 and U+0085 are data."""
    rest, first, after_cr = b"", True, False
    for chunk in chunks:
        if after_cr and chunk.startswith(b"\n"):
            chunk = chunk[1:]
        if not chunk:
            continue
        after_cr = chunk.endswith(b"\r")
        *full_lines, rest = (rest + chunk).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        for line in full_lines:
            yield line.removeprefix(BOM) if first else line
            first = False
