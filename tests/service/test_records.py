"""Records come in once each, in order, and only from the newest attempt and worker group."""

import json
import re
import socket
from typing import Any

import httpx
import pytest

from tests.processes import DEADLINE_S, await_that
from tests.service.control_plane import ControlPlane
from tests.service.silent_run import Run, checkpoint, metric, record
from tests.service_cli.command import shardyard


def test_records_arrive_once_each(run: Run) -> None:
    assert run.send(0, metric(1), metric(2)).json() == {"next_seq": 2, "request": None}
    before = run.num_events()
    assert run.send(0, metric(1), metric(2)).json()["next_seq"] == 2  # sent again, its answer was lost
    assert run.send(1, metric(2), metric(3)).json()["next_seq"] == 3  # partly again
    assert run.send(3).json()["next_seq"] == 3  # a heartbeat
    assert run.num_events() == before + 1
    assert run.steps() == [1, 2, 3]


def test_a_gap_is_answered_with_where_to_go_on(run: Run) -> None:
    run.send(0, metric(1))
    answer = run.send(5, metric(6))
    assert (answer.status_code, answer.json()["next_seq"]) == (409, 1)
    assert run.send(7).status_code == 409
    assert run.send(1, metric(2)).status_code == 200
    assert run.steps() == [1, 2]


START_RECORD = record("started", "2026-01-31T11:00:00Z", group=0, workers=[{}, {}])
DEATH = {"reason": "worker 1 died"}


def await_reason(run: Run, reason: str) -> None:
    await_that(lambda: run.plane.job(run.id)["reason"] == reason, lambda: str(run.plane.job(run.id)))


def test_writers_count_each_for_itself(run: Run) -> None:
    assert run.send(0, metric(1)).json()["next_seq"] == 1
    assert run.send(0, record("log", level="info", message="hello"), writer="driver").json()["next_seq"] == 1
    assert run.send(1, metric(2)).json()["next_seq"] == 2


def test_an_older_group_may_add_nothing_once_a_newer_one_has_begun(run: Run) -> None:
    run.send(0, metric(1), writer="group-0")
    assert run.send(0, writer="group-1").status_code == 200  # a heartbeat does not begin a group
    assert run.send(1, metric(2), writer="group-0").status_code == 200  # its remaining records, sent by its successor
    assert run.send(0, metric(2), writer="group-1").status_code == 200
    for records in ((metric(3),), ()):
        assert run.send(2, *records, writer="group-0").status_code == 403
    assert run.send(0, writer="driver").status_code == 200
    assert run.steps() == [1, 2]


def test_redone_steps_count_once_in_history_and_each_in_the_stream(run: Run) -> None:
    run.send(0, metric(1, loss=3.0), metric(2, loss=2.0), writer="group-0")
    run.send(0, metric(2, loss=2.5), metric(3, loss=1.5), writer="group-1")
    points = run.plane.metrics(run.id, name="loss")
    assert [(point["step"], point["loss"]) for point in points] == [(1, 3.0), (2, 2.5), (3, 1.5)]
    assert points[0] == {"step": 1, "time": "2026-01-31T11:00:00.000000Z", "attempt": 1, "loss": 3.0}
    assert [point["step"] for point in run.plane.metrics(run.id, since_step=3)] == [3]
    run.end()
    stream = [event.data["step"] for event in run.plane.events(run.id) if event.kind == "metric"]
    assert stream == [1, 2, 2, 3]


def test_history_is_thinned_to_what_was_asked_for(run: Run) -> None:
    run.send(0, *(metric(step) for step in range(1, 1001)))
    for max_points, steps in ((3, [1, 501, 1000]), (1, [1000]), (2, [1, 1000])):
        assert [point["step"] for point in run.plane.metrics(run.id, max_points=max_points)] == steps
    assert len(run.steps()) == 1000


def test_a_run_that_waits_for_a_place_says_so(run: Run) -> None:
    reason = "waiting for resources for 2 workers"
    run.send(0, record("waiting", "2026-01-31T11:00:00Z", reason=reason), writer="driver")
    await_reason(run, reason)
    assert run.plane.job(run.id)["state"] == "starting"
    run.send(0, {**START_RECORD, "time": "2026-01-31T11:00:09Z"})
    assert run.plane.await_state(run.id, "running")["reason"].startswith("worker group 0 is running")
    run.end()
    events = [event.data for event in run.plane.events(run.id) if event.data.get("reason") == reason]
    assert [event.get("state", event.get("level")) for event in events] == ["warning", "starting"]


def test_a_plan_that_cannot_be_read_is_a_warning_in_the_log(run: Run) -> None:
    run.send(0, record("plan", "2026-01-31T11:00:00Z", plan="nonsense"))
    run.end()
    events = list(run.plane.events(run.id))
    assert "plan" not in {event.kind for event in events if event.data.get("attempt") == 1}
    assert "warning" in {event.data.get("level") for event in events if event.kind == "log"}


@pytest.mark.slow
def test_checkpoints_that_fail_are_in_the_jobs_reason_until_one_is_committed(run: Run) -> None:
    def save_record(step: int, **data: Any) -> dict[str, Any]:
        kind = "checkpoint_failed" if data else "checkpoint"
        return record(kind, f"2026-01-31T11:{step % 60:02}:00Z", step=step, **data)

    def figure(name: str) -> float | None:
        lines = run.plane.http.get("/metrics").text.splitlines()
        matches = [line for line in lines if line.startswith(f'{name}{{job="{run.id}"}}')]
        return float(matches[0].split()[-1]) if matches else None

    full = "rank 0: OSError: [Errno 28] No space left on device"
    run.send(0, START_RECORD, save_record(100), save_record(110, reason=full))
    runs = run.plane.await_state(run.id, "running")["reason"].partition(";")[0]
    await_reason(run, f"{runs}; the checkpoint of step 110 failed: {full}; a restart would resume from step 100")
    run.send(3, save_record(120, reason=full))
    await_reason(run, f"{runs}; the last 2 checkpoints failed, the one of step 120 with {full}; "
                      "a restart would resume from step 100")  # fmt: skip
    job = run.plane.job(run.id)
    assert (job["state"], job["checkpoints_failing"]) == ("running", True)
    assert job["last_checkpoint"] == {"step": 100, "time": "2026-01-31T11:40:00.000000Z", "size_bytes": None}
    assert job["last_failed_checkpoint"] == {
        "step": 120, "time": "2026-01-31T11:00:00.000000Z", "reason": full, "num_failed": 2,
    }  # fmt: skip
    assert figure("shardyard_job_failed_checkpoints") == 2
    assert figure("shardyard_job_step") == job["step"]
    assert figure("shardyard_job_num_steps") == job["num_steps"]
    assert figure("shardyard_job_last_checkpoint_timestamp_seconds") == 1769859600
    output = shardyard("show", run.id, url=run.plane.url).stdout
    assert re.search(r"checkpoint +of step 100, committed at .* ago", output)
    assert re.search(r"failed to save +of step 120 at .*No space left on device", output)

    run.send(4, save_record(130))
    await_reason(run, runs)
    job = run.plane.job(run.id)
    assert (job["checkpoints_failing"], job["last_checkpoint"]["step"]) == (False, 130)
    assert job["last_failed_checkpoint"]["step"] == 120
    assert figure("shardyard_job_failed_checkpoints") == 0
    run.end()
    log = [event.data for event in run.plane.events(run.id) if event.data.get("record") == "checkpoint_failed"]
    assert [line["message"].partition(" failed")[0] for line in log] == [
        "the checkpoint of step 110", "the checkpoint of step 120",
    ]  # fmt: skip
    assert figure("shardyard_job_failed_checkpoints") is None, "of jobs that run only"


def test_records_of_a_run_move_its_job(run: Run) -> None:
    running_reason = "worker group {} is running on 2 workers"
    run.send(0, START_RECORD)
    assert run.plane.await_state(run.id, "running")["reason"] == running_reason.format(0)
    run.send(0, record("recovering", "2026-01-31T11:00:05Z", **DEATH), writer="driver")
    assert "worker 1 died" in run.plane.await_state(run.id, "recovering")["reason"]
    run.send(0, record("started", "2026-01-31T11:00:09Z", group=1, workers=[{}, {}]), writer="group-1")
    assert run.plane.await_state(run.id, "running")["reason"] == running_reason.format(1)
    resume_record = record("resumed", "2026-01-31T11:00:10Z", group=1, num_workers=2, step=7, checkpoint="step-7")
    run.send(1, resume_record, writer="group-1")
    await_reason(run, f"{running_reason.format(1)}, from step 7")
    assert run.plane.job(run.id)["failures"] == 1
    # The driver's word was delayed: what it tells of is over.
    run.send(1, record("recovering", "2026-01-31T11:00:08Z", **DEATH), writer="driver")
    assert run.plane.job(run.id)["state"] == "running"
    for second, activity, words in ((11, "saving", "the last checkpoint"), (12, "evaluating", "the finished model")):
        finish_record = record("finishing", f"2026-01-31T11:00:{second}Z", step=20, activity=activity)
        run.send(second - 9, finish_record, writer="group-1")
        await_reason(run, f"finished 20 steps; {activity} {words}")
    assert run.plane.job(run.id)["state"] == "running"


def test_groups_that_die_at_their_start_or_are_preempted_count_no_failure(run: Run) -> None:
    deaths = [record("recovering", **DEATH, **facts) for facts in ({"at_start": True}, {"preempted": True}, {})]
    run.send(0, *deaths, writer="driver")
    assert run.plane.job(run.id)["failures"] == 1


def test_failures_count_since_the_last_checkpoint_that_is_progress(run: Run) -> None:
    failure = record("recovering", **DEATH)

    def failures() -> int:
        return int(run.plane.job(run.id)["failures"])

    run.send(0, failure, failure, writer="driver")
    run.send(0, checkpoint(50), writer="group-2")
    assert failures() == 0
    run.send(2, failure, writer="driver")
    run.send(0, metric(49), checkpoint(50), writer="group-3")  # the same work, done again
    assert failures() == 1
    run.send(3, failure, writer="driver")
    run.send(0, checkpoint(100), writer="group-4")
    assert failures() == 0
    run.send(4, failure, writer="driver")
    assert failures() == 1


def test_a_request_reaches_the_run_with_its_next_heartbeat(run: Run) -> None:
    run.send(0, record("started", group=0))
    run.plane.await_state(run.id, "running")
    run.plane.act(run.id, "pause")
    assert run.send(1).json() == {"next_seq": 1, "request": "pause"}
    run.plane.act(run.id, "cancel")
    assert run.send(1, metric(1)).json()["request"] == "cancel"


def post_body(run: Run, body: bytes | str) -> httpx.Response:
    headers = {"authorization": f"Bearer {run.token}", "content-type": "application/json"}
    return run.plane.http.post(f"/internal/v1/jobs/{run.id}/records", content=body, headers=headers)


def test_numbers_that_json_cannot_hold_become_null(run: Run) -> None:
    records = [metric(1, grad_norm=float("nan"))]
    body = {"attempt": 1, "writer": "group-0", "first_seq": 0, "records": records}
    assert post_body(run, json.dumps(body)).status_code == 200
    assert run.plane.job(run.id)["last_metric"]["grad_norm"] is None


def test_tokens_admit_one_attempt_of_one_job(plane: ControlPlane, run: Run) -> None:
    other_run = Run(plane)
    assert run.send(0, metric(1), token=other_run.token).status_code == 403
    assert run.send(0, metric(1), token="wrong").status_code == 403
    assert run.send(0, metric(1), attempt=2).status_code == 403
    assert run.send(0, attempt=2).status_code == 403
    other_run.id, stranger = "job-aaaaaaaaaaaa", other_run.id
    assert other_run.send(0, metric(1)).status_code == 404
    other_run.id = stranger
    other_run.end()
    assert run.steps() == []
    for job_id, status in ((run.id, b"403"), ("job-aaaaaaaaaaaa", b"404")):
        with socket.create_connection(("127.0.0.1", plane.port), timeout=DEADLINE_S) as connection:
            connection.sendall(
                f"POST /internal/v1/jobs/{job_id}/records HTTP/1.1\r\nHost: localhost\r\n"
                "Content-Type: application/json\r\nContent-Length: 1000000\r\n"
                "Authorization: Bearer wrong\r\n\r\n".encode()
            )
            assert connection.recv(100).split()[1] == status  # before any of the body was sent


def test_an_older_attempt_is_refused(plane: ControlPlane, run: Run) -> None:
    run.send(0, record("started", group=0), metric(1))
    plane.await_state(run.id, "running")
    run.kill_driver()
    answer = run.send(2, metric(2))
    assert (answer.status_code, answer.json()["request"]) == (403, "cancel")  # it is only in the way
    assert run.send(2, metric(2), attempt=2).status_code == 403
    assert "request" not in run.send(2, metric(2), token="wrong").json()
    foreign = {"authorization": "Bearer é".encode("latin-1")}
    assert plane.http.post(f"/internal/v1/jobs/{run.id}/records", json={}, headers=foreign).status_code == 403
    newer = run.launch(2)
    assert newer["token"] != run.token
    assert newer["max_failures"] == 2
    assert run.send(0, metric(2), attempt=2, token=newer["token"]).status_code == 200
    assert run.steps() == [1, 2]


def test_nothing_changes_after_the_end_and_a_run_that_goes_on_is_told_to_end(plane: ControlPlane, run: Run) -> None:
    run.send(0, metric(1))
    final_job = run.end()
    assert run.send(1, metric(2), record("recovering", reason="late")).json() == {"next_seq": 3, "request": "cancel"}
    assert run.send(9).json() == {"next_seq": 9, "request": "cancel"}
    assert run.send(1, metric(2), token="wrong").status_code == 403
    assert run.steps() == [1]
    assert plane.job(run.id) == final_job


def test_a_time_of_another_age_is_refused(run: Run) -> None:
    for time in ("0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-12:00", "1999-12-31T23:59:59Z"):
        answer = run.send(0, {**metric(1), "time": time})
        assert (answer.status_code, answer.json()["errors"][0]["path"]) == (422, "records[0].time")
    assert run.send(0, metric(1)).status_code == 200


def test_a_stream_of_large_events_has_them_all(run: Run) -> None:
    for seq in range(15):
        assert run.send(seq, metric(seq + 1, words="x" * 150_000)).status_code == 200
    metrics = (event for event in run.plane.events(run.id, last_id=0) if event.kind == "metric")
    assert [next(metrics).data["step"] for _ in range(15)] == list(range(1, 16))


def test_a_batch_that_is_none(run: Run) -> None:
    for body in (
        "", "{}", "[]", '{"attempt": 1, "writer": "../x", "first_seq": 0, "records": []}',
        '{"attempt": 1, "writer": "group-0", "first_seq": -1, "records": []}',
        '{"attempt": 1, "writer": "group-0", "first_seq": 0, "records": [{"kind": "odd", "time": "now", "data": 1}]}',
    ):  # fmt: skip
        answer = post_body(run, body)
        assert (answer.status_code, answer.headers["content-type"]) == (422, "application/problem+json")
