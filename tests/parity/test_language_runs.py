"""Runs of language models on several ranks: from the checkpoint of another layout, from that of another job, with
frozen parts; and the same report under every layout."""

from pathlib import Path
from typing import Any

import pytest

from moe.spec import JobSpec
from moe.storage.folder import Folder
from moe.train.checkpoint import marker as markers
from moe.train.checkpoint.copying import copy_checkpoint
from moe.train.checkpoint.spec_changes import state_changes
from tests.parity.gloo_ranks import Pools
from tests.parity.language_models import ATTENTIONS
from tests.parity.test_checkpoint_ranks import assert_same_course, run_course
from tests.unit.language_runs import documents, language_job

TRAIN = {
    "dtype": "float64",
    "evaluation": {
        "every_steps": 3, "max_sequences_along_the_way": 5, "num_examples": 3, "prompts": ["import ", "def ", "class "],
        "prompt_max_tokens": 8,
    },
}  # fmt: skip
ATTENTION_OF = {
    "GQA": ATTENTIONS["GQA with windows, sinks and biases"],
    "tied, normed as a whole": ATTENTIONS["GQA with norms as wide as all heads"],
    "MLA": ATTENTIONS["MLA"],
    "DeltaNet": ATTENTIONS["DeltaNet and gated GQA"],
}


def spec_of(folder: Path, workers: int, attention: str, parallel: dict[str, Any], **train: Any) -> JobSpec:
    return language_job(
        documents(folder / "data"), num_steps=train.pop("num_steps", 5), workers=workers,
        model={"model_dim": 16, **ATTENTION_OF[attention]}, train={**TRAIN, **train}, parallel=parallel,
    )  # fmt: skip


def assert_same_report(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual["completions"] == expected["completions"]
    assert len(expected["completions"]) == 3
    for name, losses in expected["sources"].items():
        assert actual["sources"][name] == pytest.approx(losses, rel=1e-10)
        assert losses["loss"] is not None


FOLDED = {"expert": 2, "data": 2, "tensor": 2, "fsdp": 2, "expert_fsdp": 2, "recompute": "full"}
BETWEEN = [
    ("GQA", 2, {"expert": 2, "fsdp": 2}),
    ("MLA", 2, {"expert": 2, "tensor": 2}),
    ("DeltaNet", 4, FOLDED),
    ("tied, normed as a whole", 4, FOLDED),
    ("DeltaNet", 2, {"expert": 2, "fsdp": 2}),
    ("GQA", 2, {"expert": 1, "context": 2, "fsdp": 2}),
    ("DeltaNet", 4, {"expert": 2, "data": 2, "context": 2, "fsdp": 4, "expert_fsdp": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("attention", "workers", "parallel"), BETWEEN, ids=str)
def test_another_layout_and_back(
    ranks: Pools, tmp_path: Path, attention: str, workers: int, parallel: dict[str, Any]
) -> None:
    """Two steps on several ranks, two on one, the last and the report on several equal a run on one process."""
    single_spec, multi_spec = spec_of(tmp_path, 1, attention, {}), spec_of(tmp_path, workers, attention, parallel)
    _, expected, *_, report = run_course(single_spec, f"{tmp_path}/one", tmp_path / "cache")
    folders = f"{tmp_path}/many", tmp_path / "cache"
    first = ranks[workers].run(run_course, multi_spec, *folders, 0, 2)[0]
    second = run_course(single_spec, *folders, 1, 2)
    last = ranks[workers].run(run_course, multi_spec, *folders, 2)
    assert second[2][0] == f"resumed at step 2 from step-00000002.a1.g0 of {workers} workers on 1"
    assert_same_course(first[1] + second[1] + last[0][1], expected)
    for _, _, _, _, actual in last:
        assert_same_report(actual, report)


LAYOUTS = [
    (2, {"expert": 1, "fsdp": 2}), (4, {"expert": 1, "data": 4}), (4, {"expert": 4, "fsdp": 4}),
    (4, {"expert": 2, "context": 2, "tensor": 2}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "parallel"), LAYOUTS, ids=str)
def test_reports_do_not_see_the_layout(ranks: Pools, tmp_path: Path, workers: int, parallel: dict[str, Any]) -> None:
    """Losses by source, and completions. Two of four data ranks have no group to train on, and one has no text."""
    for attention in ("GQA", "DeltaNet"):
        single_spec, multi_spec = (
            spec_of(tmp_path, number, attention, axes, num_steps=1) for number, axes in ((1, {}), (workers, parallel))
        )
        *_, report = run_course(single_spec, f"{tmp_path}/{attention}/one", tmp_path / "cache")
        answers = ranks[workers].run(run_course, multi_spec, f"{tmp_path}/{attention}/many", tmp_path / "cache")
        for *_, actual in answers:
            assert_same_report(actual, report)


FROZEN = ["*.moe.router", "embedding.*"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "workers", "parallel"),
    [
        ([], FROZEN, 2, {"expert": 2, "fsdp": 2}),
        ([], FROZEN, 4, FOLDED),
        (FROZEN[:1], FROZEN, 2, {"fsdp": 2}),
        ([], FROZEN, 2, {"pipeline": 2, "micro_batch_groups": 1}),
        ([], FROZEN[:1], 2, {"expert": 2, "fsdp": 2, "sharding": "gradients"}),
    ],
    ids=["then frozen, two ranks", "then frozen, four ranks", "then more of it", "two stages", "ZeRO-2"],
)
def test_a_job_that_starts_from_another(
    ranks: Pools, tmp_path: Path, before: list[str], after: list[str], workers: int, parallel: dict[str, Any]
) -> None:
    """The new job, which trains fewer parameters, computes the same on several ranks as on one."""
    cache, source = tmp_path / "cache", f"{tmp_path}/source"
    run_course(spec_of(tmp_path, 1, "GQA", {}, num_steps=2, freeze=before), source, cache)
    checkpoints = Folder(f"{source}/checkpoints")
    marker = markers.read(checkpoints, markers.list_committed(checkpoints)[0])

    def make_spec(number: int, axes: dict[str, Any]) -> JobSpec:
        copy_checkpoint(checkpoints, marker, Folder(f"{tmp_path}/{number}/checkpoints"), lambda: False)
        spec = spec_of(tmp_path, number, "GQA", axes, freeze=after, seed=9)
        return JobSpec.parse({**spec.model_dump(mode="json"), "start_from": {"job": "job-another"}})

    _, expected, messages, _, report = run_course(make_spec(1, {}), f"{tmp_path}/1", cache, 1)
    assert any("resumed at step 2" in message for message in messages)
    frozen_line = "frozen: embedding.weight, layers.*.feed_forward.moe.router"
    assert any(frozen_line in message for message in messages) == (after == FROZEN)
    answers = ranks[workers].run(run_course, make_spec(workers, parallel), f"{tmp_path}/{workers}", cache, 1)
    assert len(expected) == 3
    assert_same_course(answers[0][1], expected)
    for *_, actual in answers:
        assert_same_report(actual, report)


def test_what_had_no_moments_cannot_be_trained_from_there(tmp_path: Path) -> None:
    before, after = (spec_of(tmp_path, 1, "GQA", {}, freeze=freeze) for freeze in (FROZEN, FROZEN[:1]))
    assert not state_changes(before, before)
    (problem,) = state_changes(before, after)
    assert problem.path == "train.freeze"
    assert "starts from (embedding.weight)" in problem.rule
    assert "model.from" in problem.remedy
