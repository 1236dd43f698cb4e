"""Time that one connection has, by a clock of the tests' own: nobody waits, and nobody who is held up fails."""

import asyncio
import socket
import sys
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from uvicorn import Config
from uvicorn.server import ServerState

from service.control.listen.connection import ClientConnection, unsent_by_kernel
from service.control.listen.connections import ConnectionLimits, Connections
from tests.processes import DEADLINE_S, await_that


class Wire(asyncio.Transport):
    """Record of what a connection writes, and whether it is over; a stand-in, so that time can be made to pass."""

    def __init__(self, connection: socket.socket | None = None, num_bytes: int = 0) -> None:
        """`num_bytes`: waiting in this process, for `connection` to take them."""
        super().__init__({"socket": connection})
        self.sent, self.over, self._num_bytes = b"", False, num_bytes

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += bytes(data)

    def close(self) -> None:
        self.over = True

    abort = close

    def is_closing(self) -> bool:
        return self.over

    def get_write_buffer_size(self) -> int:
        return self._num_bytes


async def read_all(_scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 3000)), min_size=1, max_size=20))
@example([(19.0, 2000)] + [(3.0, 2000)] * 19)
def test_a_body_has_time_while_it_moves_and_no_more(pieces: list[tuple[float, int]]) -> None:
    """20 s, and one for each 500 bytes that came: a long body on a slow line arrives, and a trickle buys nothing."""
    limits = ConnectionLimits(
        9, 9, 9, header_timeout_s=10, body_timeout_s=20, min_body_bytes_per_s=500, write_timeout_s=60
    )

    async def go() -> None:
        loop = asyncio.get_running_loop()
        passed_s = 0.0
        loop.time = lambda: passed_s  # type: ignore[method-assign]
        config, wire = Config(read_all, log_config=None), Wire()
        config.load()
        connection = ClientConnection(
            Connections(limits), config=config, server_state=ServerState(), app_state={}, _loop=loop
        )
        connection.connection_made(wire)
        length = sum(num_bytes for _, num_bytes in pieces)
        connection.data_received(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % length)
        came = 0
        for pause_s, num_bytes in pieces:
            passed_s += pause_s
            connection.look()
            if passed_s > 20 + came / 500:
                assert wire.sent.startswith(b"HTTP/1.1 408")
                assert wire.over
                break
            assert not wire.over
            connection.data_received(b"x" * num_bytes)
            came += num_bytes
            await asyncio.sleep(0)  # the application takes it
        else:
            for _ in range(9):
                await asyncio.sleep(0)
            assert wire.sent.startswith(b"HTTP/1.1 200")
        connection.connection_lost(None)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            await task

    asyncio.run(go())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells what it has not sent")
def test_a_slow_reader_is_no_client_that_takes_nothing() -> None:
    """It takes what the system holds; nothing that waits in this process can move on before much of that is gone."""
    limits = ConnectionLimits(
        9, 9, 9, header_timeout_s=10_000, body_timeout_s=20, min_body_bytes_per_s=500, write_timeout_s=60
    )

    async def go(ours: socket.socket, theirs: socket.socket) -> None:
        loop, passed_s = asyncio.get_running_loop(), 0.0
        loop.time = lambda: passed_s  # type: ignore[method-assign]
        ours.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                ours.send(bytes(65536))
        config, wire = Config(read_all, log_config=None), Wire(ours, num_bytes=1000)
        config.load()
        connection = ClientConnection(
            Connections(limits), config=config, server_state=ServerState(), app_state={}, _loop=loop
        )
        connection.connection_made(wire)
        connection.pause_writing()
        connection.look()
        for _ in range(4):
            passed_s += 50
            held = unsent_by_kernel(wire)
            await_that(lambda held=held: theirs.recv(65536) and unsent_by_kernel(wire) < held)  # type: ignore[misc]
            connection.look()
            assert not wire.over
        passed_s += 61
        connection.look()
        assert wire.over, "it took nothing more"
        connection.connection_lost(None)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        theirs = socket.create_connection(listening.getsockname(), DEADLINE_S)
        ours, _ = listening.accept()
        with ours, theirs:
            asyncio.run(go(ours, theirs))
