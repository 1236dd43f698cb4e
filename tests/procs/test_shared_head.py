"""One state folder has one Ray head, however many commands start, tend and stop it, at once or after a SIGKILL.

A stand-in for Ray: `tests/ray/test_local_head.py` and `tests/service_cli/test_up.py` have real ones.
"""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from service.head import ray_start
from service.head.keeper import HeadKeeper
from service.head.local_head import LocalHead
from service.head.processes import Process
from service.wire.trouble import Trouble
from tests.processes import await_that, sleeping
from tests.procs.stand_in_ray import STAND_IN, head_processes, process_of

START = """
import sys
from service.head import ray_start
from service.head.local_head import LocalHead
ray_start.RAY = sys.argv[2]
LocalHead.start(sys.argv[1], num_cpus=1)
"""


START_DASHBOARD = """
import os, signal, sys
from service.head import local_head

def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)

local_head.write_record = killed
local_head.LocalHead.find(sys.argv[1]).with_dashboard()
"""


def kill(process: Process) -> None:
    live_process = process.find()
    live_process.kill()
    await_that(lambda: process.find() is None)


def test_starts_at_the_same_time_make_one_head(state_dir: Path) -> None:
    with ThreadPoolExecutor() as pool:
        starts = [pool.submit(LocalHead.start, state_dir, num_cpus=1) for _ in range(3)]
        heads = [start.result() for start in starts]
    assert heads[0] == heads[1] == heads[2] == LocalHead.find(state_dir)
    assert len(head_processes(state_dir)) == 3
    heads[0].stop()
    assert head_processes(state_dir) == []


def test_two_that_tend_one_head_start_it_again_once(state_dir: Path) -> None:
    head = LocalHead.start(state_dir, num_cpus=1)
    keepers = [HeadKeeper(head), HeadKeeper(head)]
    kill(head.nodes[0].processes[0])
    with ThreadPoolExecutor() as pool:
        list(pool.map(HeadKeeper.look, keepers))
    for keeper in keepers:
        keeper.look()
    assert keepers[0].head == keepers[1].head == LocalHead.find(state_dir)
    assert [keeper.trouble() for keeper in keepers] == [None, None]
    assert len(head_processes(state_dir)) == 3
    assert keepers[0].head.dashboard_url == head.dashboard_url


def test_a_head_that_somebody_stops_is_not_started_again(state_dir: Path) -> None:
    keeper = HeadKeeper(LocalHead.start(state_dir, num_cpus=1))
    assert LocalHead.stop_recorded(state_dir)
    for _ in range(3):
        keeper.look()
    assert keeper.trouble() == Trouble(
        "its Ray head was stopped, as by 'shardyard down': restart 'shardyard up'", runs_nothing=True
    )
    assert head_processes(state_dir) == []
    other_head = LocalHead.start(state_dir, num_cpus=1)  # of another `up`, at another address
    keeper.look()
    assert "its Ray head was stopped" in str(keeper.trouble())
    keeper.head.stop()
    assert LocalHead.find(state_dir) == other_head, "only its own head is stopped, and taken off the record"


def test_a_start_that_fails_leaves_what_was_recorded(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = HeadKeeper(head := LocalHead.start(state_dir, num_cpus=1))
    kill(head.nodes[0].processes[0])
    monkeypatch.setattr(ray_start, "RAY", "raise SystemExit('no room for Ray')")
    keeper.look()
    assert "and is being restarted (try 1 of 6)" in str(keeper.trouble())
    assert LocalHead.from_record(state_dir) == head
    assert head_processes(state_dir) == []
    assert LocalHead.stop_recorded(state_dir)
    assert not LocalHead.stop_recorded(state_dir)


def test_what_a_killed_start_left_is_found_and_ended(state_dir: Path, hold: Path) -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", START, str(state_dir), STAND_IN], env={**os.environ, "STAND_IN_HOLD": str(hold)}
    )
    await_that(lambda: len(head_processes(state_dir)) == 4)  # `ray start` itself among them
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    assert LocalHead.find(state_dir) is None
    (option,) = {  # once, also of a process that is about to become another one
        word for process in head_processes(state_dir) for word in process.cmdline() if word.startswith("--temp-dir=")
    }
    folder = Path(option.removeprefix("--temp-dir="))
    assert folder.is_dir()
    assert LocalHead.stop_recorded(state_dir)
    assert head_processes(state_dir) == []
    assert not folder.parent.exists()


def test_a_dashboard_whose_start_was_killed_before_it_was_recorded_is_not_left(state_dir: Path) -> None:
    head = LocalHead.start(state_dir, num_cpus=1)
    kill(head.dashboard.process)
    result = subprocess.run([sys.executable, "-c", START_DASHBOARD, str(state_dir)], check=False)
    assert result.returncode == -signal.SIGKILL
    core = {process.pid for process in head.nodes[0].processes}
    await_that(
        lambda: {process.pid for process in head_processes(state_dir)} == core, lambda: str(head_processes(state_dir))
    )
    assert LocalHead.find(state_dir) == head
    assert head.with_dashboard().dashboard.running()


@pytest.mark.parametrize("version", [1, 2])
def test_a_head_of_an_earlier_release_is_stopped(state_dir: Path, version: int) -> None:
    with sleeping() as core:
        process = {"pid": core.pid, "started": process_of(core).started}
        node = {"session": core.pid, "processes": [process]}
        folder = state_dir / "head"
        (folder / "n0").mkdir(parents=True)
        (folder / "n0" / "ray_current_cluster").write_text("127.0.0.1:1")
        record = {
            "version": version, "folder": str(folder), "token_path": str(state_dir / "token"), "num_cpus": 1,
            "address": "127.0.0.1:1", "nodes": [node],
        }  # fmt: skip
        if version == 1:
            record["dashboard_url"] = "http://127.0.0.1:2"
        else:
            node["others"] = []
            record |= {"num_gpus": 0, "dashboard": {"process": process, "command": ["true"], "url": "http://x",
                                                    "environment": {}}}  # fmt: skip
        (state_dir / "ray").mkdir()
        (state_dir / "ray" / "head.json").write_text(json.dumps(record))
        # The release before the last recorded too little of a head to go on with it.
        assert (LocalHead.find(state_dir) is None) == (version == 1)
        assert LocalHead.stop_recorded(state_dir)
        assert core.wait() == -signal.SIGTERM
    assert not folder.exists()
