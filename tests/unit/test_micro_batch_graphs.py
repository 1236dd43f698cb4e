"""Where micro-batches cannot be CUDA graphs, and the inputs of those that can."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe.parallel import Layout
from moe.plan import Cluster, plan_job
from moe.routing import BatchCounts
from moe.spec import JobSpec
from moe.tasks.batch_context import BatchContext
from moe.tasks.build import build_task
from moe.tasks.language.batches import SequencesBatch
from moe.train.micro_batch_graphs import MicroBatchGraphs, _shape_of, _tensors_of, _with_tensors
from moe.train.moe_layers import MoELayers
from tests.refusals import expect_problem

GPUS, CPUS = (Cluster(num_nodes=1, devices_per_node=4, device=device) for device in ("h100", "cpu"))


def job(
    model: dict[str, Any] | None = None, data: dict[str, Any] | None = None, **parts: dict[str, Any]
) -> dict[str, Any]:
    moe = {"num_experts": 4, "hidden_dim": 64, "router": "softmax_topk", "top_k": 2}
    language = {
        "kind": "language", "model_dim": 64, "num_layers": 2, "ffn_dim": 64, "vocab_size": 300, "moe": moe,
        "attention": {"kind": "grouped_query", "num_heads": 4, "num_kv_heads": 2, "head_dim": 16},
    }  # fmt: skip
    language["moe"] = {**moe, **(model or {}).pop("moe", {})}
    return {
        "model": {**language, **(model or {})}, "data": data or {"corpus": "packages", "max_tokens": 64},
        "train": {"num_steps": 4, "batch_tokens": 1024, "cuda_graphs": True}, **parts,
    }  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"moe": {"input_jitter": 0.1}}},
        {"model": {"moe": {"router": "gshard_top2", "top_k": ...}}},
        {"model": {"adapter": {"rank": 4, "dropout": 0.1}}},
    ],
    ids=["jitter", "random second experts", "dropout"],
)
def test_models_with_random_choices_are_refused(changes: dict[str, Any]) -> None:
    spec = job(**changes)
    spec["model"]["moe"] = {name: value for name, value in spec["model"]["moe"].items() if value is not ...}
    with expect_problem("not_applicable", "train.cuda_graphs", True):
        JobSpec.parse(spec)


def test_gshard_without_random_choices_is_not() -> None:
    spec = job()
    spec["model"]["moe"] = {"num_experts": 4, "hidden_dim": 64, "router": "gshard_top2", "second_expert": "all"}
    assert JobSpec.parse(spec).train.cuda_graphs


def test_a_plan_has_micro_batches_that_do_not_communicate() -> None:
    plan = plan_job(JobSpec.parse(job(resources={"num_workers": 4})), GPUS, to_run=True)
    assert (plan.degrees.data, plan.degrees.expert, plan.degrees.fsdp, plan.degrees.expert_fsdp) == (4, 1, 1, 1)
    for parallel in ({"expert": 2}, {"tensor": 2}, {"fsdp": 2}):
        spec = JobSpec.parse(job(resources={"num_workers": 4}, parallel=parallel))
        assert any("CUDA graphs" in feature for feature in plan_job(spec, GPUS).not_yet)
        with expect_problem("not_runnable", "parallel", None):
            plan_job(spec, GPUS, to_run=True)
    with expect_problem("unsupported", "train.cuda_graphs", True):
        plan_job(JobSpec.parse(job(resources={"num_workers": 4})), CPUS)


@pytest.mark.parametrize(
    "layout", [Layout.single("cpu"), Layout(0, 2, torch.device("cuda"), {"expert": 2})], ids=["CPU", "expert ranks"]
)
def test_other_layouts_are_refused_before_a_run(layout: Layout) -> None:
    """Also those of plans written by hand."""
    model = nn.Module()
    with expect_problem("conflict", "train.cuda_graphs", True):
        MicroBatchGraphs(build_task(JobSpec.parse(job())), layout, model, [], MoELayers(model, layout))


def test_inputs_of_equal_shapes_differ_in_tensors_only() -> None:
    def inputs(step: int, num_rows: int = 2, documents: Tensor | None = None) -> tuple[SequencesBatch, Tensor]:
        tokens = torch.full((num_rows, 5), step)
        context = BatchContext(step, 7, True, 3 * step, 1, BatchCounts(8, 16, 70 + step), documents=documents)
        labels = tokens.masked_fill(tokens.cumsum(1) > 3, -1)
        return SequencesBatch(tokens, labels, context, (labels >= 0).nonzero()).graph_inputs(100 + step)

    first, second = inputs(1), inputs(2)
    assert _shape_of(first) == _shape_of(second)
    hash(_shape_of(first))
    for other in (inputs(1, num_rows=3), inputs(1, documents=torch.zeros(2, 5, dtype=torch.int32))):
        assert _shape_of(first) != _shape_of(other)
    batch, num_targets = _with_tensors(first, iter(_tensors_of(second)))
    context = batch.context
    assert (int(num_targets), int(context.step), int(context.first_row)) == (102, 2, 6)
    assert (context.seed, context.counts.num_groups, int(context.counts.num_tokens)) == (7, 8, 72)
    assert torch.equal(batch.tokens, second[0].tokens)
    assert batch.projects_all


def test_translations_are_refused() -> None:
    spec = {"model": {"preset": "gshard-tiny"}, "data": {"corpus": "catalogs"}, "train": {"num_steps": 1}}
    with expect_problem("not_applicable", "train.cuda_graphs", True):
        JobSpec.parse({**spec, "train": {"num_steps": 1, "cuda_graphs": True}})
    with expect_problem("not_applicable", "train.cuda_graphs", True):
        build_task(JobSpec.parse(spec)).graph_inputs(None, 1)
