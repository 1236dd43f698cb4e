"""Connections that only take up room: ended in time, replaced when there are many, and no burden to others."""

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.control.errors import Unavailable
from service.control.listen.connections import ConnectionLimits, Connections, address_of
from service.control.listen.flood import FloodGate
from tests.processes import DEADLINE_S, await_that
from tests.service.control_plane import TOKEN, ControlPlane

HURRIED = {
    "header_timeout_s": 0.4,
    "body_timeout_s": 0.4,
    "min_body_bytes_per_s": 1000,
    "write_timeout_s": 0.4,
    "max_connections": 6,
    "max_unauthenticated": 40,
    "max_unauthenticated_per_address": 20,
    "ping_interval_s": 60,
}


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


HALF_OPEN = {
    "nothing": ("", ""),
    "half a header": ("GET /v1/jobs HTTP/1.1\nX-A: b", "408"),
    "no body": ("POST /v1/jobs HTTP/1.1\nContent-Type: application/json\nContent-Length: 99\n\n", "408"),
    "half a body": ("POST /v1/jobs HTTP/1.1\nContent-Type: application/json\nContent-Length: 99\n\n{", "408"),
    "half a chunk": (
        "POST /v1/plans HTTP/1.1\nContent-Type: application/json\nTransfer-Encoding: chunked\n\nff",
        "408",
    ),
}


@pytest.mark.parametrize(("request_text", "status"), HALF_OPEN.values(), ids=HALF_OPEN.keys())
def test_half_open_connections_are_ended(hurried: ControlPlane, request_text: str, status: str) -> None:
    if request_text:
        connection = opened(hurried, request_text, authorized=True)
    else:
        connection = socket.create_connection(("127.0.0.1", hurried.port), DEADLINE_S)
    answer = answer_to_the_end(connection)
    assert answer.split()[1:2] == ([status] if status else [])
    if status == "408":
        assert json.loads(answer.partition("\r\n\r\n")[2])["type"] == "urn:shardyard:problem:too-slow"


def test_a_byte_now_and_then_buys_no_time(hurried: ControlPlane) -> None:
    for request in ("GET / HTTP/1.1\nX: ", "POST /v1/jobs HTTP/1.1\nContent-Type: application/json\n"
                    "Content-Length: 100000\n\n"):  # fmt: skip
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


def test_strangers_that_take_no_answer_do_not_keep_others_out(tmp_path: Path) -> None:
    """Each asks for more than the system holds on the way to it, and reads nothing; the time-out is far away."""
    patient = {**HURRIED, "max_unauthenticated_per_address": 4, "write_timeout_s": 10_000}
    plane = ControlPlane(tmp_path, token=TOKEN, **patient).start()
    try:
        with ExitStack() as held:
            for _ in range(4):
                stranger = held.enter_context(socket.socket())
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                stranger.connect(("127.0.0.1", plane.port))
                stranger.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200)
            seen: list[list[int]] = []

            def nothing_moves() -> bool:
                seen.append(unsent_bytes(plane))
                return sum(map(bool, seen[-1])) == 4 and len(seen) > 20 and seen[-1] == seen[-20]

            await_that(nothing_moves)
            for _ in range(4):
                with closing(opened(plane, "GET /v1/jobs HTTP/1.1\nConnection: close\n\n", authorized=True)) as one:
                    assert one.recv(12) == b"HTTP/1.1 200"
    finally:
        plane.close()


def test_streams_and_workers_behind_one_address_do_not_share_the_limit_of_strangers(tmp_path: Path) -> None:
    roomy = {**HURRIED, "max_connections": 100, "max_unauthenticated_per_address": 2}
    plane = ControlPlane(tmp_path, token=TOKEN, **roomy).start()
    try:
        job = plane.post(resources={"num_workers": 900})
        with ExitStack() as held:
            for _ in range(30):
                stream = held.enter_context(
                    opened(plane, f"GET /v1/jobs/{job['id']}/events HTTP/1.1\n\n", authorized=True)
                )
                assert stream.recv(12) == b"HTTP/1.1 200"
            done = plane.post()  # its driver reports while the streams are open
            assert plane.await_state(done["id"], "succeeded", "failed")["state"] == "succeeded"
    finally:
        plane.close()


def test_a_burst_of_streams_from_one_address_is_let_in(plane: ControlPlane) -> None:
    """More than the strangers of one address may be, all at once: their requests are read before others come."""
    job = plane.post(resources={"num_workers": 900})
    with ExitStack() as held:
        asked = f"GET /v1/jobs/{job['id']}/events HTTP/1.1\n\n"
        streams = [held.enter_context(opened(plane, asked)) for _ in range(600)]
        assert {stream.recv(12) for stream in streams} == {b"HTTP/1.1 200"}


def test_one_connection_too_many_is_told_so_and_health_is_still_answered(hurried: ControlPlane) -> None:
    job = hurried.post(resources={"num_workers": 900})
    with ExitStack() as held:
        asked = f"GET /v1/jobs/{job['id']}/events HTTP/1.1\n\n"
        for _ in range(HURRIED["max_connections"] - 1):  # with the one that posted the job
            stream = held.enter_context(opened(hurried, asked, authorized=True))
            assert stream.recv(12) == b"HTTP/1.1 200"
        refused = answer_to_the_end(opened(hurried, asked, authorized=True))
        assert refused.startswith("HTTP/1.1 503")
        assert "SHARDYARD_MAX_CONNECTIONS" in refused
        assert hurried.http.get("/healthz").status_code == 200
    await_that(lambda: hurried.http.get("/v1/jobs").status_code == 200)


def test_a_flood_leaves_a_few_lines_in_the_log(hurried: ControlPlane) -> None:
    log = hurried.folder / "control-plane.log"
    before = log.stat().st_size
    for _ in range(300):
        opened(hurried, "GET / HTTP/1.1\nX: ").close()
        with closing(opened(hurried, "no HTTP at all\n\n")) as connection:
            connection.recv(100)
        with closing(
            opened(hurried, "GET /healthz HTTP/1.1\nConnection: upgrade\nUpgrade: websocket\n\n")
        ) as connection:
            connection.recv(100)
        opened(
            hurried, "POST /v1/jobs HTTP/1.1\nContent-Type: application/json\nContent-Length: 9\n\n{", authorized=True
        ).close()
    assert hurried.http.get("/v1/jobs").status_code == 200
    assert log.stat().st_size - before < 20_000
    assert "Traceback" not in log.read_text()[before:]


# The rules, without a socket


@dataclass(eq=False)
class Held:
    address: str
    answering: bool = False
    gave_way: bool = False

    def give_way(self) -> None:
        self.gave_way = True


@dataclass
class Model:
    limits: ConnectionLimits
    present: list[Held] = field(default_factory=list)
    admitted: list[Held] = field(default_factory=list)


_ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.sampled_from(["10.0.0.1", "10.0.0.2", "2001:db8::1", "2001:db8::2"])),
        st.tuples(st.sampled_from(["admit", "leave", "ask", "answered"]), st.integers(0, 30)),
    ),
    max_size=120,
)


@given(_ACTS, st.integers(1, 4), st.integers(1, 6), st.integers(1, 4))
def test_the_limits_hold_and_only_idle_strangers_give_way(
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
            if connections.welcome(new):
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
    gate = FloodGate(most, lambda: now)
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
