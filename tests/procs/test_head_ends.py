"""The Ray head of a state folder is stopped by nobody who does not ask who uses it by then: `up` and `down` at once.

A stand-in for Ray, as in `test_shared_head.py`.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.head.local_head import LocalHead
from service.head.record import changing, record_file
from tests.processes import DEADLINE_S, await_that, with_environment
from tests.service_cli.command import COMMAND, environment, shardyard
from tests.service_cli.running_up import WITHOUT_RAY, up

WAITS = "another command is starting or stopping Ray: waiting for it"


@pytest.fixture
def state_dir(tmp_path: Path) -> Iterator[Path]:
    """A state folder, whose Ray head is gone afterwards, whatever happens."""
    yield tmp_path / "state"
    LocalHead.stop_recorded(tmp_path / "state")


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    """A file that something waits for to go."""
    hold = tmp_path / "hold"
    hold.touch()
    return hold


def started(state_dir: Path) -> int:
    """Number of processes that any start of a head left running for this state folder."""
    return len(with_environment("RAY_AUTH_TOKEN_PATH", str(state_dir / "ray" / "token")))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_up_that_begins_while_another_ends_has_a_head_of_its_own(
    state_dir: Path, hold: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_HOLD_JOBS", str(hold))
    with up(state_dir, program=WITHOUT_RAY) as first:
        first.url()
        before = LocalHead.find(state_dir)
        first.process.terminate()
        await_that(lambda: hold.read_text() == "asked", lambda: first.log)  # whether jobs run, before it stops
        with up(state_dir, program=WITHOUT_RAY) as second:
            second.await_text(WAITS)
            hold.unlink()
            assert first.process.wait(DEADLINE_S) == 0
            assert first.log.endswith("Ray stopped\n")
            second.url()
            after = LocalHead.find(state_dir)
            assert before is not None
            assert after is not None
            assert after.folder != before.folder
            assert after.dashboard.running()
            assert started(state_dir) == 3
            assert second.stop() == 0
    assert started(state_dir) == 0


@pytest.mark.timeout(1800)
def test_down_leaves_a_head_that_an_up_is_starting(
    state_dir: Path, hold: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_HOLD", str(hold))
    with up(state_dir, program=WITHOUT_RAY) as running:
        await_that((state_dir / "ray" / "head.json").exists, lambda: running.log)
        with subprocess.Popen(
            [*COMMAND, "down", "--state-dir", str(state_dir)], env=environment(), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as down:  # fmt: skip
            assert down.stdout is not None
            waits = down.stdout.readline()
            hold.unlink()
            _, error = down.communicate(timeout=DEADLINE_S)
        assert waits.startswith(WAITS)
        assert down.returncode == 1
        assert "a 'shardyard up' has just started this Ray head and uses it" in error
        running.url()
        assert started(state_dir) == 3
        asked_again = shardyard("down", "--state-dir", state_dir)
        assert asked_again.returncode == 0, asked_again.stderr
        assert asked_again.stdout.startswith("Ray stopped")
        assert running.stop() == 0
    assert started(state_dir) == 0


def test_an_up_that_ends_says_that_it_waits_for_another_command(state_dir: Path) -> None:
    with up(state_dir, program=WITHOUT_RAY) as running:
        running.url()
        with changing(record_file(state_dir)):
            running.process.terminate()
            running.await_text(WAITS)
        assert running.process.wait(DEADLINE_S) == 0
        assert running.log.endswith("Ray stopped\n")
    assert started(state_dir) == 0


def test_two_that_end_at_once_leave_no_head(state_dir: Path) -> None:
    with up(state_dir, program=WITHOUT_RAY) as first:
        first.url()
        with up(state_dir, program=WITHOUT_RAY) as second:
            second.url()
            for each in (first, second):
                each.process.terminate()
            for each in (first, second):
                assert each.process.wait(DEADLINE_S) == 0
    assert started(state_dir) == 0
