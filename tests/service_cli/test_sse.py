"""Server-sent events out of bytes that come in any pieces."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from service.client.sse import ServerSentEvent, messages

TEXT = (
    b"\xef\xbb\xbf: hello\n\n"
    b'id: 1\nevent: log\ndata: {"message": "line \xe2\x80\xa8 separator and \xc2\x85 inside"}\n\n'
    b"id: 2\r\nevent: metric\r\ndata: one\r\ndata: two\r\n\r\n"
    b": ping\n\n"
    b"id: 3\rdata:tight\r\r"
    b"event: state\n\n"
    b"data: kept id\n\n"
    b"id: 9\ndata: cut off in the mid"
)
MESSAGES = [
    ServerSentEvent("log", '{"message": "line \u2028 separator and \x85 inside"}', "1"),
    ServerSentEvent("metric", "one\ntwo", "2"),
    ServerSentEvent("message", "tight", "3"),
    ServerSentEvent("message", "kept id", "3"),
]


def test_whole_messages_by_the_standards_rules() -> None:
    assert list(messages([TEXT])) == MESSAGES


@given(st.lists(st.integers(0, len(TEXT)), max_size=30))
def test_how_the_bytes_are_cut_makes_no_difference(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(TEXT)]
    pieces = [TEXT[a:b] for a, b in pairwise(edges)]
    assert list(messages(pieces)) == MESSAGES


def test_byte_by_byte() -> None:
    assert list(messages(bytes([byte]) for byte in TEXT)) == MESSAGES
