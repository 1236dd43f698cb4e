"""Runs that keep their best checkpoint, and that end when evaluations no longer get better."""

from pathlib import Path
from typing import Any

import pytest

from moe.records import HeldOutResult
from moe.storage.folder import Folder
from moe.tasks.translation.task import TranslationTask
from moe.train.checkpoint.newest import NoCheckpoint, best_complete, newest_complete
from moe.train.recorder import MemoryRecorder
from service.cli.failures import Misuse
from service.cli.model_path import find_checkpoint
from service.control.report.checkpoints import list_checkpoints
from tests.unit.train_runs import RequestAfter, corpus, job, rewrite, run

KEEP_BEST = {"every_steps": 100, "keep": 1, "keep_best": {"metric": "held_out.seen"}}


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Losses that the evaluations of a run return, in order: real ones cannot be told when to rise."""
    values: list[float] = []

    def measure_held_out(*_: Any) -> HeldOutResult:
        return HeldOutResult({"unseen": 0.0, "seen": values.pop(0)})

    monkeypatch.setattr(TranslationTask, "measure_held_out", measure_held_out)
    return values


def spec(folder: Path, checkpoint: dict[str, Any] = KEEP_BEST, **evaluation: Any) -> Any:
    evaluation = {"every_steps": 1, "max_pairs": 6, "num_examples": 0, **evaluation}
    return job(corpus(folder), train={"evaluation": evaluation}, checkpoint=checkpoint)


def steps_in(storage: Path) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(Folder(str(storage)))]


def best_step(storage: Path) -> int:
    return int(best_complete(Folder(str(storage))).rpartition("step-")[2][:8])


def committed_steps(recorder: MemoryRecorder) -> list[int]:
    return [record.step for record in recorder.checkpoints]


def test_the_best_checkpoint_is_committed_and_kept_beside_the_newest(tmp_path: Path, losses: list[float]) -> None:
    losses += [5.0, 4.0, 4.5, 3.0, 3.0, 6.0, 7.0, 8.0]
    outcome, recorder = run(spec(tmp_path), tmp_path / "job", tmp_path / "cache")
    assert (outcome.step, committed_steps(recorder)) == (8, [1, 2, 4, 8])
    assert find_checkpoint(f"{tmp_path}/job@best", None, None).endswith("step-00000004.a1.g0")
    assert find_checkpoint(f"{tmp_path}/job", None, None).endswith("step-00000008.a1.g0")
    assert (steps_in(tmp_path / "job"), best_step(tmp_path / "job")) == ([4, 8], 4)
    assert [checkpoint.best for checkpoint in list_checkpoints(Folder(str(tmp_path / "job")))] == [True, None]


def test_a_resumed_run_compares_with_the_evaluations_before(tmp_path: Path, losses: list[float]) -> None:
    losses += [5.0, 3.0, 4.0]
    paused, _ = run(spec(tmp_path), tmp_path / "job", tmp_path / "cache", control=RequestAfter("pause", 3))
    losses += [3.5, 3.2, 2.0, 6.0, 6.0]
    _, recorder = run(spec(tmp_path), tmp_path / "job", tmp_path / "cache", group=1)
    assert (paused.step, committed_steps(recorder), losses) == (3, [6, 8], [])
    assert (steps_in(tmp_path / "job"), best_step(tmp_path / "job")) == ([6, 8], 6)


def test_training_ends_after_as_many_evaluations_without_a_better_one(tmp_path: Path, losses: list[float]) -> None:
    losses += [5.0, 4.0, 4.5, 4.1, 3.0]
    job_spec = spec(tmp_path, KEEP_BEST, stop_after=2)
    outcome, _ = run(job_spec, tmp_path / "job", tmp_path / "cache")
    assert (outcome.kind, outcome.step, steps_in(tmp_path / "job"), best_step(tmp_path / "job")) == (
        "succeeded", 4, [2, 4], 2,
    )  # fmt: skip
    resumed, recorder = run(job_spec, tmp_path / "job", tmp_path / "cache", group=1)
    assert (resumed.kind, resumed.step, recorder.metrics, losses) == ("succeeded", 4, [], [3.0])


def test_a_best_evaluation_without_a_checkpoint_has_no_best_checkpoint(tmp_path: Path, losses: list[float]) -> None:
    losses += [5.0, 4.0, 3.0, 6.0, 7.0, 8.0, 9.0, 9.0]
    run(spec(tmp_path, {"every_steps": 2, "keep": 4}), tmp_path / "job", tmp_path / "cache")
    assert steps_in(tmp_path / "job") == [2, 4, 6, 8]
    with pytest.raises(NoCheckpoint):
        best_complete(Folder(str(tmp_path / "job")))
    assert not any(checkpoint.best for checkpoint in list_checkpoints(Folder(str(tmp_path / "job"))))
    assert newest_complete(Folder(str(tmp_path / "job"))).endswith("step-00000008.a1.g0")


def test_a_run_whose_best_checkpoint_is_lost_finds_another(tmp_path: Path, losses: list[float]) -> None:
    losses += [1.0, 4.0, 5.0]
    no_best = spec(tmp_path, {"every_steps": 100, "keep": 1})
    run(no_best, tmp_path / "job", tmp_path / "cache", control=RequestAfter("pause", 3))
    losses += [6.0, 3.0, 4.0, 7.0, 7.0]
    run(spec(tmp_path), tmp_path / "job", tmp_path / "cache", group=1)
    assert (steps_in(tmp_path / "job"), best_step(tmp_path / "job")) == ([5, 8], 5)


DAMAGED = [
    b"", b"[]", b'{"best": null}', b'{"best": 5}', b'{"best": {}}', b'{"best": {"step": "8"}}', b"[" * 100_000,
    b" " * (2 << 20),
]  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("content", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_run_state_is_no_best_checkpoint_and_no_crash(
    tmp_path: Path, losses: list[float], content: bytes
) -> None:
    losses += [5.0, 4.0]
    run(spec(tmp_path), tmp_path / "job", tmp_path / "cache", control=RequestAfter("pause", 2))
    rewrite(tmp_path / "job", "run.json", lambda _: content)
    with pytest.raises(NoCheckpoint):
        best_complete(Folder(str(tmp_path / "job")))
    assert [checkpoint.best for checkpoint in list_checkpoints(Folder(str(tmp_path / "job")))] == [None]


def test_best_applies_to_jobs_only(tmp_path: Path, losses: list[float]) -> None:
    losses += [5.0, 4.0]
    run(spec(tmp_path), tmp_path / "job", tmp_path / "cache", control=RequestAfter("pause", 2))
    checkpoint = find_checkpoint(f"{tmp_path}/job@best", None, None)
    with pytest.raises(Misuse):
        find_checkpoint(f"{checkpoint}@best", None, None)
