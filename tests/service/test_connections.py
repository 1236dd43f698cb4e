"""Connections that only take up room: ended in time, replaced when there are many, and no burden to others."""

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

from service.control.errors import Unavailable
from service.control.listen.connection import ClientConnection, unsent_by_kernel
from service.control.listen.connections import ConnectionLimits, Connections, address_of
from service.control.listen.log_rate_limit import LogRateLimit
from tests.processes import DEADLINE_S, await_that
from tests.service.control_plane import TOKEN, ControlPlane

HURRIED = {
    "header_timeout_s": 0.4, "body_timeout_s": 0.4, "min_body_bytes_per_s": 1000, "write_timeout_s": 0.4,
    "max_connections": 6, "max_unauthenticated": 40, "max_unauthenticated_per_address": 20, "ping_interval_s": 60,
}  # fmt: skip


@pytest.fixture(scope="module")
def hurried(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane with a token that has little patience and little room."""
    control_plane = ControlPlane(tmp_path_factory.mktemp("hurried"), token=TOKEN, **HURRIED).start()
    yield control_plane
    control_plane.close()


def opened(plane: ControlPlane, request: str, *, authorized: bool = False) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", plane.port), DEADLINE_S)
    line, *rest = request.split("\n")
    token = [f"Authorization: Bearer {TOKEN}"] if authorized else []
    connection.sendall("\r\n".join([line, "Host: localhost", *token, *rest]).encode())
    return connection


def answer_to_the_end(connection: socket.socket) -> str:
    """All that comes until the service closes; a test whose connection stays open fails by its time limit."""
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


def test_half_open_connections_are_ended(hurried: ControlPlane) -> None:
    nothing = socket.create_connection(("127.0.0.1", hurried.port), DEADLINE_S)
    half_open = [opened(hurried, request, authorized=True) for request in HALF_OPEN]
    assert answer_to_the_end(nothing) == ""
    for connection in half_open:
        answer = answer_to_the_end(connection)
        assert answer.split()[1] == "408"
        assert json.loads(answer.partition("\r\n\r\n")[2])["type"] == "urn:shardyard:problem:too-slow"


def test_a_byte_now_and_then_buys_no_time(hurried: ControlPlane) -> None:
    for request in ("GET / HTTP/1.1\nX: ", f"{POST_JOB}Content-Length: 100000\n\n"):
        connection = opened(hurried, request, authorized=True)
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


def test_whoever_takes_no_answer_is_cut_off(hurried: ControlPlane) -> None:
    """Ten thousand answers are asked for in one go, and none is read."""
    job = hurried.post(resources={"num_workers": 900})
    connection = opened(hurried, f"GET /v1/jobs/{job['id']} HTTP/1.1\n\n", authorized=True)
    asked = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10_000

    def refused() -> bool:
        try:
            connection.send(asked, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except (ConnectionResetError, BrokenPipeError):
            return True
        return False

    with connection:
        await_that(refused, lambda: "it is still open")


# Those who are slow, idle or many, and honest


def test_an_idle_stream_and_an_idle_connection_outlast_every_time_out(hurried: ControlPlane) -> None:
    job = hurried.post(resources={"num_workers": 900})
    kept = http.client.HTTPConnection("127.0.0.1", hurried.port, timeout=DEADLINE_S)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    kept.request("GET", "/v1/jobs", headers=headers)
    assert kept.getresponse().read()
    kept.auto_open = 0  # it must not come back with another connection
    last_id = hurried.job(job["id"])["last_event_id"]
    events = hurried.events(job["id"], last_id - 1)
    assert next(events).data["state"] == "queued"
    for _ in range(3):  # three times as long as anything may take
        answer_to_the_end(opened(hurried, "GET /nothing HTTP/1.1\nX: "))
    kept.request("POST", f"/v1/jobs/{job['id']}/cancel", headers=headers)
    assert kept.getresponse().status == 202
    assert next(events).data["state"] == "cancelled"
    kept.close()


def test_strangers_do_not_keep_others_out(hurried: ControlPlane) -> None:
    """Ten times as many as there is room for, from one address; those that came first gave way."""
    with ExitStack() as held:
        half_open = [
            held.enter_context(opened(hurried, "GET / HTTP/1.1\nX: "))
            for _ in range(10 * HURRIED["max_unauthenticated_per_address"])
        ]
        assert hurried.http.get("/v1/jobs").status_code == 200
        assert hurried.http.get("/healthz", headers={"authorization": ""}).status_code == 200
        with suppress(ConnectionResetError):  # it was ended before its bytes were read
            assert answer_to_the_end(half_open[0]).split()[1:2] in ([], ["503"])


def unsent_bytes(plane: ControlPlane) -> list[int]:
    """Bytes of its answers that the system holds, by connection: nobody has taken them."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [int(row[4].split(":")[0], 16) for row in rows if row[1].endswith(f":{plane.port:04X}")]


def test_strangers_that_take_no_answer_do_not_keep_others_out(own_plane: ControlPlane) -> None:
    """Each asks for more than the system holds on the way to it, and reads nothing; the time-out is far away."""
    patient = {**HURRIED, "max_unauthenticated_per_address": 4, "write_timeout_s": 10_000}
    own_plane.start(token=TOKEN, **patient)
    with ExitStack() as held:
        for _ in range(4):
            stranger = held.enter_context(socket.socket())
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stranger.connect(("127.0.0.1", own_plane.port))
            stranger.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200)
        seen: list[list[int]] = []

        def nothing_moves() -> bool:
            seen.append(unsent_bytes(own_plane))
            return sum(map(bool, seen[-1])) == 4 and len(seen) > 20 and seen[-1] == seen[-20]

        await_that(nothing_moves)
        for _ in range(4):
            with closing(opened(own_plane, "GET /v1/jobs HTTP/1.1\nConnection: close\n\n", authorized=True)) as one:
                assert one.recv(12) == b"HTTP/1.1 200"


def follow(plane: ControlPlane, held: ExitStack, num_streams: int, *, authorized: bool = True) -> str:
    """Opens streams of a job that waits; the request of one."""
    request = f"GET /v1/jobs/{plane.post(resources={'num_workers': 900})['id']}/events HTTP/1.1\n\n"
    streams = [held.enter_context(opened(plane, request, authorized=authorized)) for _ in range(num_streams)]
    assert {stream.recv(12) for stream in streams} == {b"HTTP/1.1 200"}
    return request


def test_streams_and_workers_behind_one_address_do_not_share_the_limit_of_strangers(own_plane: ControlPlane) -> None:
    own_plane.start(token=TOKEN, **{**HURRIED, "max_connections": 100, "max_unauthenticated_per_address": 2})
    with ExitStack() as held:
        for _ in range(30):
            follow(own_plane, held, 1)
        own_plane.finished_job()  # its driver reports while the streams are open


def test_a_burst_of_streams_from_one_address_is_let_in(plane: ControlPlane) -> None:
    """More than the strangers of one address may be, all at once: their requests are read before others come."""
    with ExitStack() as held:
        follow(plane, held, 600, authorized=False)


def test_one_connection_too_many_is_told_so_and_health_is_still_answered(hurried: ControlPlane) -> None:
    with ExitStack() as held:
        request = follow(hurried, held, HURRIED["max_connections"] - 1)  # with the one that posted the job
        refused = answer_to_the_end(opened(hurried, request, authorized=True))
        assert refused.startswith("HTTP/1.1 503")
        assert "SHARDYARD_MAX_CONNECTIONS" in refused
        assert hurried.http.get("/healthz").status_code == 200
    await_that(lambda: hurried.http.get("/v1/jobs").status_code == 200)


def test_a_flood_leaves_a_few_lines_in_the_log(hurried: ControlPlane) -> None:
    before = len(hurried.log_text())
    for _ in range(300):
        opened(hurried, "GET / HTTP/1.1\nX: ").close()
        for request in ("no HTTP at all\n\n", "GET /healthz HTTP/1.1\nConnection: upgrade\nUpgrade: websocket\n\n"):
            with closing(opened(hurried, request)) as connection:
                connection.recv(100)
        opened(hurried, f"{POST_JOB}Content-Length: 9\n\n{{", authorized=True).close()
    assert hurried.http.get("/v1/jobs").status_code == 200
    logged = hurried.log_text()[before:]
    assert len(logged) < 20_000
    assert "Traceback" not in logged


# The rules, without a socket


@dataclass(eq=False)
class Held:
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
    acts: list[tuple[str, str | int]], admitted: int, strangers: int, per_address: int
) -> None:
    limits = ConnectionLimits(admitted, strangers, per_address, 1, 1, 1, 1)
    connections: Connections[Held] = Connections(limits)
    there: list[Held] = []
    known: set[int] = set()
    for act, what in acts:
        if isinstance(what, str):
            new = Held(address_of(what))
            idle = [each for each in there if not each.answering and id(each) not in known]
            if connections.add(new):
                there.append(new)
            else:
                assert not any(each.address == new.address for each in idle) or len(idle) == 0
        elif there:
            held = there[what % len(there)]
            if act == "ask":
                held.answering = True
            elif act == "answered":
                held.answering = False
            elif act == "leave":
                connections.forget(held)
                there.remove(held)
                known.discard(id(held))
            elif len(known) < admitted or id(held) in known:
                connections.admit(held)
                known.add(id(held))
            else:
                with pytest.raises(Unavailable):
                    connections.admit(held)
        for each in [each for each in there if each.gave_way]:
            assert not each.answering
            assert id(each) not in known
            connections.forget(each)  # as its end does
            there.remove(each)
        outside = [each.address for each in there if id(each) not in known]
        assert connections.num_admitted == len(known) <= admitted
        assert connections.num_strangers == len(outside) <= strangers
        assert all(outside.count(address) <= per_address for address in outside)


def test_an_address_of_ipv6_is_its_network() -> None:
    assert address_of("2001:db8:1:2:3::4") == address_of("2001:db8:1:2::") != address_of("2001:db8:1:3::")
    assert address_of("::ffff:10.0.0.1") == address_of("10.0.0.1")
    assert address_of("fe80::1%eth0") == address_of("fe80::2")


@given(st.lists(st.tuples(st.floats(0, 30), st.sampled_from("abc")), max_size=300), st.integers(1, 5))
def test_no_kind_of_line_comes_more_often_than_it_may(lines: list[tuple[float, str]], most: int) -> None:
    now = 0.0
    gate = LogRateLimit(most, lambda: now)
    told: dict[str, list[float]] = {}
    left_out = dict.fromkeys("abc", 0)
    for pause, kind in lines:
        now += pause
        before = gate.left_out(kind)
        if before is None:
            left_out[kind] += 1
            continue
        assert before in (0, left_out[kind])  # all since the last time that some were told of
        if before:
            left_out[kind] = 0
        told.setdefault(kind, []).append(now)
    for times in told.values():
        # Two windows may meet within a minute.
        assert all(sum(at <= t < at + 60 for t in times) <= 2 * most for at in times)


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
    """20 s, and one for each 500 bytes that came: a long body on a slow line arrives, and a trickle buys nothing."""

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

    async def go(ours: socket.socket, theirs: socket.socket) -> None:
        loop, passed_s = asyncio.get_running_loop(), 0.0
        loop.time = lambda: passed_s  # type: ignore[method-assign]
        ours.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                ours.send(bytes(65536))
        connection = connection_on(loop, wire := Wire(ours, num_bytes=1000), header_timeout_s=10_000)
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
