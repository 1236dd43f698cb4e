"""The hook of a pod that is told to end: it waits for the driver and Ray Train's workers of its container."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from service.run.await_training_end import training_processes


@contextmanager
def process(title: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process with this title."""
    with subprocess.Popen(["bash", "-c", f"exec -a '{title}' cat"], stdin=-1, stdout=-1) as cat:
        assert cat.stdin is not None
        assert cat.stdout is not None
        cat.stdin.write(b"ready\n")
        cat.stdin.flush()
        assert cat.stdout.readline() == b"ready\n", "bash has become the process"
        try:
            yield cat
        finally:
            cat.kill()


@pytest.mark.parametrize(
    ("title", "counts"),
    [("ray::RayTrainWorker.run_train_fn", True), ("ray::RayTrainWorker", True), ("ray::IDLE", False), ("cat", False)],
)
def test_workers_are_told_by_their_title(title: str, counts: bool) -> None:
    with process(title) as cat:
        assert (cat.pid in set(training_processes())) == counts
    assert cat.pid not in set(training_processes())


def test_a_driver_is_told_by_its_module(tmp_path: Path) -> None:
    script = "import sys; print('ready', flush=True); sys.stdin.read()"
    arguments = [sys.executable, "-c", script, "service.run.driver", str(tmp_path / "launch")]
    with subprocess.Popen(arguments, stdin=-1, stdout=-1) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == b"ready\n"
        assert driver.pid in set(training_processes())
        driver.kill()
    assert driver.pid not in set(training_processes())


def test_the_hook_ends_when_no_training_runs(tmp_path: Path) -> None:
    # The machine's own processes may train; the hook looks at those of its container, here a folder like /proc.
    training = tmp_path / "17"
    training.mkdir()
    (training / "cmdline").write_bytes(b"python\0-m\0service.run.driver\0launch.json\0")
    (tmp_path / "18").mkdir()  # ended between listing and reading
    (tmp_path / "self").mkdir()
    assert list(training_processes(tmp_path)) == [17]
    (training / "cmdline").write_bytes(b"")  # a zombie
    assert list(training_processes(tmp_path)) == []
