"""A Ray head where files cannot be written, or were cleared away: said in words, and nothing left that nobody knows.

A stand-in for Ray, as in `test_shared_head.py`. A bound on the size of files stands for a full disk.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from service.head.dashboard import Dashboard, DashboardError
from service.head.local_head import LocalHead
from service.head.processes import Process
from tests.processes import DEADLINE_S, await_that, with_environment
from tests.procs.stand_in_ray import STAND_IN
from tests.service_cli.running_up import WITHOUT_RAY, up

START = """
import resource, sys
from service.head import ray_start
from service.head.local_head import LocalHead
from service.head.ray_start import LocalHeadError

ray_start.RAY = sys.argv[2]
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
try:
    LocalHead.start(sys.argv[1], num_cpus=1)
except LocalHeadError as error:
    print(error)
"""


@pytest.fixture
def state_dir(tmp_path: Path) -> Iterator[Path]:
    """A state folder, whose Ray head is gone afterwards, whatever happens."""
    yield tmp_path / "state"
    LocalHead.stop_recorded(tmp_path / "state")
    for process in with_environment("RAY_AUTH_TOKEN_PATH", str(tmp_path / "state" / "ray" / "token")):
        process.kill()


def started(state_dir: Path) -> int:
    """Number of processes that any start of a head left running for this state folder."""
    return len(with_environment("RAY_AUTH_TOKEN_PATH", str(state_dir / "ray" / "token")))


@pytest.mark.parametrize(
    ("max_bytes", "file"), [(10, "token"), (400, "head.json")],
    ids=["before anything is started", "where all of it is recorded"],
)  # fmt: skip
def test_a_head_that_cannot_be_recorded_is_not_started(state_dir: Path, max_bytes: int, file: str) -> None:
    asked = [sys.executable, "-c", START, str(state_dir), STAND_IN, str(max_bytes)]
    # Else Python leaves what it compiles cut off where the bound is, for every later process.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(asked, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.stdout == f"the Ray head cannot be started: {state_dir}/ray/{file}: File too large\n", done.stderr
    assert started(state_dir) == 0
    assert not LocalHead.stop_recorded(state_dir)


def test_a_head_whose_folder_was_cleared_away_is_started_anew(state_dir: Path) -> None:
    with up(state_dir, "--keep-ray", program=WITHOUT_RAY) as first:
        first.url()
        assert first.stop() == 0
    head = LocalHead.find(state_dir)
    assert head is not None
    shutil.rmtree(head.folder)
    assert LocalHead.find(state_dir) is None
    with up(state_dir, program=WITHOUT_RAY) as second:
        second.url()
        new = LocalHead.find(state_dir)
        assert new is not None
        assert new.folder != head.folder
        assert not any(process.find() for process in head.nodes[0].processes)
        assert second.stop() == 0


def test_a_folder_or_a_token_that_is_removed_under_a_running_up_is_made_again(state_dir: Path) -> None:
    with up(state_dir, program=WITHOUT_RAY) as running:
        running.url()
        head = LocalHead.find(state_dir)
        assert head is not None
        token = head.token_path.read_text()
        head.token_path.unlink()
        await_that(head.token_path.exists, lambda: running.log)
        assert head.token_path.read_text() == token
        assert head.token_path.stat().st_mode & 0o777 == 0o600
        shutil.rmtree(head.folder)
        await_that(lambda: LocalHead.find(state_dir) is not None, lambda: running.log)
        new = LocalHead.find(state_dir)
        assert new is not None
        assert (new.folder != head.folder, new.dashboard_url) == (True, head.dashboard_url)
        assert running.stop() == 0


def test_a_dashboard_that_ends_before_it_is_recorded_is_told_of_in_words(tmp_path: Path) -> None:
    before = psutil.Process().children()

    def end(dashboard: Dashboard) -> None:
        process = dashboard.process.find()
        assert process is not None
        process.kill()
        # The shell that started it reads there, too, until it ends.
        await_that(lambda: not dashboard.running() and not any(map(is_alive, psutil.Process().children())))

    def is_alive(child: psutil.Process) -> bool:
        return child not in before and child.status() != psutil.STATUS_ZOMBIE

    dashboard = Dashboard(Process(0, 0.0), ("sleep", "600"), "http://127.0.0.1:1", {})
    with pytest.raises(DashboardError, match="the dashboard did not start"):
        dashboard.start(os.environ, tmp_path, end)


def test_an_up_whose_record_was_cleared_away_ends_ray_with_itself(state_dir: Path) -> None:
    with up(state_dir, program=WITHOUT_RAY) as running:
        running.url()
        shutil.rmtree(state_dir / "ray")
        assert running.stop() == 0
        assert running.log.endswith("Ray stopped\n")
    assert started(state_dir) == 0
