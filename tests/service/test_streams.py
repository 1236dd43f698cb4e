"""Event streams and logs: whole, resumable, bounded, and over when the job is."""

import asyncio
import json
import socket
import sqlite3
import time
from contextlib import ExitStack, closing
from pathlib import Path

import httpx
import pytest

from service.control.api.streams import _pause
from service.control.report.hub import Hub
from service.wire.events import Event
from tests.processes import DEADLINE_S, await_that
from tests.service.control_plane import ControlPlane
from tests.service.silent_run import Run, metric


def follow_by_hand(plane: ControlPlane, job_id: str, receive_bytes: int | None = None) -> socket.socket:
    """A stream of events that has begun and is read no further."""
    stream = socket.create_connection(("127.0.0.1", plane.port), DEADLINE_S)
    if receive_bytes is not None:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    stream.sendall(f"GET /v1/jobs/{job_id}/events HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert stream.recv(12) == b"HTTP/1.1 200"
    return stream


def num_streams(plane: ControlPlane) -> float:
    """Open streams of events."""
    figures = plane.http.get("/metrics").text.splitlines()
    return float(next(line.split()[1] for line in figures if line.startswith("shardyard_event_streams ")))


def test_a_stream_goes_on_after_any_event(plane: ControlPlane) -> None:
    job = plane.finished_job()
    all_events = list(plane.events(job["id"]))
    assert len(all_events) > 8
    for last_id in range(len(all_events) + 1):
        assert list(plane.events(job["id"], last_id)) == all_events[last_id:]
    path = f"/v1/jobs/{job['id']}/events"
    by_query = plane.http.get(path, params={"last_event_id": len(all_events) - 1})
    assert by_query.text.count("data: ") == 1
    assert by_query.headers["content-type"].startswith("text/event-stream")
    assert list(plane.events(job["id"], 10**9)) == []
    for wrong in ("x", "-1", "1.5", "9" * 40):
        assert plane.http.get(path, headers={"last-event-id": wrong}).status_code == 422


def test_events_come_while_the_run_goes_on_and_to_every_stream(plane: ControlPlane) -> None:
    run = Run(plane)
    streams = [plane.events(run.id) for _ in range(5)]
    for stream in streams:
        assert next(stream).data["state"] == "queued"
    records = [metric(step, text="é\n\u2028☃" * 10) for step in range(1, 401)]
    for start in range(0, 400, 100):
        run.send(start, *records[start : start + 100])
        for stream in streams:  # each at its own pace, all in order
            got: list[Event] = []
            while len(got) < 100:
                event = next(stream)
                got += [event] if event.kind == "metric" else []
            assert [event.data for event in got] == [record["data"] for record in records[start : start + 100]]
    run.end()
    for stream in streams:
        assert list(stream)[-1].data["state"] == "cancelled"


@pytest.mark.slow
def test_a_stream_that_lags_costs_no_memory(plane: ControlPlane) -> None:
    run = Run(plane)
    with follow_by_hand(plane, run.id, receive_bytes=4096):
        run.send(0, *(metric(step, text="x" * 1000) for step in range(1000)))
        before = plane.memory_bytes()
        for start in range(1000, 21_000, 1000):  # 20 MB
            run.send(start, *(metric(step, text="x" * 1000) for step in range(start, start + 1000)))
        growth_bytes = plane.memory_bytes() - before
        assert growth_bytes < 20e6, "less than what was sent: held for the client, it would be at least that"
    stream = plane.events(run.id)
    steps = [event.data["step"] for event in (next(stream) for _ in range(20_000)) if event.kind == "metric"]
    assert steps == list(range(len(steps)))
    stream.close()
    run.end()


def test_an_idle_stream_is_pinged_and_a_client_that_is_gone_is_noticed(own_plane: ControlPlane) -> None:
    run = Run(own_plane.start(ping_interval_s=0.1))

    streams = [own_plane.events(run.id) for _ in range(3)]
    for stream in streams:
        next(stream)
    assert num_streams(own_plane) == 3
    for stream in streams:
        stream.close()
    await_that(lambda: num_streams(own_plane) == 0)
    with own_plane.http.stream("GET", f"/v1/jobs/{run.id}/events", headers={"last-event-id": "1000"}) as answer:
        lines = answer.iter_lines()
        assert [next(lines) for _ in range(4)] == [": ping", "", ": ping", ""]
    run.end()


def test_sigterm_ends_streams_and_the_process(own_plane: ControlPlane) -> None:
    own_plane.start()
    run = Run(own_plane)
    events, logs = own_plane.events(run.id), httpx.Client(timeout=DEADLINE_S, trust_env=False)
    next(events)
    with logs.stream("GET", f"{own_plane.url}/v1/jobs/{run.id}/logs", params={"follow": True}) as log:
        start_s = time.monotonic()
        assert own_plane.terminate() == 0
        assert time.monotonic() - start_s < 20
        assert list(log.iter_lines()) == []
    event_ids = [event.id for event in events]  # ends, and is not broken off
    logs.close()
    own_plane.start()
    own_plane.driver(run.id)  # the run never noticed
    run.end()
    rest = [event.id for event in own_plane.events(run.id, event_ids[-1] if event_ids else 1)]
    assert rest[0] == (event_ids[-1] if event_ids else 1) + 1


def test_sigterm_ends_fifty_open_pages(own_plane: ControlPlane) -> None:
    """Also those that wait to send what is new together; what they have not sent comes after the restart."""
    run = Run(own_plane.start())
    with ExitStack() as stack:
        query = {"interval_s": 60, "loads": False}
        path = f"/v1/jobs/{run.id}/events"
        streams = [stack.enter_context(own_plane.http.stream("GET", path, params=query)) for _ in range(50)]
        answers = [stream.iter_lines() for stream in streams]
        for lines in answers:
            assert next(lines).startswith("event: ")
        run.send(0, metric(1))
        assert own_plane.terminate() == 0
        last_ids = [  # each ends, and is not broken off
            max((int(line.removeprefix("id: ")) for line in lines if line.startswith("id: ")), default=0)
            for lines in answers
        ]
    own_plane.start()
    run.end()
    for last_id in {*last_ids}:
        ids = [event.id for event in own_plane.events(run.id, last_id)]
        assert ids == [*range(last_id + 1, run.num_events() + 1)]


# Logs


def write_log(storage: Path, writer: str, segment: int, text: str) -> None:
    folder = storage / "logs" / writer
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".draft-{segment}"
    draft.write_text(text)
    draft.rename(folder / f"segment-{segment:08d}.log")


def test_logs_of_all_workers_are_there_after_they_are_gone(plane: ControlPlane) -> None:
    job = plane.finished_job()
    storage, path = Path(job["storage"]), f"/v1/jobs/{job['id']}/logs"
    assert plane.http.get(path).text == ""
    write_log(storage, "a1.driver", 0, "starting 2 workers\n")
    write_log(storage, "a1.g0.rank-0", 0, "step 1\nste")
    write_log(storage, "a1.g0.rank-0", 1, "p 2\nno newline")
    write_log(storage, "a1.g0.rank-1", 0, "☃\n" + "y" * 150_000 + "\n")
    write_log(storage, "a2.g0.rank-0", 0, "again\n")
    lines = plane.http.get(path).text.splitlines()
    assert lines[0] == "a1.driver | starting 2 workers"
    of_rank_0 = [line.partition(" | ")[2] for line in lines if line.startswith("a1.g0.rank-0 |")]
    assert of_rank_0 == ["step 1", "step 2", "no newline"]
    assert "a1.g0.rank-1 | ☃" in lines
    pieces = [line.removeprefix("a1.g0.rank-1 | ") for line in lines if line.startswith("a1.g0.rank-1 | y")]
    assert "".join(pieces) == "y" * 150_000
    assert plane.http.get(path, params={"worker": "driver"}).text == "starting 2 workers\n"
    assert plane.http.get(path, params={"worker": "a2.g0.rank-0"}).text == "again\n"
    assert plane.http.get(path, params={"worker": "g0.rank-0"}).text == "step 1\nstep 2\nagain\nno newline\n"
    assert plane.http.get(path, params={"attempt": 2}).text == "a2.g0.rank-0 | again\n"
    answer = plane.http.get(path, params={"worker": "g9.rank-9"})
    assert answer.status_code == 404
    assert "a1.driver, a1.g0.rank-0, a1.g0.rank-1, a2.g0.rank-0" in answer.json()["detail"]
    as_json = plane.http.get(path, params={"attempt": 2}, headers={"accept": "application/x-ndjson"})
    assert [json.loads(line) for line in as_json.text.splitlines()] == [
        {"attempt": 2, "worker": "g0.rank-0", "message": "again", "time": None, "position": [0, 6]}
    ]


def test_a_log_is_followed_until_the_job_has_ended(plane: ControlPlane) -> None:
    run = Run(plane)
    write_log(run.storage, "a1.driver", 0, "one\n")
    with plane.http.stream("GET", f"/v1/jobs/{run.id}/logs", params={"follow": True}) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "a1.driver | one"
        write_log(run.storage, "a1.g0.rank-0", 0, "two\n")
        assert next(lines) == "a1.g0.rank-0 | two"
        write_log(run.storage, "a1.driver", 1, "three\n")
        plane.http.post(f"/v1/jobs/{run.id}/cancel")
        assert list(lines) == ["a1.driver | three"]


def most_memory(plane: ControlPlane, path: str, **params: str) -> tuple[int, int]:
    """(bytes of an answer, bytes by which the control plane grows while it sends them)"""
    before, peak_bytes, num_bytes = plane.memory_bytes(), 0, 0
    with plane.http.stream("GET", path, params=params) as answer:
        for chunk in answer.iter_bytes(1_000_000):
            num_bytes += len(chunk)
            peak_bytes = max(peak_bytes, plane.memory_bytes())
    return num_bytes, peak_bytes - before


@pytest.mark.slow
def test_a_huge_log_costs_no_memory(plane: ControlPlane) -> None:
    job = plane.finished_job()
    text = "".join(f"{line:09d} {'x' * 90}\n" for line in range(100_000))
    for segment in range(5):
        write_log(Path(job["storage"]), "a1.g0.rank-0", segment, text)  # 50 MB
    num_bytes, growth_bytes = most_memory(plane, f"/v1/jobs/{job['id']}/logs", worker="g0.rank-0")
    assert num_bytes == 5 * len(text)
    assert growth_bytes < 30e6


def test_a_busy_job_has_storage_looked_at_no_more_often() -> None:
    async def look() -> None:
        hub = Hub()
        hub.open(asyncio.get_running_loop())
        with hub.follow("job-aaaaaaaaaaaa") as tail:
            until = time.monotonic() + 0.2
            task = asyncio.create_task(_pause(hub, tail, until))
            while not task.done():
                tail.wake()  # an event
                await asyncio.sleep(0.001)
            assert time.monotonic() >= until
            task = asyncio.create_task(_pause(hub, tail, until + 3600))
            hub.close()
            await asyncio.wait_for(task, timeout=DEADLINE_S)

    asyncio.run(look())


def test_a_stream_holds_little_of_its_job(own_plane: ControlPlane) -> None:
    """A hundred streams of a job with a spec of a megabyte take far less than a hundred megabytes."""
    job = own_plane.start().post(resources={"num_workers": 900})
    large = json.dumps({**job["spec"], "invented_later": "x" * 1_000_000})
    with closing(sqlite3.connect(own_plane.database)) as database, database:
        database.execute("UPDATE jobs SET spec = ? WHERE id = ?", (large, job["id"]))
    with ExitStack() as stack:

        def follow(count: int) -> int:
            for _ in range(count):
                stack.enter_context(follow_by_hand(own_plane, job["id"]))
            return own_plane.memory_bytes()

        before = follow(10)  # leaves out what the first streams allocate once
        assert follow(100) - before < 30_000_000
