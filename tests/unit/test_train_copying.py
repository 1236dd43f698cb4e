"""Copies of a checkpoint in another storage: complete or absent, and resumed from like one of the run's own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe.storage.folder import Folder
from moe.train.checkpoint import marker as markers
from moe.train.checkpoint.copying import DamagedCheckpoint, copy_checkpoint
from moe.train.checkpoint.marker import FileSeal, Marker
from tests.refusals import expect_problem
from tests.unit.train_runs import corpus, course, job, run

MEGABYTE = 1 << 20
SIZES = (3 * MEGABYTE, 0, 10, 2 * MEGABYTE + 1)
NUM_BLOCKS = 7
"""Of a megabyte or less, that these files are read in."""

COPY_AND_DIE = """
import os, signal, sys
from moe.train.checkpoint import marker as markers
from moe.train.checkpoint.copying import copy_checkpoint
from moe.storage.folder import Folder
left = int(sys.argv[3])
def stopped():
    global left
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    return False
source = Folder(sys.argv[1])
copy_checkpoint(source, markers.read(source, "step-00000004.a2.g1"), Folder(sys.argv[2]), stopped)
"""


def commit_checkpoint(folder: Path) -> tuple[Folder, Marker]:
    """A checkpoint with files of different sizes, one in a subfolder."""
    checkpoints = Folder(str(folder))
    files: dict[str, FileSeal] = {}
    for number, size_bytes in enumerate(SIZES):
        path, content = f"{'part/' * (number == 3)}{number}.distcp", bytes([number]) * size_bytes
        checkpoints.write(f"step-00000004.a2.g1/{path}", content)
        files[path] = markers.seal(content)
    marker = Marker(step=4, attempt=2, group=1, num_workers=2, created_at="2026-01-31T12:00:00+00:00", files=files)
    checkpoints.write(marker.name + markers.SUFFIX, marker.to_bytes())
    return checkpoints, marker


@pytest.mark.sample(2)
@pytest.mark.parametrize("block", [0, 3, 6, NUM_BLOCKS])
def test_killed_anywhere_there_is_a_whole_checkpoint_or_none(tmp_path: Path, block: int) -> None:
    source, marker = commit_checkpoint(tmp_path / "source")
    to = Folder(str(tmp_path / "to"))
    command = [sys.executable, "-c", COPY_AND_DIE, source.url, to.url, str(block)]
    has_finished = subprocess.run(command, check=False).returncode == 0
    assert has_finished == (block == NUM_BLOCKS)
    assert markers.list_committed(to) == (["step-00000004.a0.g0"] if has_finished else [])
    copy = copy_checkpoint(source, marker, to)  # over the files of the killed process
    assert (copy.name, copy.files) == ("step-00000004.a0.g0", marker.files)
    assert markers.fault(to, markers.read(to, copy.name)) is None


def start_from(storage: Path, name: str, destination: Path) -> None:
    """Copy a checkpoint of a run into another run's storage."""
    source = Folder(str(storage / "checkpoints"))
    copy_checkpoint(source, markers.read(source, name), Folder(str(destination / "checkpoints")))


def test_a_job_that_starts_from_a_checkpoint_trains_to_the_losses_it_would_have_had(tmp_path: Path) -> None:
    spec = job(corpus(tmp_path))
    _, reference = run(spec, tmp_path / "one", tmp_path / "cache")
    start_from(tmp_path / "one", "step-00000006.a1.g0", tmp_path / "two")
    outcome, recorder = run(spec, tmp_path / "two", tmp_path / "cache")
    assert (outcome.kind, outcome.step) == ("succeeded", 8)
    assert course(recorder) == course(reference)[6:]


@pytest.mark.slow
def test_a_job_may_start_with_another_optimization_but_keeps_to_it(tmp_path: Path) -> None:
    data, cache = corpus(tmp_path), tmp_path / "cache"
    run(job(data, train={"num_steps": 4}), tmp_path / "one", cache)
    start_from(tmp_path / "one", "step-00000004.a1.g0", tmp_path / "two")
    train = {"num_steps": 8, "batch_tokens": 512, "seed": 3, "optimizer": {"name": "adamw", "peak_lr": 3e-3}}
    with expect_problem("conflict", "model.ffn_dim", 48):
        run(job(data, train=train, model={"ffn_dim": 48}), tmp_path / "two", cache)
    outcome, recorder = run(job(data, train=train), tmp_path / "two", cache)
    assert [record.step for record in recorder.metrics] == [5, 6, 7, 8]
    assert outcome.kind == "succeeded"
    with expect_problem("conflict", "train.seed", 4):
        run(job(data, train={**train, "num_steps": 12, "seed": 4}), tmp_path / "two", cache, attempt=2)


def test_a_file_that_has_grown_is_copied_no_further_than_what_was_written(tmp_path: Path) -> None:
    source, marker = commit_checkpoint(tmp_path / "source")
    path = next(iter(marker.files))
    os.truncate(tmp_path / "source" / marker.name / path, 1 << 40)
    num_blocks = 0

    def is_stopped() -> bool:
        nonlocal num_blocks
        num_blocks += 1
        return num_blocks > 100

    with pytest.raises(DamagedCheckpoint, match=f"{path} has more than its {SIZES[0]} written bytes"):
        copy_checkpoint(source, marker, Folder(str(tmp_path / "to")), is_stopped)
    assert num_blocks == 3
