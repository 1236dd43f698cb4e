"""Connections that only occupy slots: they time out, give way when there are many, and do not affect others."""

import asyncio
import http.client
import json
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from uvicorn import Config
from uvicorn.server import ServerState

from service.control import server
from service.control.errors import Unavailable
from service.control.listen.connection import ClientConnection, unsent_by_kernel
from service.control.listen.connections import ConnectionLimits, Connections, address_of
from service.control.listen.log_rate_limit import LogRateLimit
from service.settings import Settings
from tests.processes import DEADLINE_S, await_that
from tests.service.control_plane import TOKEN, ControlPlane

STRICT_LIMITS = {
    "header_timeout_s": 0.4, "body_timeout_s": 0.4, "min_body_bytes_per_s": 1000, "write_timeout_s": 0.4,
    "max_connections": 6, "max_unauthenticated": 40, "max_unauthenticated_per_address": 20, "ping_interval_s": 60,
}  # fmt: skip


@pytest.fixture(scope="module")
def strict_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane with a token, short timeouts and few connection slots."""
    control_plane = ControlPlane(tmp_path_factory.mktemp("hurried"), token=TOKEN, **STRICT_LIMITS).start()
    yield control_plane
    control_plane.close()


def open_connection(plane: ControlPlane, request: str, *, with_token: bool = False) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", plane.port), DEADLINE_S)
    line, *rest = request.split("\n")
    token = [f"Authorization: Bearer {TOKEN}"] if with_token else []
    connection.sendall("\r\n".join([line, "Host: localhost", *token, *rest]).encode())
    return connection


def answer_to_the_end(connection: socket.socket) -> str:
    """All bytes until the service closes the connection; where it stays open, the test exceeds its time limit."""
    with connection:
        return b"".join(iter(lambda: connection.recv(65536), b"")).decode()


POST_JOB = "POST /v1/jobs HTTP/1.1\nContent-Type: application/json\n"
HALF_OPEN = (
    "GET /v1/jobs HTTP/1.1\nX-A: b",
    f"{POST_JOB}Content-Length: 99\n\n",
    f"{POST_JOB}Content-Length: 99\n\n{{",
    f"{POST_JOB}Transfer-Encoding: chunked\n\nff",
)
"""Half a header; no body; half a body; half a chunk."""


def test_half_open_connections_are_ended(strict_plane: ControlPlane) -> None:
    silent_connection = socket.create_connection(("127.0.0.1", strict_plane.port), DEADLINE_S)
    half_open = [open_connection(strict_plane, request, with_token=True) for request in HALF_OPEN]
    assert answer_to_the_end(silent_connection) == ""
    for connection in half_open:
        answer = answer_to_the_end(connection)
        assert answer.split()[1] == "408"
        assert json.loads(answer.partition("\r\n\r\n")[2])["type"] == "urn:shardyard:problem:too-slow"


def test_a_byte_now_and_then_buys_no_time(strict_plane: ControlPlane) -> None:
    for request in ("GET / HTTP/1.1\nX: ", f"{POST_JOB}Content-Length: 100000\n\n"):
        connection = open_connection(strict_plane, request, with_token=True)
        connection.settimeout(0.02)
        for _ in range(int(DEADLINE_S / 0.02)):
            try:
                connection.send(b"a")
                if b"408" in connection.recv(4096):
                    break
            except TimeoutError:
                continue
        else:
            pytest.fail("it is still open")
        connection.close()


def test_whoever_takes_no_answer_is_cut_off(strict_plane: ControlPlane) -> None:
    """Ten thousand requests are sent at once, and no response is read."""
    job = strict_plane.post(resources={"num_workers": 900})
    connection = open_connection(strict_plane, f"GET /v1/jobs/{job['id']} HTTP/1.1\n\n", with_token=True)
    requests = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10_000

    def is_cut_off() -> bool:
        try:
            connection.send(requests, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except (ConnectionResetError, BrokenPipeError):
            return True
        return False

    with connection:
        await_that(is_cut_off, lambda: "it is still open")


# Slow, idle or numerous clients that do no harm


def test_an_idle_stream_and_an_idle_connection_outlast_every_time_out(strict_plane: ControlPlane) -> None:
    job = strict_plane.post(resources={"num_workers": 900})
    idle_connection = http.client.HTTPConnection("127.0.0.1", strict_plane.port, timeout=DEADLINE_S)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    idle_connection.request("GET", "/v1/jobs", headers=headers)
    assert idle_connection.getresponse().read()
    idle_connection.auto_open = 0  # it must not reconnect
    last_id = strict_plane.job(job["id"])["last_event_id"]
    events = strict_plane.events(job["id"], last_id - 1)
    assert next(events).data["state"] == "queued"
    for _ in range(3):  # three times as long as anything may take
        answer_to_the_end(open_connection(strict_plane, "GET /nothing HTTP/1.1\nX: "))
    idle_connection.request("POST", f"/v1/jobs/{job['id']}/cancel", headers=headers)
    assert idle_connection.getresponse().status == 202
    assert next(events).data["state"] == "cancelled"
    idle_connection.close()


def test_strangers_do_not_keep_others_out(strict_plane: ControlPlane) -> None:
    """Ten times as many connections as the limit, from one address; the oldest give way."""
    with ExitStack() as stack:
        half_open = [
            stack.enter_context(open_connection(strict_plane, "GET / HTTP/1.1\nX: "))
            for _ in range(10 * STRICT_LIMITS["max_unauthenticated_per_address"])
        ]
        assert strict_plane.http.get("/v1/jobs").status_code == 200
        assert strict_plane.http.get("/healthz", headers={"authorization": ""}).status_code == 200
        with suppress(ConnectionResetError):  # it was ended before its bytes were read
            assert answer_to_the_end(half_open[0]).split()[1:2] in ([], ["503"])


def unsent_bytes(plane: ControlPlane) -> list[int]:
    """Bytes of responses that the kernel holds unsent, by connection."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [int(row[4].split(":")[0], 16) for row in rows if row[1].endswith(f":{plane.port:04X}")]


@pytest.mark.slow
def test_strangers_that_take_no_answer_do_not_keep_others_out(own_plane: ControlPlane) -> None:
    """Each requests more than the kernel's buffers hold and reads nothing; the write timeout is far away."""
    patient = {**STRICT_LIMITS, "max_unauthenticated_per_address": 4, "write_timeout_s": 10_000}
    own_plane.start(token=TOKEN, **patient)
    with ExitStack() as stack:
        for _ in range(4):
            stranger = stack.enter_context(socket.socket())
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stranger.connect(("127.0.0.1", own_plane.port))
            stranger.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200)
        samples: list[list[int]] = []

        def nothing_moves() -> bool:
            samples.append(unsent_bytes(own_plane))
            return sum(map(bool, samples[-1])) == 4 and len(samples) > 20 and samples[-1] == samples[-20]

        await_that(nothing_moves)
        for _ in range(4):
            with closing(
                open_connection(own_plane, "GET /v1/jobs HTTP/1.1\nConnection: close\n\n", with_token=True)
            ) as connection:
                assert connection.recv(12) == b"HTTP/1.1 200"


def follow(plane: ControlPlane, stack: ExitStack, num_streams: int, *, with_token: bool = True) -> str:
    """Open event streams of a queued job; return the request of one."""
    request = f"GET /v1/jobs/{plane.post(resources={'num_workers': 900})['id']}/events HTTP/1.1\n\n"
    streams = [stack.enter_context(open_connection(plane, request, with_token=with_token)) for _ in range(num_streams)]
    assert {stream.recv(12) for stream in streams} == {b"HTTP/1.1 200"}
    return request


@pytest.mark.slow
def test_streams_and_workers_behind_one_address_do_not_share_the_limit_of_strangers(own_plane: ControlPlane) -> None:
    own_plane.start(token=TOKEN, **{**STRICT_LIMITS, "max_connections": 100, "max_unauthenticated_per_address": 2})
    with ExitStack() as stack:
        for _ in range(30):
            follow(own_plane, stack, 1)
        own_plane.finished_job()  # its driver reports while the streams are open


def test_a_burst_of_streams_from_one_address_is_let_in(plane: ControlPlane) -> None:
    """More than the limit of strangers per address, all at once: their requests are read before more come."""
    with ExitStack() as stack:
        follow(plane, stack, 600, with_token=False)


def test_one_connection_too_many_is_told_so_and_health_is_still_answered(strict_plane: ControlPlane) -> None:
    with ExitStack() as stack:
        request = follow(strict_plane, stack, STRICT_LIMITS["max_connections"] - 1)  # with the one that posted the job
        answer = answer_to_the_end(open_connection(strict_plane, request, with_token=True))
        assert answer.startswith("HTTP/1.1 503")
        assert "SHARDYARD_MAX_CONNECTIONS" in answer
        assert strict_plane.http.get("/healthz").status_code == 200
    await_that(lambda: strict_plane.http.get("/v1/jobs").status_code == 200)


def test_a_flood_leaves_a_few_lines_in_the_log(strict_plane: ControlPlane) -> None:
    before = len(strict_plane.log_text())
    for _ in range(300):
        open_connection(strict_plane, "GET / HTTP/1.1\nX: ").close()
        for request in ("no HTTP at all\n\n", "GET /healthz HTTP/1.1\nConnection: upgrade\nUpgrade: websocket\n\n"):
            with closing(open_connection(strict_plane, request)) as connection:
                connection.recv(100)
        open_connection(strict_plane, f"{POST_JOB}Content-Length: 9\n\n{{", with_token=True).close()
    assert strict_plane.http.get("/v1/jobs").status_code == 200
    log = strict_plane.log_text()[before:]
    assert len(log) < 20_000
    assert "Traceback" not in log


# The rules, without a socket


@dataclass(eq=False)
class StubConnection:
    address: str
    answering: bool = False
    gave_way: bool = False

    def close_for_another(self) -> None:
        self.gave_way = True


_ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.sampled_from(["10.0.0.1", "10.0.0.2", "2001:db8::1", "2001:db8::2"])),
        st.tuples(st.sampled_from(["admit", "leave", "ask", "answered"]), st.integers(0, 30)),
    ),
    max_size=120,
)


@given(_ACTS, st.integers(1, 4), st.integers(1, 6), st.integers(1, 4))
def test_limits_of_connections(
    acts: list[tuple[str, str | int]], max_admitted: int, strangers: int, per_address: int
) -> None:
    limits = ConnectionLimits(max_admitted, strangers, per_address, 1, 1, 1, 1)
    connections: Connections[StubConnection] = Connections(limits)
    open_connections: list[StubConnection] = []
    admitted_ids: set[int] = set()
    for act, argument in acts:
        if isinstance(argument, str):
            new = StubConnection(address_of(argument))
            idle = [
                candidate
                for candidate in open_connections
                if not candidate.answering and id(candidate) not in admitted_ids
            ]
            if connections.add(new):
                open_connections.append(new)
            else:
                assert not any(candidate.address == new.address for candidate in idle) or len(idle) == 0
        elif open_connections:
            target = open_connections[argument % len(open_connections)]
            if act == "ask":
                target.answering = True
            elif act == "answered":
                target.answering = False
            elif act == "leave":
                connections.forget(target)
                open_connections.remove(target)
                admitted_ids.discard(id(target))
            elif len(admitted_ids) < max_admitted or id(target) in admitted_ids:
                connections.admit(target)
                admitted_ids.add(id(target))
            else:
                with pytest.raises(Unavailable):
                    connections.admit(target)
        for leaver in [candidate for candidate in open_connections if candidate.gave_way]:
            assert not leaver.answering
            assert id(leaver) not in admitted_ids
            connections.forget(leaver)  # as its end does
            open_connections.remove(leaver)
        stranger_addresses = [candidate.address for candidate in open_connections if id(candidate) not in admitted_ids]
        assert connections.num_admitted == len(admitted_ids) <= max_admitted
        assert connections.num_strangers == len(stranger_addresses) <= strangers
        assert all(stranger_addresses.count(address) <= per_address for address in stranger_addresses)


def test_an_address_of_ipv6_is_its_network() -> None:
    assert address_of("2001:db8:1:2:3::4") == address_of("2001:db8:1:2::") != address_of("2001:db8:1:3::")
    assert address_of("::ffff:10.0.0.1") == address_of("10.0.0.1")
    assert address_of("fe80::1%eth0") == address_of("fe80::2")


@given(st.lists(st.tuples(st.floats(0, 30), st.sampled_from("abc")), max_size=300), st.integers(1, 5))
def test_no_kind_of_line_comes_more_often_than_it_may(lines: list[tuple[float, str]], max_lines: int) -> None:
    time_s = 0.0
    gate = LogRateLimit(max_lines, lambda: time_s)
    line_times: dict[str, list[float]] = {}
    left_out = dict.fromkeys("abc", 0)
    for pause, kind in lines:
        time_s += pause
        before = gate.left_out(kind)
        if before is None:
            left_out[kind] += 1
            continue
        assert before in (0, left_out[kind])  # all since the last time that some were told of
        if before:
            left_out[kind] = 0
        line_times.setdefault(kind, []).append(time_s)
    for times in line_times.values():
        # Two windows may meet within a minute.
        assert all(sum(start <= t < start + 60 for t in times) <= 2 * max_lines for start in times)


def test_as_many_lines_may_come_in_every_minute() -> None:
    times = iter([0.0, 0.0, 0.0, 60.0, 61.0, 62.0, 120.0])
    gate = LogRateLimit(2, lambda: next(times))
    assert [gate.left_out("a") for _ in range(7)] == [0, 0, None, 1, 0, None, 1]


def test_connections_are_as_many_as_the_limit_of_open_files_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[int] = []

    def allow_descriptors(num_descriptors: int) -> int:
        requested.append(num_descriptors)
        return num_descriptors - 5

    monkeypatch.setattr(server, "allow_descriptors", allow_descriptors)
    limits = server._limits(Settings(max_connections=100, max_unauthenticated=40))
    assert (limits.max_connections, limits.max_strangers) == (95, 40)
    assert requested == [100 + 40 + server.TAKEN_AT_A_TIME + server.SPARE_DESCRIPTORS]


class Wire(asyncio.Transport):
    """Stand-in transport, so that time can be simulated: records what a connection writes, and whether it is closed."""

    def __init__(self, connection: socket.socket | None = None, num_bytes: int = 0) -> None:
        """`num_bytes`: bytes buffered in this process until `connection` takes them."""
        super().__init__({"socket": connection})
        self.output, self.is_closed, self._num_bytes = b"", False, num_bytes

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.output += bytes(data)

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.is_closed

    def get_write_buffer_size(self) -> int:
        return self._num_bytes


async def read_all(_scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


def connection_on(loop: asyncio.AbstractEventLoop, wire: Wire, header_timeout_s: float) -> ClientConnection:
    limits = ConnectionLimits(
        9, 9, 9, header_timeout_s=header_timeout_s, body_timeout_s=20, min_body_bytes_per_s=500, write_timeout_s=60
    )
    config = Config(read_all, log_config=None)
    config.load()
    connection = ClientConnection(
        Connections(limits), config=config, server_state=ServerState(), app_state={}, _loop=loop
    )
    connection.connection_made(wire)
    return connection


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 3000)), min_size=1, max_size=20))
@example([(19.0, 2000)] + [(3.0, 2000)] * 19)
def test_a_body_has_time_while_it_moves_and_no_more(pieces: list[tuple[float, int]]) -> None:
    """20 s plus one for every 500 bytes received: a long body on a slow line arrives, a trickle gains nothing."""

    async def go() -> None:
        loop = asyncio.get_running_loop()
        passed_s = 0.0
        loop.time = lambda: passed_s  # type: ignore[method-assign]
        connection = connection_on(loop, wire := Wire(), header_timeout_s=10)
        length = sum(num_bytes for _, num_bytes in pieces)
        connection.data_received(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % length)
        came = 0
        for pause_s, num_bytes in pieces:
            passed_s += pause_s
            connection.look()
            if passed_s > 20 + came / 500:
                assert wire.output.startswith(b"HTTP/1.1 408")
                assert wire.is_closed
                break
            assert not wire.is_closed
            connection.data_received(b"x" * num_bytes)
            came += num_bytes
            await asyncio.sleep(0)  # the application takes it
        else:
            for _ in range(9):
                await asyncio.sleep(0)
            assert wire.output.startswith(b"HTTP/1.1 200")
        connection.connection_lost(None)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            await task

    asyncio.run(go())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells what it has not sent")
def test_a_slow_reader_is_no_client_that_takes_nothing() -> None:
    """It reads what the kernel holds; bytes buffered in this process move on only once much of that is read."""

    async def go(server: socket.socket, client: socket.socket) -> None:
        loop, passed_s = asyncio.get_running_loop(), 0.0
        loop.time = lambda: passed_s  # type: ignore[method-assign]
        server.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                server.send(bytes(65536))
        connection = connection_on(loop, wire := Wire(server, num_bytes=1000), header_timeout_s=10_000)
        connection.pause_writing()
        connection.look()
        for _ in range(4):
            passed_s += 50
            num_unsent = unsent_by_kernel(wire)
            await_that(lambda num_unsent=num_unsent: client.recv(65536) and unsent_by_kernel(wire) < num_unsent)  # type: ignore[misc]
            connection.look()
            assert not wire.is_closed
        passed_s += 61
        connection.look()
        assert wire.is_closed, "it took nothing more"
        connection.connection_lost(None)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        client_socket = socket.create_connection(listener.getsockname(), DEADLINE_S)
        server_socket, _ = listener.accept()
        with server_socket, client_socket:
            asyncio.run(go(server_socket, client_socket))
