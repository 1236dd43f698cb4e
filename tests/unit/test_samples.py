"""Prompts that a language model completes at each evaluation during training."""

from pathlib import Path
from typing import Any

from moe.export.load import load_trained
from moe.spec import JobSpec
from moe.spec.generation import GenerationSpec
from moe.tasks.build import build_task
from tests.refusals import expect_problems
from tests.unit.language_runs import documents, language_job
from tests.unit.train_runs import run

PROMPTS = ["import os\n", "def test_", "class "]


def job(folder: Path, **evaluation: Any) -> JobSpec:
    evaluation = {"every_steps": 2, "prompts": PROMPTS, "prompt_max_tokens": 9, "num_examples": 0, **evaluation}
    return language_job(documents(folder / "data"), train={"evaluation": evaluation}, checkpoint={"every_steps": 2})


def test_samples_are_what_the_checkpoint_of_their_step_generates(tmp_path: Path) -> None:
    _, recorder = run(job(tmp_path), tmp_path / "job", tmp_path / "cache")
    samples = {record.step: record.samples for record in recorder.metrics}
    assert [step for step in samples if samples[step]] == [2, 4]
    for step in (2, 4):
        (checkpoint,) = (path for path in (tmp_path / "job/checkpoints").glob(f"step-*{step}.a*") if path.is_dir())
        texts = load_trained(str(checkpoint)).generate(PROMPTS, GenerationSpec(max_tokens=9))
        assert [(sample.prompt, sample.completion) for sample in samples[step]] == list(
            zip(PROMPTS, texts, strict=True)
        )


def test_prompts_longer_than_the_training_texts_are_refused_before_training(tmp_path: Path) -> None:
    spec = job(tmp_path, prompts=["x", "y z " * 100, "a b " * 200])
    problems = [("too_large", f"train.evaluation.prompts[{index}]", None) for index in (1, 2)]
    with expect_problems(problems):
        build_task(spec).prepare(tmp_path / "cache")


def test_prompts_that_are_never_completed_are_refused(tmp_path: Path) -> None:
    path = "train.evaluation.prompts"
    with expect_problems([("requires", path, PROMPTS)]):
        job(tmp_path, every_steps=None)
    translation = {"model": {"preset": "gshard-tiny"}, "data": {"corpus": "catalogs"}}
    with expect_problems([("not_applicable", path, PROMPTS)]):
        evaluation = {"every_steps": 2, "prompts": PROMPTS}
        JobSpec.parse({**translation, "train": {"num_steps": 4, "evaluation": evaluation}})
