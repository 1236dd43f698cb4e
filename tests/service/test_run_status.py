"""The last status of ranks is shown with the job, and silent drivers are named and ended."""

import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from service.control.launcher.launcher import Observation
from service.control.report import run_status
from service.control.report.run_status import RunStatuses
from service.control.report.silent_driver import ProcessState, SilentDriver
from service.control.scheduling.decisions import Explain, Retry, Stop, Wait
from service.control.scheduling.policies import decide
from service.wire.attempt_folder import launch_prefix
from service.wire.events import RecordBatch
from service.wire.run_status import MAX_RANKS, RankStatus, RunStatus, select_ranks
from service.wire.states import State
from tests.processes import DEADLINE_S, await_that, sleeping
from tests.service.silent_run import Run, record
from tests.service.test_policies import DEADLINES, RUNNING

GPU = {"utilization": 0.5, "memory_bytes": 2 << 30, "memory_total_bytes": 80 << 30}
RANK = {"rank": 0, "host": "a", "pid": 7, "phase": "step", "doing": "step 3", "for_s": 1.0, "device": GPU}


def test_ranks_are_shown_with_the_job_until_it_ends(run: Run) -> None:
    assert run.plane.job(run.id)["run"] is None
    status = {"host": "a", "pid": 5, "num_ranks": 1, "ranks": [RANK], "of_a_later_release": 1}
    assert run.send(0, writer="driver", run=status).status_code == 200
    run_view = run.plane.job(run.id)["run"]
    assert (run_view["host"], run_view["pid"], run_view["num_ranks"]) == ("a", 5, 1)
    assert run_view["ranks"][0] | {"silent_s": 0.0} == RANK | {"idle_s": 0.0, "silent_s": 0.0}
    assert 0 <= run_view["ranks"][0]["silent_s"] < 60
    run.end()
    assert run.plane.job(run.id)["run"] is None


def test_a_status_that_cannot_be_read_costs_no_record(run: Run) -> None:
    answer = run.send(0, record("log"), writer="driver", run={"ranks": [{"rank": -1}] * (MAX_RANKS + 1)})
    assert answer.json()["next_seq"] == 1
    assert run.plane.job(run.id)["run"] is None


def test_a_run_evaluates_while_one_of_its_ranks_does(monkeypatch: pytest.MonkeyPatch) -> None:
    statuses = RunStatuses()
    for phases, is_evaluating in ((["step", "collective"], False), (["evaluation", "collective"], True)):
        ranks = [{"rank": rank, "phase": phase} for rank, phase in enumerate(phases)]
        statuses.record_batch("job", _batch("driver", run=RunStatus.model_validate({"num_ranks": 2, "ranks": ranks})))
        assert statuses.is_evaluating("job", 1) is is_evaluating
    assert not statuses.is_evaluating("job", 2), "another attempt"
    assert not statuses.is_evaluating("another", 1)
    monkeypatch.setattr(run_status, "FRESH_S", -1.0)
    assert not statuses.is_evaluating("job", 1), "its driver was last heard long ago"


def test_a_driver_that_was_stopped_is_named_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_status, "SILENCE_S", 0.0)
    statuses = RunStatuses()

    def silent() -> SilentDriver:
        suspect = statuses.silent_driver("job", 1, "/launch.")
        assert suspect is not None
        return suspect

    with sleeping() as driver:
        statuses.record_batch("job", _batch("driver", run=_status_of(driver)))
        statuses.record_batch("job", _batch("group-0"))
        _stop(driver.pid)
        first = silent()
        assert first.state == "stopped"
        assert f"(process {driver.pid} on {socket.gethostname()}) is stopped" in str(first)
        second = silent()
        assert second.stopped_s > first.stopped_s
        driver.send_signal(signal.SIGCONT)
        await_that(lambda: psutil.Process(driver.pid).status() != psutil.STATUS_STOPPED)
        assert (silent().state, silent().stopped_s) == ("working", 0.0)
        _stop(driver.pid)
        assert silent().stopped_s < second.stopped_s, "how long it was stopped before does not count"
        monkeypatch.setattr(run_status, "SILENCE_S", 3600.0)
        assert statuses.silent_driver("job", 1, "/launch.") is None
        assert statuses.end_driver("job", 1, "/launch.")
        assert driver.wait(DEADLINE_S) == -signal.SIGKILL


def test_a_later_service_finds_a_stopped_driver_by_its_launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also one that was stopped before its first word."""
    monkeypatch.setattr(run_status, "SILENCE_S", 0.0)
    launch = launch_prefix(str(tmp_path), 2)
    # A process with a driver's command line, which sleeps instead: a real one needs a cluster.
    command = [sys.executable, "-c", "import time; time.sleep(600)", "-m", "service.run.driver", f"{launch}0.json"]
    with subprocess.Popen(command) as driver:
        try:
            _stop(driver.pid)
            suspect = RunStatuses().silent_driver("job", 2, launch)
            assert (suspect.state, suspect.process) == ("stopped", f"process {driver.pid} on {socket.gethostname()}")
            assert RunStatuses().silent_driver("job", 1, launch_prefix(str(tmp_path), 1)) is None
        finally:
            driver.kill()


@pytest.mark.parametrize(
    ("silent_s", "state", "stopped_s", "unanswered_s", "is_frozen"),
    [
        (29.0, "stopped", 29.0, 0.0, False),
        (30.0, "stopped", 10.0, 0.0, True),
        (9999.0, "stopped", 1.0, 0.0, False),  # out of this service's reach, and stopped for a moment
        (9999.0, "working", 0.0, 9999.0, False),  # slow but alive
        (9999.0, "unseen", 0.0, 0.0, False),  # out of this service's reach, and answers its workers
        (299.0, "unseen", 0.0, 9999.0, False),
        (300.0, "unseen", 0.0, 300.0, True),
        (300.0, "idle", 0.0, 300.0, True),
    ],
)
def test_only_a_driver_that_cannot_be_honest_is_ended(
    silent_s: float, state: ProcessState, stopped_s: float, unanswered_s: float, is_frozen: bool
) -> None:
    driver = SilentDriver(1.8e9, silent_s, state, stopped_s=stopped_s, workers_heard=True, unanswered_s=unanswered_s)
    assert driver.is_frozen is is_frozen
    assert ("killed" in str(driver)) is is_frozen


def test_workers_say_for_how_long_their_driver_has_not_answered_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_status, "SILENCE_S", 0.01)
    statuses = RunStatuses()
    statuses.record_batch("job", _batch("driver"))

    def is_heard() -> bool:
        statuses.record_batch("job", _batch("group-0", driver_silent_s=7.0))
        suspect = statuses.silent_driver("job", 1, "/launch.")
        return suspect is not None and (suspect.state, suspect.unanswered_s) == ("unseen", 7.0)

    await_that(is_heard)


def test_a_frozen_driver_is_stopped_then_killed_and_costs_an_attempt() -> None:
    facts = replace(RUNNING, driver_trouble="its driver is stopped", driver_is_frozen=True)
    assert decide(facts, DEADLINES) == Stop("its driver is stopped")
    assert decide(replace(facts, stopped_at=995.0), DEADLINES) == Wait()
    assert decide(replace(facts, stopped_at=980.0), DEADLINES) == Stop("its driver is stopped", kills=True)
    stopped_facts = replace(facts, stopped_at=990.0, observation=Observation(status="stopped"), driver_is_frozen=False)
    decision = decide(stopped_facts, DEADLINES)
    assert isinstance(decision, Retry)
    assert (decision.kind, decision.counts_as) == ("driver", "failure")
    assert "the frozen driver of" in decision.reason


def test_a_job_whose_driver_is_silent_says_so_once_and_goes_on() -> None:
    decision = decide(replace(RUNNING, driver_trouble="its driver is stopped"), DEADLINES)
    assert isinstance(decision, Explain)
    assert decision.reason.endswith("; its driver is stopped")
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
    selection = select_ranks(ranks)
    assert [rank.rank for rank in selection] == [*range(MAX_RANKS - 1), 900]


def _status_of(process: "subprocess.Popen[bytes]") -> RunStatus:
    created_at = psutil.Process(process.pid).create_time()
    return RunStatus(host=socket.gethostname(), pid=process.pid, created_at=created_at)


def _stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    await_that(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)


def _batch(writer: str, run: RunStatus | None = None, driver_silent_s: float | None = None) -> RecordBatch:
    status = None if run is None else run.model_dump()
    return RecordBatch(attempt=1, writer=writer, first_seq=0, records=(), run=status, driver_silent_s=driver_silent_s)
