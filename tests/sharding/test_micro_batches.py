"""Steps over micro-batches: loss and gradients of the whole batch; parameters are gathered and gradients reduced once;
operators that need the whole batch are refused with the user's line."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe import sharding
from moe.sharding.applied.accumulation import steps_of
from moe.sharding.applied.callable_program import program_of
from moe.sharding.capture.capture import capture
from moe.sharding.exchange.loop_mesh import LoopMesh
from moe.sharding.exchange.mesh import Mesh, ShardingMesh
from tests.parity.gloo_ranks import Pools
from tests.refusals import check, expect_problem
from tests.sharding.gshard_listing import PaperModel
from tests.sharding.modules import Stack
from tests.sharding.on_ranks import Built, check_on_ranks, cores, is_close
from tests.sharding.partitioned import arguments_of, on_one_device, unlike_parts
from tests.sharding.refused import lines_of
from tests.sharding.refused import planning_problems as problems_of
from tests.sharding.thread_mesh import ThreadMesh, on_threads

D = torch.float64
line_of = lines_of(__file__)


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(5, 12), nn.Linear(12, 3), nn.LayerNorm(12)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.second(self.norm(torch.relu(self.first(x)))), y)


class Attention(nn.Module):
    """Embeddings that are also the output weight, and a loss that is a sum."""

    def __init__(self, num_words: int = 18, dim: int = 8) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(num_words, dim), nn.LayerNorm(dim)
        self.keys, self.output = nn.Linear(dim, 3 * dim), nn.Linear(dim, num_words, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(words[:, :-1])
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.keys(self.norm(x)).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        logits = self.output(x)
        total = F.cross_entropy(logits.flatten(0, 1), words[:, 1:].reshape(-1), reduction="sum")
        return total / words.numel(), logits.argmax(-1)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.linear(x), labels)


def build(name: str) -> Built:
    torch.manual_seed(1)
    match name:
        case "perceptron" | "large batch":
            num_rows = 10 if name == "perceptron" else 2000
            return Perceptron().double(), (torch.randn(num_rows, 5, dtype=D), torch.randn(num_rows, 3, dtype=D))
        case "attention":
            return Attention().double(), (torch.randint(18, (8, 7)),)
        case "ignored labels":
            labels = torch.randint(4, (10,))
            labels[[1, 2, 7]] = -100
            return Classifier().double(), (torch.randn(10, 5, dtype=D), labels)
    model = PaperModel(1 + (name == "groups"), name == "annotated", model_dim=16, hidden_dim=32, capacity=6).double()
    return model, (torch.randn(8, 12, 16, dtype=D),)


NAMES = ["perceptron", "groups", "annotated", "attention"]
MESHES = [{"a": 1}, {"a": 2}, {"a": 2, "b": 2}]


def check_steps(
    name: str, mesh: dict[str, int], micro_batches: int, **options: Any
) -> tuple[sharding.ShardingPlan, list[tuple[str, int, int]]]:
    """Fail where a step differs from one device; return the plan and the collectives of the first rank."""
    module, sample = build(name)
    cluster = cores(torch.Size(mesh.values()).numel())
    plan = sharding.plan(module, sample, cluster, mesh=mesh, micro_batches=micro_batches, **options)
    expected, captured_graph = on_one_device(module, sample), capture(module, sample)
    program = program_of(captured_graph, plan)
    steps = steps_of(program, captured_graph, plan.micro_batches)
    program = replace(program, placements={name: placements[1:] for name, placements in program.placements.items()})
    assert steps.training is not None

    def run_rank(mesh: ThreadMesh) -> tuple[list[str], list[tuple[str, int, int]]]:
        results = steps.training(mesh, arguments_of(program, module, sample, mesh))
        pairs = zip(results[: program.num_outputs], expected.outputs, strict=True)
        wrong = [
            f"output {number}" for number, pair in enumerate(pairs) if not torch.allclose(*pair, rtol=1e-10, atol=1e-10)
        ]
        parts = dict(zip(program.gradients, results[program.num_outputs :], strict=True))
        assert parts
        wrong += unlike_parts(program, parts, expected.gradients, mesh, lambda _, *pair: is_close(*pair))
        return wrong, mesh.log

    ranks = on_threads(plan.degrees, run_rank)
    assert [message for wrong, _ in ranks for message in wrong] == []
    return plan, ranks[0][1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [*(pytest.param(mesh, marks=pytest.mark.grid) for mesh in MESHES[:-1]), MESHES[-1]], ids=str
)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("micro_batches", [2, pytest.param(4, marks=pytest.mark.grid)])
def test_loss_and_gradients_are_those_of_the_whole_batch(name: str, mesh: dict[str, int], micro_batches: int):
    check_steps(name, mesh, micro_batches)


@pytest.mark.slow
def test_micro_batches_need_not_divide_the_batch():
    for micro_batches, mesh in ((3, {"a": 2}), (4, {"a": 1}), (7, {"a": 1}), (7, {"a": 2})):
        check_steps("perceptron", mesh, micro_batches)  # of ten rows; of seven micro-batches the last ones are empty


@pytest.mark.slow
def test_labels_are_counted_before_the_loop():
    for micro_batches in (2, 5):
        check_steps("ignored labels", {"a": 2}, micro_batches)


@pytest.mark.slow
def test_parameters_are_gathered_and_gradients_reduced_once_a_step():
    counts = []
    for micro_batches in (2, 5):
        hints = {"inputs": sharding.Split(0), "*.weight": sharding.Split(0)}
        plan, log = check_steps("large batch", {"a": 2}, micro_batches, hints=hints)
        counts.append(Counter(kind for kind, _, num_bytes in log if num_bytes > 8))  # without the loss
        assert sum(collective.num_bytes > 8 for collective in plan.collectives) == counts[-1].total()
    num_split = sum(placements != "R" for placements in plan.parameters.values())
    assert num_split >= 3
    assert counts[0] == counts[1] == {"all_gather": num_split, "reduce_scatter": num_split}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_steps_on_gloo_ranks_are_those_of_one_device(ranks: Pools, name: str):
    check_on_ranks(ranks, partial(build, name), {"a": 2}, steps=2, micro_batches=4, scale=3)


class OfBatch(nn.Module):
    def __init__(self, function: Callable[["OfBatch", Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.linear, self.norm = function, nn.Linear(5, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.linear(x))


def counts_rows(module: OfBatch, x: Tensor) -> Tensor:
    weights = (x > 0).any(-1).to(x.dtype)
    return (weights * x.square().sum(-1)).sum() / weights.sum()  # counts rows


WHOLE_BATCH: dict[str, Callable[[OfBatch, Tensor], Tensor]] = {
    "norm": lambda module, x: module.norm(x).square().mean(),  # norm
    "softmax": lambda module, x: (torch.softmax(x, 0) * x).sum(),  # softmax
    "counts rows": counts_rows,
    "time first": lambda module, x: (x.view(2, 4, 4).transpose(0, 1).reshape(-1, 4)).square().sum(),  # time first
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", WHOLE_BATCH)
def test_operators_that_need_the_whole_batch_are_refused_with_the_users_line(case: str):
    options = {"cluster": cores(1), "mesh": None, "micro_batches": 2}
    problems = problems_of(OfBatch(WHOLE_BATCH[case]), (torch.randn(8, 5),), **options)
    check(problems, [("unsupported", line_of(case), problems[0].value)])
    assert "micro_batches=1" in problems[0].remedy


def test_outputs_with_gradients_other_than_the_loss_are_refused():
    sample = (torch.randn(8, 5),)
    with expect_problem("unsupported", "micro_batches", 2):
        sharding.plan(OfBatch(lambda module, x: x), sample, cores(1), micro_batches=2)
    with expect_problem("out_of_range", "micro_batches", 9):
        sharding.plan(OfBatch(WHOLE_BATCH["softmax"]), sample, cores(1), micro_batches=9)


@pytest.mark.slow
def test_a_plan_that_does_not_fit_uses_micro_batches(tmp_path: Path):
    model, sample = Stack(), (torch.randn(4096, 16),)
    single_pass_plan = sharding.plan(model, sample, cores(1))
    assert single_pass_plan.micro_batches == 1
    plan = sharding.plan(model, sample, cores(1, single_pass_plan.memory.total // 2))
    assert plan.micro_batches > 1
    assert plan.memory.total <= single_pass_plan.memory.total // 2
    assert plan.memory.kept < single_pass_plan.memory.kept / 2
    counts = [candidate.micro_batches for candidate in plan.considered]
    assert counts == sorted(counts)
    assert plan.considered[0].step_s is None
    assert f"{plan.micro_batches} micro-batches" in plan.explain()
    plan.save(tmp_path / "plan.json")
    assert sharding.ShardingPlan.load(tmp_path / "plan.json").micro_batches == plan.micro_batches
    older = {name: value for name, value in single_pass_plan.to_json().items() if name != "micro_batches"}
    assert sharding.ShardingPlan.from_json(older).micro_batches == 1


def test_exchanges_start_early_also_within_a_loop():
    """By default a mesh finishes each exchange at once; the mesh of a loop passes all exchanges on."""
    for mesh in (LoopMesh, ShardingMesh):
        names = {name for name in dir(mesh) if name.startswith("begin_")}
        assert len(names) >= 4
        assert {name for name in names if getattr(mesh, name) is getattr(Mesh, name)} == set()
