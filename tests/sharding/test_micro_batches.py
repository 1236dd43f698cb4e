"""Steps over micro-batches: loss and gradients are those of the whole batch; parameters are gathered and gradients
reduced once; what needs the whole batch at once is refused with the user's line."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe import sharding
from moe.sharding.applied.accumulation import steps_of
from moe.sharding.applied.callable_program import program_of
from moe.sharding.applied.dtensors import local
from moe.sharding.capture.capture import capture
from moe.sharding.exchange.exchange import part_of, strip_padding
from moe.sharding.exchange.loop_mesh import LoopMesh
from moe.sharding.exchange.mesh import Mesh, ShardingMesh
from moe.spec import SpecError
from tests.parity.gloo_ranks import Pools
from tests.refusals import refused
from tests.sharding.gshard_listing import PaperModel
from tests.sharding.on_ranks import Built, cores
from tests.sharding.partitioned import on_one_device
from tests.sharding.thread_mesh import ThreadMesh, on_threads


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(5, 12), nn.Linear(12, 3), nn.LayerNorm(12)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.second(self.norm(torch.relu(self.first(x)))), y)


class Attention(nn.Module):
    """With a table of embeddings that is the output's weight too, and a loss that is a sum."""

    def __init__(self, num_words: int = 18, dim: int = 8) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(num_words, dim), nn.LayerNorm(dim)
        self.keys, self.output = nn.Linear(dim, 3 * dim), nn.Linear(dim, num_words, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(words[:, :-1])
        q, k, v = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in self.keys(self.norm(x)).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        logits = self.output(x)
        total = F.cross_entropy(logits.flatten(0, 1), words[:, 1:].reshape(-1), reduction="sum")
        return total / words.numel(), logits.argmax(-1)


def perceptron() -> Built:
    torch.manual_seed(0)
    x, y = torch.randn(10, 5, dtype=torch.float64), torch.randn(10, 3, dtype=torch.float64)
    return Perceptron().double(), (x, y)


def groups() -> Built:
    torch.manual_seed(1)
    model = PaperModel(2, model_dim=16, hidden_dim=32, capacity=6).double()
    return model, (torch.randn(8, 12, 16, dtype=torch.float64),)


def annotated() -> Built:
    torch.manual_seed(1)
    model = PaperModel(1, True, model_dim=16, hidden_dim=32, capacity=6).double()
    return model, (torch.randn(8, 12, 16, dtype=torch.float64),)


def attention() -> Built:
    torch.manual_seed(2)
    return Attention().double(), (torch.randint(18, (8, 7)),)


BUILDS = [perceptron, groups, annotated, attention]
MESHES = [{"a": 1}, {"a": 2}, {"a": 2, "b": 2}]


def planned(build: Callable[[], Built], mesh: dict[str, int], micro_batches: int, **options: Any) -> Any:
    module, sample = build()
    size = torch.Size(mesh.values()).numel()
    return sharding.plan(module, sample, cores(size), mesh=mesh, micro_batches=micro_batches, **options)


def on_mesh(build: Callable[[], Built], plan: sharding.ShardingPlan) -> tuple[list[str], list[tuple[str, int, int]]]:
    """(what is not as on one device, the collectives of the first rank)."""
    module, sample = build()
    expected = on_one_device(module, sample)
    captured = capture(module, sample)
    program = program_of(captured, plan)
    steps = steps_of(program, captured, plan.micro_batches)
    program = replace(program, placements={name: at[1:] for name, at in program.placements.items()})
    tensors = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    assert steps.training is not None

    def one(mesh: ThreadMesh) -> tuple[list[str], list[tuple[str, int, int]]]:
        def mine(name: str, whole: Tensor) -> Tensor:
            at = program.placements[name]
            return strip_padding(part_of(whole.detach(), at, mesh), whole.shape, at, mesh)

        given = [
            sample[int(leaf.name.split(".")[1])]
            if leaf.kind == "input"
            else program.constants[leaf.name]
            if leaf.kind == "constant"
            else mine(leaf.name, tensors[leaf.name])
            for leaf in program.leaves
        ]
        found = steps.training(mesh, given)
        results, parts = found[: program.num_outputs], found[program.num_outputs :]
        wrong = [
            f"output {at}"
            for at, (a, b) in enumerate(zip(results, expected.outputs, strict=True))
            if not torch.allclose(a, b, rtol=1e-10, atol=1e-10)
        ]
        assert parts
        for name, part in zip(program.gradients, parts, strict=True):
            whole = expected.gradients[name]
            part = strip_padding(part, whole.shape, program.placements[name], mesh)
            if not torch.allclose(part, mine(name, whole), rtol=1e-10, atol=1e-10):
                wrong.append(f"gradient of {name}")
        return wrong, mesh.log

    every = on_threads(plan.degrees, one)
    return [each for wrong, _ in every for each in wrong], every[0][1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [*(pytest.param(each, marks=pytest.mark.grid) for each in MESHES[:-1]), MESHES[-1]], ids=str
)
@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("micro_batches", [2, pytest.param(4, marks=pytest.mark.grid)])
def test_loss_and_gradients_are_those_of_the_whole_batch(
    build: Callable[[], Built], mesh: dict[str, int], micro_batches: int
):
    assert on_mesh(build, planned(build, mesh, micro_batches))[0] == []


def test_a_batch_that_the_micro_batches_do_not_divide():
    # of ten; of seven the last ones have no sample at all
    for micro_batches, mesh in ((3, {"a": 2}), (4, {"a": 1}), (7, {"a": 1}), (7, {"a": 2})):
        assert on_mesh(perceptron, planned(perceptron, mesh, micro_batches))[0] == []


def large_batch() -> Built:
    x, y = torch.randn(2000, 5, dtype=torch.float64), torch.randn(2000, 3, dtype=torch.float64)
    return perceptron()[0], (x, y)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.linear(x), labels)


def some_ignored() -> Built:
    torch.manual_seed(3)
    labels = torch.randint(4, (10,))
    labels[[1, 2, 7]] = -100
    return Classifier().double(), (torch.randn(10, 5, dtype=torch.float64), labels)


def test_labels_that_count_are_counted_before_the_loop():
    for micro_batches in (2, 5):
        assert on_mesh(some_ignored, planned(some_ignored, {"a": 2}, micro_batches))[0] == []


SHARDED = {"inputs": sharding.Split(0), "*.weight": sharding.Split(0)}


def test_parameters_are_gathered_and_gradients_reduced_once_a_step():
    found = []
    for micro_batches in (2, 5):
        plan = planned(large_batch, {"a": 2}, micro_batches, hints=SHARDED)
        wrong, log = on_mesh(large_batch, plan)
        assert wrong == []
        of_loss = 8
        found.append(Counter(kind for kind, _, num_bytes in log if num_bytes > of_loss))
        assert len([each for each in plan.collectives if each.num_bytes > of_loss]) == found[-1].total()
    assert found[0] == found[1]
    num_split = sum(each != "R" for each in plan.parameters.values())
    assert num_split >= 3
    assert found[0] == {"all_gather": num_split, "reduce_scatter": num_split}


def on_ranks(name: str, micro_batches: int) -> list[str]:
    build = {each.__name__: each for each in BUILDS}[name]
    plan = planned(build, {"a": 2}, micro_batches)
    module, batch = build()
    applied = sharding.apply(module, plan)
    ours, theirs = (torch.optim.SGD(each.parameters(), 0.1) for each in (applied, module))
    wrong = []
    for step in range(2):
        pair = []
        for model, optimizer in ((applied, ours), (module, theirs)):
            optimizer.zero_grad()
            returned = model(*batch)
            loss = returned[0] if isinstance(returned, tuple) else returned
            (3 * loss).backward()  # what comes back scales the gradients
            pair.append(loss.detach())
        if not torch.allclose(*pair, rtol=1e-10, atol=1e-10):
            wrong.append(f"loss of step {step}")
        for parameter, whole in module.named_parameters():
            grad = local(applied.get_parameter(parameter).grad)
            shard = applied.shard_of(parameter, grad)
            cut = tuple(slice(at, at + size) for at, size in zip(shard.offsets, grad.shape, strict=True))
            if not torch.allclose(grad, whole.grad[cut], rtol=1e-10, atol=1e-10):
                wrong.append(f"gradient of {parameter} in step {step}")
        ours.step()
        theirs.step()
    with torch.no_grad():
        applied(*batch)
        applied.eval()(*batch)
    sharding.close(applied)
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("build", BUILDS)
def test_steps_on_gloo_ranks_are_those_of_one_device(ranks: Pools, build: Callable[[], Built]):
    assert ranks[2].run(on_ranks, build.__name__, 4) == [[], []]


class OfBatch(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.linear, self.norm = nn.Linear(5, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        x = self.linear(x)
        if self.what == "norm":
            return self.norm(x).square().mean()
        if self.what == "softmax":
            return (torch.softmax(x, 0) * x).sum()
        if self.what == "count of rows":
            weights = (x > 0).any(-1).to(x.dtype)
            return (weights * x.square().sum(-1)).sum() / weights.sum()
        return x


@pytest.mark.parametrize("what", ["norm", "softmax", "count of rows"])
def test_what_needs_the_whole_batch_is_refused_with_the_users_line(what: str):
    sample = (torch.randn(8, 5), torch.randint(4, (8,)))
    with pytest.raises(SpecError, match="needs the whole batch at once") as error:
        sharding.plan(OfBatch(what), sample, cores(1), micro_batches=2)
    (problem,) = error.value.problems
    assert re.search(r"test_micro_batches.py:\d+", problem.path) or "norm" in problem.path
    assert 'reduction="sum"' in problem.remedy
    assert "micro_batches=1" in problem.remedy


def test_outputs_that_need_gradients_and_are_no_loss_are_refused():
    sample = (torch.randn(8, 5), torch.randint(4, (8,)))
    with refused("unsupported", "micro_batches", 2):
        sharding.plan(OfBatch("nothing"), sample, cores(1), micro_batches=2)
    with refused("out_of_range", "micro_batches", 9):
        sharding.plan(OfBatch("softmax"), sample, cores(1), micro_batches=9)


class Wide(nn.Module):
    """Its activations are larger than its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


@pytest.mark.slow
def test_a_plan_without_room_is_made_in_micro_batches_and_says_so(tmp_path: Any):
    model, sample = Wide(), (torch.randn(4096, 16),)
    whole = sharding.plan(model, sample, cores(1))
    assert whole.micro_batches == 1
    plan = sharding.plan(model, sample, cores(1, whole.memory.total // 2))
    assert plan.micro_batches > 1
    assert plan.memory.total <= whole.memory.total // 2
    assert plan.memory.kept < whole.memory.kept / 2
    counts = [each.micro_batches for each in plan.considered]
    assert counts == sorted(counts)
    assert plan.considered[0].step_s is None
    assert f"{plan.micro_batches} micro-batches" in plan.explain()
    plan.save(tmp_path / "plan.json")
    assert sharding.ShardingPlan.load(tmp_path / "plan.json").micro_batches == plan.micro_batches
    older = {name: value for name, value in whole.to_json().items() if name != "micro_batches"}
    assert sharding.ShardingPlan.from_json(older).micro_batches == 1


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.transpose(0, 1).reshape(-1, 4)).square().sum()


def test_a_batch_behind_another_dimension_is_told_so():
    with pytest.raises(SpecError, match=r"joins the batch with a dimension that lies before it.*keep the batch first"):
        sharding.plan(TimeFirst(), (torch.zeros(8, 5, 4),), cores(1), micro_batches=2)


def test_exchanges_within_a_loop_are_begun_as_they_are_outside():
    """A mesh has each exchange done at once unless it says otherwise; a loop's passes all of them on."""
    for mesh in (LoopMesh, ShardingMesh):
        begun = {name for name in dir(mesh) if name.startswith("begin_")}
        assert len(begun) >= 4
        assert {name for name in begun if getattr(mesh, name) is getattr(Mesh, name)} == set()
