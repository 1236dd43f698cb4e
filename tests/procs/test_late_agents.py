"""A Ray head on a machine so busy that a raylet gives up its own agents: started again, for as long as there is time.

A stand-in for Ray: `tests/ray/test_local_head.py` has a real raylet, whose agent is stopped.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.head import ray_start
from service.head.local_head import LocalHead
from service.head.ray_start import LocalHeadError
from tests.processes import with_environment
from tests.procs.stand_in_ray import STAND_IN

LATE = "[2026-11-27 04:54:46,591 C 1 1] (raylet) node_manager.cc:3576: Timed out waiting for file metrics_agent_port"
BROKEN = "[2026-11-27 04:54:46,591 C 1 1] (raylet) main.cc:12: no room in /dev/shm"
SAYING_OTHERWISE = "[2026-11-27 04:54:46,591 I 1 1] (raylet) main.cc:283: Timed out waiting for file: is no reason"
FAILING = """
import os, subprocess, sys
from pathlib import Path

said = Path(os.environ["STAND_IN_FAILURES"])
if left := said.read_text().splitlines():
    said.write_text("\\n".join(left[1:]))
    folder = next(word[11:] for word in sys.argv if word.startswith("--temp-dir="))
    logs = Path(folder, "session_1", "logs")
    logs.mkdir(parents=True)
    (logs / "raylet.out").write_text("started\\n" + left[0] + "\\nand a trace\\n")
    subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    sys.exit(1)
"""
"""Put before the stand-in: it fails once for each line of a file, which its raylet says."""


@pytest.fixture
def failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of what is still to go wrong."""
    failures = tmp_path / "failures"
    monkeypatch.setenv("STAND_IN_FAILURES", str(failures))
    monkeypatch.setattr(ray_start, "RAY", FAILING + STAND_IN)
    yield failures
    LocalHead.stop_recorded(tmp_path)
    for process in with_environment("STAND_IN_FAILURES", str(failures)):
        process.kill()


@pytest.mark.parametrize("times", range(4))
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
    with pytest.raises(LocalHeadError, match=r"ray start failed \(1\)") as told:
        LocalHead.start(tmp_path, num_cpus=1)
    assert ("no room in /dev/shm" in str(told.value)) == (reason == BROKEN)
    assert failures.read_text() == LATE  # no third start
    assert with_environment("STAND_IN_FAILURES", str(failures)) == []
    assert LocalHead.find(tmp_path) is None


def test_it_ends_when_the_time_is_over(failures: Path, tmp_path: Path) -> None:
    failures.write_text("\n".join([LATE] * 1000))
    begun = time.monotonic()
    with pytest.raises(LocalHeadError, match="ray start failed"):
        LocalHead.start(tmp_path, num_cpus=1, timeout_s=2)
    assert time.monotonic() - begun >= 2
    assert 0 < len(failures.read_text().splitlines()) < 1000
    assert with_environment("STAND_IN_FAILURES", str(failures)) == []
