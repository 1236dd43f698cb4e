"""The event stream over connections that break: no event lost, none doubled."""

import socket
import threading
from itertools import pairwise
from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.client import ApiError, Client, ClientError, Patience, Unreachable
from service.client.sse import ServerSentEvent, messages
from tests.processes import DEADLINE_S
from tests.service_cli.contract_server import (
    JOB_ID,
    Handler,
    Script,
    all_then_close,
    as_sse,
    cut_after,
    event,
    serving,
    silence,
)

QUICK = Patience(away_s=2.0, silence_s=0.3, first_pause_s=0.005, longest_pause_s=0.05)


def finished_job(num_events: int = 12) -> Script:
    """A job that ran and succeeded; some of its log lines hold what naive line splitting breaks on."""
    events = [event(id, "log", level="info", message=f"line {id} \u2028 \x85 é 漢") for id in range(1, num_events)]
    events.append(event(num_events, "state", state="succeeded"))
    return Script(events=events, job={"state": "succeeded", "name": "x"})


def ids(url: str, last_id: int | None = None) -> list[int]:
    with Client(url, patience=QUICK) as client:
        return [entry.id for entry in client.job(JOB_ID).events(last_id)]


def test_every_event_once_and_then_the_end() -> None:
    with serving(finished_job()) as url:
        assert ids(url) == list(range(1, 13))
        assert ids(url, last_id=7) == [8, 9, 10, 11, 12]
        assert ids(url, last_id=12) == []


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 400), min_size=1, max_size=4))
def test_cut_anywhere_goes_on_where_it_broke(cuts: list[int]) -> None:
    script = finished_job(6)
    script.plays = [*(cut_after(num_bytes) for num_bytes in cuts), all_then_close]
    with serving(script) as url:
        assert ids(url) == [1, 2, 3, 4, 5, 6]


def test_events_sent_again_are_not_handed_on_again_and_those_passed_over_are_asked_for() -> None:
    script = finished_job(5)

    def send_twice(handler: Handler, backlog: list[dict]) -> None:
        for entry in script.events[:3] + script.events[:3]:
            handler.send_chunk(as_sse(entry))
        handler.break_off()

    script.plays = [send_twice, lambda handler, backlog: all_then_close(handler, script.events)]
    with serving(script) as url:
        assert ids(url) == [1, 2, 3, 4, 5]
    script = finished_job(5)
    script.plays = [lambda handler, backlog: all_then_close(handler, backlog[:2] + backlog[3:]), all_then_close]
    with serving(script) as url:
        assert ids(url) == [1, 2, 3, 4, 5]
    assert script.last_event_ids[:2] == ["0", "2"]


def test_a_hole_in_history_is_named_rather_than_passed_over() -> None:
    script = finished_job(5)
    del script.events[2]
    with serving(script) as url, pytest.raises(ClientError, match="skips from 2 to 4, twice"):
        ids(url)


def test_a_stream_that_ends_while_the_job_runs_or_falls_silent_is_opened_again() -> None:
    script = finished_job(5)
    script.job["state"] = "running"

    def the_rest(handler: Handler, backlog: list[dict]) -> None:
        script.job["state"] = "succeeded"
        all_then_close(handler, backlog)

    script.plays = [lambda handler, backlog: all_then_close(handler, backlog[:2]), silence, the_rest]
    errors: list[ClientError] = []
    with serving(script) as url, Client(url, patience=QUICK) as client:
        events = [entry.id for entry in client.job(JOB_ID).events(on_lost=errors.append)]
    assert events == [1, 2, 3, 4, 5]
    assert [str(error) for error in errors] == [f"cannot reach {url} (no data for 0.3 s): is 'shardyard up' running?"]


def test_a_control_plane_that_goes_and_comes_back_at_the_same_port_and_one_that_stays_away() -> None:
    script = finished_job(6)
    script.plays = [cut_after(len(as_sse(script.events[0])) + 5)]
    away_event = threading.Event()
    with serving(script) as url:
        patient, impatient = (
            Client(url, patience=Patience(away_s=away_s, first_pause_s=0.01, longest_pause_s=0.05))
            for away_s in (DEADLINE_S, 0.2)
        )
        events = patient.job(JOB_ID).events(on_lost=lambda _: away_event.set())
        given_up = impatient.job(JOB_ID).events()
        assert (next(events).id, next(given_up).id) == (1, 1)
    with impatient, pytest.raises(Unreachable, match="is 'shardyard up' running"):
        list(given_up)
    rest: list[int] = []
    reader = threading.Thread(target=lambda: rest.extend(entry.id for entry in events))
    reader.start()
    assert away_event.wait(DEADLINE_S)
    script.plays, script.close_event = [all_then_close], threading.Event()
    with serving(script, port=int(url.rpartition(":")[2])):
        reader.join(DEADLINE_S)
        patient.close()
    assert rest == [2, 3, 4, 5, 6]


def test_no_first_connection_and_an_unknown_job_are_errors_at_once() -> None:
    with socket.socket() as server_socket:
        server_socket.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        client = Client(f"http://127.0.0.1:{server_socket.getsockname()[1]}")
        with client, pytest.raises(Unreachable):
            client.job(JOB_ID)
    with serving(finished_job()) as url, Client(url, patience=QUICK) as client:
        job = client.job(JOB_ID)
        job.data["id"] = "job-aaaaaaaaaaaa"
        with pytest.raises(ApiError, match="there is no /v1/jobs/job-aaaaaaaaaaaa/events"):
            list(job.events())


def test_a_proxy_that_says_502_for_a_while_is_waited_for() -> None:
    script = finished_job(4)
    script.plays = [cut_after(200), all_then_close]
    script.answers[("GET", f"/v1/jobs/{JOB_ID}")] = []
    with serving(script) as url, Client(url, patience=QUICK) as client:
        events = client.job(JOB_ID).events()
        assert next(events).id == 1
        script.answer("GET", f"/v1/jobs/{JOB_ID}/events", 502, b"<html>Bad Gateway</html>", "text/html")
        del script.answers[("GET", f"/v1/jobs/{JOB_ID}")]
        timer = threading.Timer(0.2, lambda: script.answers.clear())
        timer.start()
        assert [entry.id for entry in events] == [2, 3, 4]
        timer.join()


def test_a_closed_generator_closes_its_connection() -> None:
    script = finished_job(5)
    closed_event = threading.Event()

    def until_the_client_goes(handler: Handler, backlog: list[dict]) -> None:
        handler.send_chunk(as_sse(backlog[0]))
        assert handler.rfile.read(1) == b""  # returns when the other end closes
        closed_event.set()
        handler.close_connection = True

    script.plays = [until_the_client_goes]
    with serving(script) as url, Client(url, patience=Patience()) as client:
        events = client.job(JOB_ID).events()
        assert next(events).id == 1
        events.close()
        assert closed_event.wait(DEADLINE_S)


def log_line(worker: str, number: int) -> dict:
    return {"attempt": 1, "worker": worker, "message": f"{worker} {number} \u2028", "position": [0, number]}


def test_log_lines_over_connections_that_break_come_once_each() -> None:
    a, b = ([log_line("g0.rank-0", number) for number in range(4)], [log_line("driver", number) for number in range(3)])
    script = Script(job={"state": "running", "name": "x"})
    script.logs = [
        (a[:2] + b[:1], False),  # broken
        (b[:2] + a[:3], True),  # in another order; ended, but the job has not
        (a + b, True),
    ]
    with serving(script) as url, Client(url, patience=QUICK) as client:
        lines = client.job(JOB_ID).logs(follow=True)
        got = [next(lines) for _ in range(5)]
        script.job["state"] = "succeeded"
        got += list(lines)
    expected = a[:2] + b[:1] + [b[1], a[2]] + [a[3], b[2]]
    assert [line["message"] for line in got] == [line["message"] for line in expected]
    assert not any("position" in line for line in got)


def test_a_log_that_is_not_followed_is_read_once() -> None:
    lines = [log_line("driver", 1)]
    script = Script(job={"state": "running", "name": "x"}, logs=[(lines, True), (lines, False)])
    with serving(script) as url, Client(url, patience=QUICK) as client:
        assert [line["message"] for line in client.job(JOB_ID).logs()] == ["driver 1 \u2028"]
        with pytest.raises(Unreachable):
            list(client.job(JOB_ID).logs())


def test_the_newest_lines_are_not_told_again_after_a_connection_broke() -> None:
    """Lines since the first one are requested again, and lines already returned are skipped."""

    def line(worker: str, second: int) -> dict:
        time = f"2026-01-31T12:00:0{second}.000000Z"
        return {"attempt": 1, "worker": worker, "message": str(second), "time": time, "position": [0, second]}

    script = Script(job={"state": "succeeded", "name": "x"})
    script.logs = [
        ([line("a", 3), line("b", 4), line("a", 5)], False),
        ([line("a", 3), line("a", 5), line("a", 6), line("b", 4), line("b", 7)], True),
    ]
    with serving(script) as url, Client(url, patience=QUICK) as client:
        lines = list(client.job(JOB_ID).logs(follow=True, tail=3, grep="x y"))
    assert [entry["message"] for entry in lines] == ["3", "4", "5", "6", "7"]
    assert [parse_qs(urlsplit(path).query) for _, path, _, _ in script.requests if "/logs" in path] == [
        {"follow": ["true"], "tail": ["3"], "grep": ["x y"]},
        {"follow": ["true"], "since": ["2026-01-31T12:00:03.000000Z"], "grep": ["x y"]},
    ]


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


def test_messages_by_the_standards_rules_whole_and_byte_by_byte() -> None:
    assert list(messages([TEXT])) == MESSAGES
    assert list(messages(bytes([byte]) for byte in TEXT)) == MESSAGES


@given(st.lists(st.integers(0, len(TEXT)), max_size=30))
def test_how_the_bytes_are_cut_makes_no_difference(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(TEXT)]
    pieces = [TEXT[a:b] for a, b in pairwise(edges)]
    assert list(messages(pieces)) == MESSAGES
