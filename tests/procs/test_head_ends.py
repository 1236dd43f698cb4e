"""The Ray head of a state folder, started and stopped by several commands at once, and where files cannot be written or
were cleared away. A bound on the size of files stands for a full disk."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from service.head import ray_start
from service.head.dashboard import Dashboard, DashboardError
from service.head.local_head import LocalHead
from service.head.processes import Process
from service.head.ray_start import LocalHeadError
from service.head.record import changing, record_file
from tests.processes import DEADLINE_S, await_that, with_environment
from tests.procs.stand_in_ray import STAND_IN, found_head, head_processes
from tests.service_cli.command import COMMAND, environment, output_of
from tests.service_cli.running_up import WITHOUT_RAY, up

WAITS = "another command is starting or stopping Ray: waiting for it"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_up_that_begins_while_another_ends(state_dir: Path, hold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_HOLD_JOBS", str(hold))
    with up(state_dir, program=WITHOUT_RAY) as first:
        first.url()
        before = found_head(state_dir)
        first.process.terminate()
        await_that(lambda: hold.read_text() == "asked", lambda: first.log)  # whether jobs run, before it stops
        with up(state_dir, program=WITHOUT_RAY) as second:
            second.await_text(WAITS)
            hold.unlink()
            assert first.process.wait(DEADLINE_S) == 0
            assert first.log.endswith("Ray stopped\n")
            second.url()
            after = found_head(state_dir)
            assert after.folder != before.folder
            assert after.dashboard.running()
            assert len(head_processes(state_dir)) == 3
            assert second.stop() == 0
    assert head_processes(state_dir) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_down_spares_a_head_that_an_up_is_starting(
    state_dir: Path, hold: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_HOLD", str(hold))
    with up(state_dir, program=WITHOUT_RAY) as service:
        await_that((state_dir / "ray" / "head.json").exists, lambda: service.log)
        with subprocess.Popen(
            [*COMMAND, "down", "--state-dir", str(state_dir)], env=environment(), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as down:  # fmt: skip
            waits = down.stdout.readline()
            hold.unlink()
            _, error = down.communicate(timeout=DEADLINE_S)
        assert waits.startswith(WAITS)
        assert down.returncode == 1
        assert "a 'shardyard up' has just started this Ray head and uses it" in error
        service.url()
        assert len(head_processes(state_dir)) == 3
        assert output_of("down", "--state-dir", state_dir).startswith("Ray stopped")
        assert service.stop() == 0
    assert head_processes(state_dir) == []


def test_an_up_that_ends_says_that_it_waits_for_another_command(state_dir: Path) -> None:
    with up(state_dir, program=WITHOUT_RAY) as service:
        service.url()
        with changing(record_file(state_dir)):
            service.process.terminate()
            service.await_text(WAITS)
        assert service.process.wait(DEADLINE_S) == 0
        assert service.log.endswith("Ray stopped\n")
    assert head_processes(state_dir) == []


def test_two_that_end_at_once_leave_no_head(state_dir: Path) -> None:
    with up(state_dir, program=WITHOUT_RAY) as first:
        first.url()
        with up(state_dir, program=WITHOUT_RAY) as second:
            second.url()
            for service in (first, second):
                service.process.terminate()
            for service in (first, second):
                assert service.process.wait(DEADLINE_S) == 0
    assert head_processes(state_dir) == []


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


@pytest.mark.parametrize(
    ("max_bytes", "file"), [(10, "token"), (400, "head.json")],
    ids=["before anything is started", "where all of it is recorded"],
)  # fmt: skip
def test_a_head_that_cannot_be_recorded_is_not_started(state_dir: Path, max_bytes: int, file: str) -> None:
    command = [sys.executable, "-c", START, str(state_dir), STAND_IN, str(max_bytes)]
    # Otherwise Python would leave truncated bytecode for every later process.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert result.stdout == f"the Ray head cannot be started: {state_dir}/ray/{file}: File too large\n", result.stderr
    assert head_processes(state_dir) == []
    assert not LocalHead.stop_recorded(state_dir)


def test_a_head_whose_folder_was_cleared_away_is_started_anew(state_dir: Path) -> None:
    with up(state_dir, "--keep-ray", program=WITHOUT_RAY) as first:
        first.url()
        assert first.stop() == 0
    head = found_head(state_dir)
    shutil.rmtree(head.folder)
    assert LocalHead.find(state_dir) is None
    with up(state_dir, program=WITHOUT_RAY) as second:
        second.url()
        assert found_head(state_dir).folder != head.folder
        assert not any(process.find() for process in head.nodes[0].processes)
        assert second.stop() == 0


@pytest.mark.slow
def test_a_folder_or_a_token_that_is_removed_under_a_running_up_is_made_again(state_dir: Path) -> None:
    with up(state_dir, program=WITHOUT_RAY) as service:
        service.url()
        head = found_head(state_dir)
        token = head.token_path.read_text()
        head.token_path.unlink()
        await_that(head.token_path.exists, lambda: service.log)
        assert head.token_path.read_text() == token
        assert head.token_path.stat().st_mode & 0o777 == 0o600
        shutil.rmtree(head.folder)
        await_that(lambda: LocalHead.find(state_dir) is not None, lambda: service.log)
        new = found_head(state_dir)
        assert (new.folder != head.folder, new.dashboard_url) == (True, head.dashboard_url)
        assert service.stop() == 0


def test_a_dashboard_that_ends_before_it_is_recorded_is_told_of_in_words(tmp_path: Path) -> None:
    before = psutil.Process().children()

    def end(dashboard: Dashboard) -> None:
        process = dashboard.process.find()
        process.kill()
        # The shell that started it reads there, too, until it ends.
        await_that(lambda: not dashboard.running() and not any(map(is_alive, psutil.Process().children())))

    def is_alive(child: psutil.Process) -> bool:
        return child not in before and child.status() != psutil.STATUS_ZOMBIE

    dashboard = Dashboard(Process(0, 0.0), ("sleep", "600"), "http://127.0.0.1:1", {})
    with pytest.raises(DashboardError, match="the dashboard did not start"):
        dashboard.start(os.environ, tmp_path, end)


def test_an_up_whose_record_was_cleared_away_ends_ray_with_itself(state_dir: Path) -> None:
    with up(state_dir, program=WITHOUT_RAY) as service:
        service.url()
        shutil.rmtree(state_dir / "ray")
        assert service.stop() == 0
        assert service.log.endswith("Ray stopped\n")
    assert head_processes(state_dir) == []


LATE = "[2026-11-27 04:54:46,591 C 1 1] (raylet) node_manager.cc:3576: Timed out waiting for file metrics_agent_port"
BROKEN = "[2026-11-27 04:54:46,591 C 1 1] (raylet) main.cc:12: no room in /dev/shm"
SAYING_OTHERWISE = "[2026-11-27 04:54:46,591 I 1 1] (raylet) main.cc:283: Timed out waiting for file: is no reason"
FAILING = """
import os, subprocess, sys
from pathlib import Path

file = Path(os.environ["STAND_IN_FAILURES"])
if left := file.read_text().splitlines():
    rest = file.with_suffix(f".{os.getpid()}")
    rest.write_text("\\n".join(left[1:]))
    rest.replace(file)  # at once: whoever starts it may end it at any moment
    folder = next(word[11:] for word in sys.argv if word.startswith("--temp-dir="))
    logs = Path(folder, "session_1", "logs")
    logs.mkdir(parents=True)
    (logs / "raylet.out").write_text("started\\n" + left[0] + "\\nand a trace\\n")
    subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    sys.exit(1)
"""
"""Code before the stand-in: it fails once for each line of a file, which its raylet logs."""


@pytest.fixture
def failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """File of the failures still to come."""
    failures = tmp_path / "failures"
    monkeypatch.setenv("STAND_IN_FAILURES", str(failures))
    monkeypatch.setattr(ray_start, "RAY", FAILING + STAND_IN)
    yield failures
    LocalHead.stop_recorded(tmp_path)
    for process in with_environment("STAND_IN_FAILURES", str(failures)):
        process.kill()


@pytest.mark.parametrize("times", [0, 3])
def test_it_is_started_again_and_nothing_is_left_of_what_failed(failures: Path, tmp_path: Path, times: int) -> None:
    failures.write_text("\n".join([LATE] * times))
    head = LocalHead.start(tmp_path, num_cpus=1)
    assert failures.read_text() == ""
    assert head.running()
    assert len(with_environment("STAND_IN_FAILURES", str(failures))) == 3  # the stand-in's
    assert not (head.folder / "n0" / "session_1").exists()
    head.stop()
    assert with_environment("STAND_IN_FAILURES", str(failures)) == []


@pytest.mark.parametrize("reason", [BROKEN, SAYING_OTHERWISE])
def test_another_fault_is_told_at_once(failures: Path, tmp_path: Path, reason: str) -> None:
    failures.write_text("\n".join([LATE, reason, LATE]))
    with pytest.raises(LocalHeadError, match=r"ray start failed \(1\)") as error:
        LocalHead.start(tmp_path, num_cpus=1)
    assert ("no room in /dev/shm" in str(error.value)) == (reason == BROKEN)
    assert failures.read_text() == LATE  # no third start
    assert with_environment("STAND_IN_FAILURES", str(failures)) == []
    assert LocalHead.find(tmp_path) is None


def test_it_ends_when_the_time_is_over(failures: Path, tmp_path: Path) -> None:
    failures.write_text("\n".join([LATE] * 1000))
    start_s = time.monotonic()
    with pytest.raises(LocalHeadError, match="ray start failed"):
        LocalHead.start(tmp_path, num_cpus=1, timeout_s=2)
    assert time.monotonic() - start_s >= 2
    assert failures.read_text() != "", "it ended before the failures did"
    assert with_environment("STAND_IN_FAILURES", str(failures)) == []
