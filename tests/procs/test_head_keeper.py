"""Dead parts of a Ray head are restarted, and only those: soon at first, then ever later, and not for ever.

Plain processes stand for Ray's, which take half a minute to start: `tests/service_cli/test_up.py` has real ones.
"""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from service.head import keeper as head_keeper
from service.head.dashboard import Dashboard
from service.head.keeper import BACKOFF_S, MAX_BACKOFF_S, MAX_TRIES, WITHIN_S, GiveUp, HeadKeeper, Pause, Try, next_try
from service.head.local_head import LocalHead
from service.head.ray_start import Node
from tests.processes import await_that, sleeping
from tests.procs.stand_in_ray import process_of


@given(st.lists(st.floats(0.1, 200.0), min_size=1, max_size=400))
def test_tries_are_bounded_and_wait_for_each_other(looks_after_s: list[float]) -> None:
    """However often somebody looks at a head that never comes up."""
    tries: list[float] = []
    time_s = 0.0
    for after_s in looks_after_s:
        time_s += after_s
        match next_try(tries, time_s):
            case Try():
                tries.append(time_s)
            case Pause(left_s):
                assert 0 < left_s <= MAX_BACKOFF_S
            case GiveUp():
                assert len(tries) >= MAX_TRIES
    for first, second in pairwise(tries):
        assert second - first >= BACKOFF_S
    for first, one_too_many in zip(tries, tries[MAX_TRIES:], strict=False):
        assert one_too_many - first >= WITHIN_S


def test_the_first_comes_at_once_and_each_waits_twice_as_long() -> None:
    assert next_try([], 0.0) == Try()
    tries = [0.0]
    for wait_s in (2.0, 4.0, 8.0, 16.0, 32.0):
        assert next_try(tries, tries[-1] + wait_s - 0.5) == Pause(0.5)
        assert next_try(tries, tries[-1] + wait_s) == Try()
        tries.append(tries[-1] + wait_s)
    assert next_try(tries, tries[-1] + 500) == GiveUp()


@pytest.fixture
def core() -> Iterator[subprocess.Popen[bytes]]:
    """The process that jobs run on."""
    with sleeping() as process:
        yield process


def head_of(folder: Path, core: subprocess.Popen[bytes], *command: str) -> LocalHead:
    """A head whose core runs and whose dashboard is dead, and would be started by `command` PORT."""
    (folder / "n0").mkdir(mode=0o700)
    (folder / "n0" / "ray_current_cluster").write_text("127.0.0.1:1")
    (folder / "ray").mkdir()
    dead = subprocess.Popen(["true"])
    dashboard_process = process_of(dead)
    dead.wait()
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    head = LocalHead(
        state_file=folder / "ray" / "head.json", address="127.0.0.1:1", token_path=folder / "token", folder=folder,
        num_cpus=2, num_gpus=0, nodes=(Node(core.pid, (process_of(core),)),),
        dashboard=Dashboard(dashboard_process, (*command, str(port)), f"http://127.0.0.1:{port}", {}),
    )  # fmt: skip
    head.record()
    return head


def test_a_dead_dashboard_is_started_alone(tmp_path: Path, core: subprocess.Popen[bytes]) -> None:
    keeper = HeadKeeper(head_of(tmp_path, core, sys.executable, "-m", "http.server", "--bind", "127.0.0.1"))
    keeper.look()
    trouble = keeper.trouble()
    assert trouble.reason.startswith("the dashboard of its Ray head died at 20")
    assert trouble.reason.endswith("and is being restarted (try 1 of 6); training continues")
    assert not trouble.runs_nothing
    keeper.look()
    assert keeper.trouble() is None
    assert core.poll() is None
    new_process = keeper.head.dashboard.process.find()
    stored_head = LocalHead.find(tmp_path)
    assert stored_head == keeper.head, "another control plane finds the new one"
    assert new_process.parent() != psutil.Process(), "it outlives this process"
    new_process.kill()
    await_that(lambda: not stored_head.dashboard.running())


def test_restarts_are_given_up(tmp_path: Path, core: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_keeper, "BACKOFF_S", 0.0)
    keeper = HeadKeeper(head := head_of(tmp_path, core, "sh", "-c", "echo no room for a dashboard"))
    with capture_logs() as log:
        for _ in range(20):
            keeper.look()
    assert "was restarted 6 times in vain: end 'shardyard up', fix what its log says about Ray" in str(keeper.trouble())
    events = [line["event"] for line in log]
    assert events[0] == "part of the Ray head died"
    assert events[1:-1] == ["restarting it", "the Ray head did not start"] * MAX_TRIES
    assert events[-1] == "giving up on the Ray head"
    assert "no room for a dashboard" in log[2]["why"]
    assert core.poll() is None
    with sleeping() as dashboard:  # that somebody else has restarted
        replace(head, dashboard=replace(head.dashboard, process=process_of(dashboard))).record()
        keeper.look()
        assert keeper.trouble() is None
        dashboard.kill()
    monkeypatch.setattr(head_keeper, "WITHIN_S", 0.0)  # all tries were long ago
    keeper.look()
    assert "and is being restarted (try 1 of 6)" in str(keeper.trouble())
