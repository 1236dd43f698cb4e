"""The event stream over connections that break: no event lost, none doubled."""

import socket
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.client import ApiError, Client, ClientError, Patience, Unreachable
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
        return [each.id for each in client.job(JOB_ID).events(last_id)]


def test_every_event_once_and_then_the_end() -> None:
    with serving(finished_job()) as url:
        assert ids(url) == list(range(1, 13))


def test_from_the_middle() -> None:
    with serving(finished_job()) as url:
        assert ids(url, last_id=7) == [8, 9, 10, 11, 12]
        assert ids(url, last_id=12) == []


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 400), min_size=1, max_size=4))
def test_cut_anywhere_goes_on_where_it_broke(cuts: list[int]) -> None:
    script = finished_job(6)
    script.plays = [*(cut_after(num_bytes) for num_bytes in cuts), all_then_close]
    with serving(script) as url:
        assert ids(url) == [1, 2, 3, 4, 5, 6]


def test_events_sent_again_are_not_handed_on_again() -> None:
    script = finished_job(5)

    def doubled(handler: Handler, owed: list[dict]) -> None:
        for each in script.events[:3] + script.events[:3]:
            handler.send_chunk(as_sse(each))
        handler.break_off()

    def all_of_history(handler: Handler, owed: list[dict]) -> None:
        all_then_close(handler, script.events)

    script.plays = [doubled, all_of_history]
    with serving(script) as url:
        assert ids(url) == [1, 2, 3, 4, 5]


def test_an_event_passed_over_is_asked_for_again() -> None:
    script = finished_job(5)
    script.plays = [lambda handler, owed: all_then_close(handler, owed[:2] + owed[3:]), all_then_close]
    with serving(script) as url:
        assert ids(url) == [1, 2, 3, 4, 5]
    assert script.last_event_ids[:2] == ["0", "2"]


def test_a_hole_in_history_is_named_rather_than_passed_over() -> None:
    script = finished_job(5)
    del script.events[2]
    with serving(script) as url, pytest.raises(ClientError, match="skips from 2 to 4, twice"):
        ids(url)


def test_a_stream_that_ends_while_the_job_runs_is_opened_again() -> None:
    script = finished_job(5)
    script.job["state"] = "running"

    def the_rest(handler: Handler, owed: list[dict]) -> None:
        script.job["state"] = "succeeded"
        all_then_close(handler, owed)

    script.plays = [lambda handler, owed: all_then_close(handler, owed[:2]), the_rest]
    with serving(script) as url:
        assert ids(url) == [1, 2, 3, 4, 5]


def test_silence_counts_as_a_broken_connection() -> None:
    script = finished_job(5)
    script.plays = [silence, all_then_close]
    lost: list[ClientError] = []
    with serving(script) as url, Client(url, patience=QUICK) as client:
        got = [each.id for each in client.job(JOB_ID).events(on_lost=lost.append)]
    assert got == [1, 2, 3, 4, 5]
    assert [str(error) for error in lost] == [f"cannot reach {url} (no data for 0.3 s): is 'shardyard up' running?"]


def test_a_control_plane_that_goes_and_comes_back_at_the_same_port() -> None:
    script = finished_job(6)
    script.plays = [cut_after(len(as_sse(script.events[0])) + 5)]
    away = threading.Event()
    with serving(script) as url:
        client = Client(url, patience=Patience(away_s=DEADLINE_S, first_pause_s=0.01, longest_pause_s=0.05))
        events = client.job(JOB_ID).events(on_lost=lambda _: away.set())
        assert next(events).id == 1
    rest: list[int] = []
    reader = threading.Thread(target=lambda: rest.extend(each.id for each in events))
    reader.start()
    assert away.wait(DEADLINE_S)
    script.plays, script.closing = [all_then_close], threading.Event()
    with serving(script, port=int(url.rpartition(":")[2])):
        reader.join(DEADLINE_S)
        client.close()
    assert rest == [2, 3, 4, 5, 6]


def test_a_control_plane_that_stays_away_is_given_up() -> None:
    script = finished_job(5)
    script.plays = [cut_after(200)]
    with serving(script) as url:
        client = Client(url, patience=Patience(away_s=0.2, first_pause_s=0.01, longest_pause_s=0.05))
        events = client.job(JOB_ID).events()
        assert next(events).id == 1
    with client, pytest.raises(Unreachable, match="is 'shardyard up' running"):
        list(events)


def test_no_first_connection_is_an_error_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        client = Client(f"http://127.0.0.1:{taken.getsockname()[1]}")
        with client, pytest.raises(Unreachable):
            client.job(JOB_ID)


def test_the_job_is_gone() -> None:
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
        restored = threading.Timer(0.2, lambda: script.answers.clear())
        restored.start()
        assert [each.id for each in events] == [2, 3, 4]
        restored.join()


def test_a_closed_generator_closes_its_connection() -> None:
    script = finished_job(5)
    ended = threading.Event()

    def until_the_client_goes(handler: Handler, owed: list[dict]) -> None:
        handler.send_chunk(as_sse(owed[0]))
        assert handler.rfile.read(1) == b""  # returns when the other end closes
        ended.set()
        handler.close_connection = True

    script.plays = [until_the_client_goes]
    with serving(script) as url, Client(url, patience=Patience()) as client:
        events = client.job(JOB_ID).events()
        assert next(events).id == 1
        events.close()
        assert ended.wait(DEADLINE_S)


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
    script = Script(job={"state": "running", "name": "x"}, logs=[([log_line("driver", 1)], True)])
    with serving(script) as url, Client(url, patience=QUICK) as client:
        assert [line["message"] for line in client.job(JOB_ID).logs()] == ["driver 1 \u2028"]
    script.logs = [([log_line("driver", 1)], False)]
    with serving(script) as url, Client(url, patience=QUICK) as client, pytest.raises(Unreachable):
        list(client.job(JOB_ID).logs())
