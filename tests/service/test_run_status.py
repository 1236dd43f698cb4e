"""What ranks said last is in the job as clients see it, and a driver that was stopped is named."""

import os
import signal
import socket
import subprocess
from dataclasses import replace

import psutil
import pytest

from service.control.lifecycle.policies import Explain, Wait, decide
from service.control.report import run_status
from service.control.report.run_status import RunStatuses
from service.wire.events import RecordBatch
from service.wire.run_status import MAX_RANKS, RankStatus, RunStatus, listed
from service.wire.states import State
from tests.processes import await_that, sleeping
from tests.service.quiet_run import Run
from tests.service.test_policies import DEADLINES, RUNNING

GPU = {"utilization": 0.5, "memory_bytes": 2 << 30, "memory_total_bytes": 80 << 30}
RANK = {"rank": 0, "host": "a", "pid": 7, "phase": "step", "doing": "step 3", "for_s": 1.0, "device": GPU}


def test_ranks_are_shown_with_the_job_until_it_ends(run: Run) -> None:
    assert run.plane.job(run.id)["run"] is None
    told = {"host": "a", "pid": 5, "num_ranks": 1, "ranks": [RANK], "of_a_later_release": 1}
    assert run.send(0, writer="driver", run=told).status_code == 200
    shown = run.plane.job(run.id)["run"]
    assert (shown["host"], shown["pid"], shown["num_ranks"]) == ("a", 5, 1)
    assert shown["ranks"][0] | {"silent_s": 0.0} == RANK | {"idle_s": 0.0, "silent_s": 0.0}
    assert 0 <= shown["ranks"][0]["silent_s"] < 60
    run.end()
    assert run.plane.job(run.id)["run"] is None


def test_a_status_that_cannot_be_read_costs_no_record(run: Run) -> None:
    record = {"kind": "log", "time": "2026-01-31T11:00:00Z", "data": {"level": "info", "message": "hello"}}
    answer = run.send(0, record, writer="driver", run={"ranks": [{"rank": -1}] * (MAX_RANKS + 1)})
    assert answer.json()["next_seq"] == 1
    assert run.plane.job(run.id)["run"] is None


def test_a_driver_that_was_stopped_is_named_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_status, "DRIVER_SILENCE_S", 0.0)
    statuses = RunStatuses()
    with sleeping() as driver:
        statuses.hear("job", _batch("driver", run=_status_of(driver)))
        statuses.hear("job", _batch("group-0"))
        os.kill(driver.pid, signal.SIGSTOP)
        await_that(lambda: psutil.Process(driver.pid).status() == psutil.STATUS_STOPPED)
        words = statuses.driver_trouble("job", attempt=1)
        assert f"process {driver.pid} on {socket.gethostname()}" in words
        assert "is stopped" in words
        assert statuses.driver_trouble("job", attempt=2) == statuses.driver_trouble("other", attempt=1) == ""
        monkeypatch.setattr(run_status, "DRIVER_SILENCE_S", 3600.0)
        assert statuses.driver_trouble("job", attempt=1) == ""


def test_a_job_whose_driver_is_silent_says_so_and_goes_on() -> None:
    decision = decide(replace(RUNNING, driver_trouble="its driver is stopped"), DEADLINES)
    assert isinstance(decision, Explain)
    assert decision.reason.endswith("; its driver is stopped")


def test_a_silent_driver_is_named_once_while_no_group_runs() -> None:
    for phase in ("recovering", "waiting", None):
        facts = replace(
            RUNNING, state=State.RECOVERING, group_phase=phase, group_reason="it died", reason="it died",
            driver_trouble="its driver is stopped",
        )  # fmt: skip
        decision = decide(facts, DEADLINES)
        assert decision == Explain("it died; its driver is stopped")
        assert decide(replace(facts, reason=decision.reason), DEADLINES) == Wait()


def test_of_many_ranks_those_that_are_silent_are_listed() -> None:
    ranks = [RankStatus(rank=rank, silent_s=30.0 if rank == 900 else 1.0) for rank in range(1000)]
    shown = listed(ranks)
    assert [rank.rank for rank in shown] == [*range(MAX_RANKS - 1), 900]


def _status_of(process: "subprocess.Popen[bytes]") -> RunStatus:
    created_at = psutil.Process(process.pid).create_time()
    return RunStatus(host=socket.gethostname(), pid=process.pid, created_at=created_at)


def _batch(writer: str, run: RunStatus | None = None) -> RecordBatch:
    told = None if run is None else run.model_dump()
    return RecordBatch(attempt=1, writer=writer, first_seq=0, records=(), run=told)
