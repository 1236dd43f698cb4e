"""A run goes from layout to layout: pipeline stages, context ranks, experts, FSDP and ZeRO. The losses are those of one
process that was never interrupted."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe.export.load import load_trained
from moe.interchange.load import load_weights
from moe.parallel import Layout, local_parameters
from moe.plan import Plan
from moe.spec import JobSpec, LanguageModelSpec
from moe.storage.folder import Folder
from moe.tasks.build import build_model
from moe.train.checkpoint.parts import StoredParts
from moe.train.checkpoint.run_files import best_committed
from tests.interchange.test_jobs import further, mixtral, stored_in
from tests.parity.gloo_ranks import Pools
from tests.parity.language_models import ATTENTIONS
from tests.parity.test_checkpoint_killed import await_committed, newest_step, two_ranks
from tests.parity.test_checkpoint_ranks import assert_same_course, run_course
from tests.parity.trajectory import Degrees
from tests.unit.language_runs import documents, language_job
from tests.unit.train_runs import corpus, job

IN_STAGES = {"expert": 1, "micro_batch_groups": 1}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "experts": (2, {"expert": 2}),
    "FSDP": (2, {"expert": 1, "fsdp": 2, "expert_fsdp": 2}),
    "ZeRO": (2, {"expert": 2, "fsdp": 2, "sharding": "gradients"}),
    "context": (2, {"expert": 1, "context": 2}),
    "context and FSDP": (4, {"expert": 2, "data": 2, "context": 2, "fsdp": 4}),
    "context and ZeRO": (4, {"expert": 2, "data": 2, "context": 2, "fsdp": 4, "sharding": "optimizer"}),
    "context and tensor": (4, {"expert": 2, "context": 2, "tensor": 2}),
    "2 stages": (2, {**IN_STAGES, "pipeline": 2}),
    "4 stages": (4, {**IN_STAGES, "pipeline": 4}),
    "4 stages on 2 ranks": (2, {**IN_STAGES, "pipeline": 2, "virtual_stages": 2, "schedule": "interleaved"}),
    "uneven stages": (2, {**IN_STAGES, "pipeline": 2, "stages": [3, 1]}),
    "stages of experts": (4, {**IN_STAGES, "pipeline": 2, "expert": 2}),
    "stages, FSDP": (4, {**IN_STAGES, "pipeline": 2, "expert": 1, "fsdp": 2, "expert_fsdp": 2}),
    "stages, ZeRO": (4, {**IN_STAGES, "pipeline": 2, "expert": 2, "fsdp": 2, "sharding": "gradients"}),
    "stages, context": (4, {**IN_STAGES, "pipeline": 2, "expert": 2, "context": 2}),
    "stages, tensor": (4, {**IN_STAGES, "pipeline": 2, "expert": 2, "tensor": 2}),
}
TRAIN: dict[str, Any] = {
    "dtype": "float64", "ema_decay": 0.9, "batch_tokens": 1024,
    "evaluation": {"every_steps": 2, "use_ema": True},
}  # fmt: skip
MOE = {
    "num_experts": 4, "hidden_dim": 24, "router": "sigmoid_topk", "top_k": 2, "bias_update_rate": 0.01,
    "group_tokens": 128,
}  # fmt: skip
"""Routers with biases, which follow the loads."""


JobBuilder = Callable[..., JobSpec]


def language(folder: Path, layout: str, num_steps: int, **train: Any) -> JobSpec:
    """A language model of four layers whose logits have the embedding's table."""
    workers, parallel = LAYOUTS[layout]
    model = {"model_dim": 16, "num_layers": 4, **ATTENTIONS["GQA with norms as wide as all heads"], "moe": MOE}
    evaluation = {**TRAIN["evaluation"], "max_sequences_along_the_way": 5, "num_examples": 0}
    return language_job(
        documents(folder / "data"), num_steps=num_steps, workers=workers, model=model,
        train={**TRAIN, "evaluation": evaluation, **train}, parallel=parallel,
    )  # fmt: skip


def translation(folder: Path, layout: str, num_steps: int, **train: Any) -> JobSpec:
    workers, parallel = LAYOUTS[layout]
    evaluation = {**TRAIN["evaluation"], "max_pairs": 6, "num_examples": 1}
    return job(
        corpus(folder), workers=workers, parallel=parallel,
        train={**TRAIN, "num_steps": num_steps, "evaluation": evaluation, **train},
    )  # fmt: skip


def run_through(
    ranks: Pools, folder: Path, build_job: JobBuilder, layouts: list[str], **train: Any
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(course of a run with one step under each layout, that of one process)"""
    cache, num_steps, records = folder / "cache", len(layouts), list[dict[str, Any]]()
    _, expected, *_ = run_course(build_job(folder, "one process", num_steps, **train), f"{folder}/one", cache)
    for attempt, layout in enumerate(layouts):
        spec, arguments = build_job(folder, layout, num_steps, **train), (f"{folder}/many", cache, attempt, 1)
        num_ranks = LAYOUTS[layout][0]
        kind, steps, logs, *_ = (
            run_course(spec, *arguments) if num_ranks == 1 else ranks[num_ranks].run(run_course, spec, *arguments)[0]
        )
        assert attempt == 0 or any(line.startswith(f"resumed at step {attempt} from ") for line in logs), logs
        assert kind == "paused"
        records += steps
    return records, expected


THROUGH = [
    "2 stages", "one process", "4 stages", "experts", "4 stages on 2 ranks", "context", "uneven stages", "FSDP",
    "stages of experts", "ZeRO", "stages, FSDP", "4 stages", "context and FSDP", "stages, ZeRO", "2 stages",
    "stages, context", "context and ZeRO", "stages, tensor", "context and tensor", "one process",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("build_job", [language, translation])
def test_a_run_goes_from_layout_to_layout(ranks: Pools, tmp_path: Path, build_job: JobBuilder) -> None:
    """With a moving average, which is evaluated, routers' biases, and a table that two stages have."""
    assert_same_course(*run_through(ranks, tmp_path, build_job, THROUGH))


def test_stages_and_context_ranks_take_turns(ranks: Pools, tmp_path: Path) -> None:
    assert_same_course(*run_through(ranks, tmp_path, language, ["2 stages", "context"]))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adafactor", "muon"])
def test_state_of_other_optimizers_goes_along(ranks: Pools, tmp_path: Path, optimizer: str) -> None:
    layouts = ["2 stages", "context", "4 stages on 2 ranks", "ZeRO", "4 stages", "one process", "stages, ZeRO"]
    train = {"optimizer": {"name": optimizer, "peak_lr": 1e-2}, "ema_decay": None, "evaluation": {}}
    assert_same_course(*run_through(ranks, tmp_path, language, layouts, **train))


def tensors_of(storage: Path, step: int) -> dict[str, torch.Tensor]:
    """Full tensors of the checkpoint of a step."""
    parts = StoredParts(Folder(str(stored_in(storage, step))))
    return {name: parts.read(name, tuple((0, size) for size in parts.shape(name))) for name in parts.names()}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["2 stages", "stages, ZeRO", "4 stages on 2 ranks", "context and FSDP"])
def test_its_checkpoints_hold_what_those_of_one_process_do(ranks: Pools, tmp_path: Path, layout: str) -> None:
    """Every tensor; the best checkpoint is the same, and completes texts alike."""
    num_ranks, cache = LAYOUTS[layout][0], tmp_path / "cache"
    best = {"every_steps": 1, "keep": 1, "keep_best": {}}
    train = {"evaluation": {"every_steps": 1, "max_sequences_along_the_way": 5, "num_examples": 0}}

    def spec(of_layout: str) -> JobSpec:
        plain = language(tmp_path, of_layout, 3, **train).model_dump(mode="json", exclude_unset=True)
        return JobSpec.parse({**plain, "checkpoint": best})

    run_course(spec("one process"), f"{tmp_path}/one", cache)
    ranks[num_ranks].run(run_course, spec(layout), f"{tmp_path}/many", cache)
    one, many = (tensors_of(tmp_path / name, 3) for name in ("one", "many"))
    assert many.keys() == one.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(many[name], tensor, rtol=1e-9, atol=1e-12, msg=name)
    best_of_one, best_of_many = (best_committed(Folder(f"{tmp_path}/{name}/checkpoints")) for name in ("one", "many"))
    assert best_of_one is not None
    assert best_of_one == best_of_many
    completions = [
        load_trained(f"{tmp_path}/{name}/checkpoints/{best_of_one}").generate(["import "]) for name in ("one", "many")
    ]
    assert completions[0] == completions[1]


@pytest.mark.slow
def test_a_torn_checkpoint_of_stages_is_skipped(ranks: Pools, tmp_path: Path) -> None:
    """A file of the last stage; four stages continue from the checkpoint before."""
    cache, storage = tmp_path / "cache", f"{tmp_path}/many"
    _, expected, *_ = run_course(language(tmp_path, "one process", 6), f"{tmp_path}/one", cache)
    first = ranks[2].run(run_course, language(tmp_path, "2 stages", 6), storage, cache, 0, 4)[0][1]
    (file,) = stored_in(Path(storage), 4).glob("__1_*.distcp")
    file.write_bytes(file.read_bytes()[:-1])
    _, rest, logs, *_ = ranks[4].run(run_course, language(tmp_path, "4 stages", 6), storage, cache, 1)[0]
    assert any(line.startswith("skipped checkpoint step-00000004.a1.g0 for an earlier one") for line in logs)
    assert_same_course([*first[:2], *rest], expected)


@pytest.mark.slow
@pytest.mark.parametrize("layouts", [("2 stages", "4 stages"), ("context", "2 stages"), ("2 stages", "one process")])
def test_a_killed_run_goes_on_in_another_layout(ranks: Pools, tmp_path: Path, layouts: tuple[str, str]) -> None:
    cache, storage = tmp_path / "cache", tmp_path / "killed"
    before, after = (language(tmp_path, layout, 12) for layout in layouts)
    _, expected, *_ = run_course(language(tmp_path, "one process", 12), f"{tmp_path}/one", cache)
    checkpoints = Folder(f"{storage}/checkpoints")
    with two_ranks(before, storage, cache, tmp_path / "rendezvous") as (workers, answer):
        await_committed(checkpoints, lambda names: len(names) >= 2, workers[1], answer)
        workers[1].kill()
        assert answer.poll(300), "the survivor waits for ever"
        assert "rank 0 of 2" in answer.recv()
    resumed_at, num_ranks = newest_step(checkpoints), LAYOUTS[layouts[1]][0]
    _, rest, logs, *_ = (
        run_course(after, str(storage), cache, 1)
        if num_ranks == 1 else ranks[num_ranks].run(run_course, after, str(storage), cache, 1)[0]
    )  # fmt: skip
    assert any(line.startswith(f"resumed at step {resumed_at} from ") for line in logs)
    assert 0 < len(rest) == 12 - resumed_at
    assert_same_course(rest, expected[resumed_at:])


def tensors_read(folder: str, spec: LanguageModelSpec, plan: Plan) -> tuple[int, int]:
    """(number of a folder's tensors that this rank reads, number of elements of its parameters)"""
    layout = Layout.build(plan)
    model = build_model(spec, layout)
    report = load_weights(folder, model, spec, layout)
    num_elements = sum(parameter.local.numel() for parameter in local_parameters(model))
    layout.close()
    return report.num_tensors, num_elements


@pytest.mark.slow
def test_a_stage_reads_its_own_part_of_a_folder(ranks: Pools, tmp_path: Path) -> None:
    """And trains from there, or from another job's checkpoint, to the same losses."""
    mixtral(tmp_path / "hub", dtype=torch.float32)
    cache = tmp_path / "cache"

    def spec(num_ranks: int, **parallel: Any) -> JobSpec:
        plain = further(tmp_path / "hub", tmp_path).model_dump(mode="json", exclude_unset=True)
        train = {**plain["train"], "batch_tokens": 512, "dtype": "float64", "evaluation": {"num_examples": 0}}
        return JobSpec.parse({
            **plain, "train": train, "resources": {"num_workers": num_ranks}, "parallel": parallel,
        })  # fmt: skip

    stages, one = spec(2, pipeline=2, expert=1, micro_batch_groups=1), spec(1)
    plan = Degrees(pipeline=2, micro_batch_groups=1).plan(4)
    assert isinstance(stages.model, LanguageModelSpec)
    num_tensors, num_elements = zip(*ranks[2].run(tensors_read, str(tmp_path / "hub"), stages.model, plan), strict=True)
    num_all, num_all_elements = tensors_read(str(tmp_path / "hub"), stages.model, Degrees().plan(4))
    assert sum(num_elements) == num_all_elements
    assert sum(num_tensors) == num_all
    assert min(num_tensors) > 0.3 * num_all
    _, expected, *_ = run_course(one, f"{tmp_path}/one", cache)
    _, actual, *_ = ranks[2].run(run_course, stages, f"{tmp_path}/many", cache)[0]
    assert_same_course(actual, expected)


@pytest.mark.slow
def test_a_run_of_stages_goes_on_with_fewer_workers_and_with_more(ranks: Pools, tmp_path: Path) -> None:
    """A job with a range of workers, which is planned anew for those that there are."""
    plain = language(tmp_path, "2 stages", 3).model_dump(mode="json", exclude_unset=True)
    parallel = {"pipeline": 2, "micro_batch_groups": 1}
    spec = JobSpec.parse({**plain, "resources": {"min_workers": 2, "max_workers": 4}, "parallel": parallel})
    _, expected, *_ = run_course(language(tmp_path, "one process", 3), f"{tmp_path}/one", tmp_path / "cache")
    actual = [
        record
        for attempt, num_ranks in enumerate((4, 2, 4))
        for record in ranks[num_ranks].run(run_course, spec, f"{tmp_path}/many", tmp_path / "cache", attempt, 1)[0][1]
    ]
    assert_same_course(actual, expected)
