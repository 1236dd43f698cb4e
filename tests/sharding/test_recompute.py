"""Blocks recomputed in the backward pass: the same losses and gradients with fewer stored values, on request and where
nothing else fits."""

import math
from collections import OrderedDict
from collections.abc import Iterable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe import sharding
from moe.sharding.applied.callable_program import program_of
from moe.sharding.applied.dtensors import local
from moe.sharding.capture.capture import capture
from moe.sharding.lines import BLOCK
from moe.sharding.operands import RECOMPUTED
from moe.sharding.sharding_plan import ShardingPlan
from moe.sharding.solve.recompute import recompute_blocks
from tests.parity.gloo_ranks import Pools
from tests.refusals import expect_problem
from tests.sharding.gshard_listing import PaperModel
from tests.sharding.on_ranks import Built, check_on_ranks, cores
from tests.sharding.test_our_models import SOFTMAX, translation


class Block(nn.Module):
    """Dropout, an updated buffer, and a result that the next block but one uses too."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        hidden_states = F.dropout(F.gelu(self.up(self.norm(x))), 0.2, self.training)
        self.seen += hidden_states.detach().mean()
        return x + self.down(hidden_states) + 0.1 * before


class Deep(nn.Module):
    def __init__(self, dim: int = 8, num_blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim) for _ in range(num_blocks))
        self.head = nn.Linear(dim, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        before = x
        for block in self.blocks:
            x, before = block(x, before), x
        return F.mse_loss(self.head(x), y)


def deep() -> Built:
    torch.manual_seed(4)
    x, y = torch.randn(12, 6, 8, dtype=torch.float64), torch.randn(12, 6, 3, dtype=torch.float64)
    return Deep().double().eval(), (x, y)


def paper() -> Built:
    torch.manual_seed(1)
    model = PaperModel(3, True, model_dim=16, hidden_dim=32, capacity=6).double()
    return model, (torch.randn(8, 12, 16, dtype=torch.float64),)


class Member(nn.Module):
    """A network as the only member of a list."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.networks = nn.ModuleList([network])

    def forward(self, *batch: Tensor) -> Tensor:
        return self.networks[0](*batch)


def member() -> Built:
    module, batch = deep()
    return Member(module), batch


BUILT = {"deep": deep, "member": member, "paper": paper, "translation": partial(translation, **SOFTMAX)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "mesh", "micro_batches"),
    [("deep", {"a": 2}, 1), ("deep", {"a": 2}, 3), ("paper", {"a": 2}, 2), ("translation", {"a": 2}, 1),
     pytest.param("paper", {"a": 2, "b": 2}, 1, marks=pytest.mark.grid)],
    ids=str,
)  # fmt: skip
def test_losses_and_gradients_are_those_of_one_device(
    ranks: Pools, model: str, mesh: dict[str, int], micro_batches: int
) -> None:
    plan = check_on_ranks(ranks, BUILT[model], mesh, steps=2, recompute=True, micro_batches=micro_batches)
    assert plan.recompute


def recompute_differences(mesh: dict[str, int], micro_batches: int, hints: dict[str, sharding.Split]) -> list[str]:
    """Names of losses, gradients and buffers of two steps with dropout that recomputation changes."""
    module, batch = deep()
    runs = []
    for recompute in (False, True):
        plan = sharding.plan(
            module.train(), batch, cores(math.prod(mesh.values())), hints, mesh=mesh,
            micro_batches=micro_batches, recompute=recompute,
        )  # fmt: skip
        applied = sharding.apply(module, plan, seed=3)
        values: dict[str, Tensor] = {}
        for step in range(2):
            values[f"loss {step}"] = loss = applied(*batch)
            applied.zero_grad()
            loss.backward()
            for name, value in applied.named_parameters():
                assert value.grad is not None
                values[f"{name} {step}"] = local(value.grad).clone()
        values |= {name: local(buffer) for name, buffer in applied.named_buffers()}
        runs.append(values)
        sharding.close(applied)
    assert not torch.equal(runs[0]["loss 0"], runs[0]["loss 1"])
    return [name for name, value in runs[0].items() if not torch.allclose(value, runs[1][name], rtol=1e-10)]


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("hints", [{"inputs": sharding.Split(0)}, {"*.weight": sharding.Split(0)}], ids=str)
def test_recomputation_draws_the_same_numbers(
    ranks: Pools, micro_batches: int, hints: dict[str, sharding.Split]
) -> None:
    for wrong in ranks[2].run(recompute_differences, {"a": 2}, micro_batches, hints):
        assert wrong == []


def make_plan(module_and_batch: Built, memory_bytes: int = 1 << 33, **options: bool | int | None) -> ShardingPlan:
    module, sample = module_and_batch
    return sharding.plan(module, sample, cores(2, memory_bytes), mesh={"a": 2}, **options)  # type: ignore[arg-type]


def kept_bytes(module_and_batch: Built, plan: ShardingPlan) -> int:
    """Bytes that a program of rank 0 stores for the backward pass, without its arguments."""
    captured_graph = capture(*module_and_batch)
    program = program_of(captured_graph, plan)
    *_, output = program.forward.graph.nodes
    saved_nodes = output.args[0][program.num_outputs + len(program.updates) :]
    return sum(math.prod(node.meta["whole"]) for node in saved_nodes if "whole" in node.meta)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["deep", "member", "paper"])
def test_values_inside_blocks_are_not_stored(model: str) -> None:
    plain_plan, recompute_plan = (make_plan(BUILT[model](), recompute=recompute) for recompute in (False, True))
    assert (plain_plan.recompute, recompute_plan.recompute) == (False, True)
    assert recompute_plan.memory.kept < 0.6 * plain_plan.memory.kept
    assert kept_bytes(BUILT[model](), recompute_plan) < 0.6 * kept_bytes(BUILT[model](), plain_plan)
    assert recompute_plan.step_s > plain_plan.step_s
    assert "recompute" in recompute_plan.explain()


@pytest.mark.slow
def test_recomputation_is_chosen_if_nothing_else_fits() -> None:
    """One row, which micro-batches cannot divide."""
    large = deep()[0], (torch.zeros(1, 20_000, 8).double(), torch.zeros(1, 20_000, 3).double())
    plain_plan, recompute_plan = (make_plan(large, recompute=recompute) for recompute in (False, True))
    assert recompute_plan.memory.total < plain_plan.memory.total
    limit = (recompute_plan.memory.total + plain_plan.memory.total) // 2
    plan = make_plan(large, limit)
    assert plan.recompute
    assert plan.memory.total <= limit
    assert [(candidate.recompute, candidate.step_s is None) for candidate in plan.considered] == [
        (False, True),
        (True, False),
    ]
    with expect_problem("does_not_fit", "cluster"):
        make_plan(large, limit, recompute=False)


def linears(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), *layers)


class Encoder(nn.Module):
    """Layers in a list or a dict, with operators outside them. The first layer may have another name too."""

    def __init__(
        self, layers: Iterable[nn.Module] | None = None, is_dict: bool = False, has_alias: bool = False
    ) -> None:
        super().__init__()
        modules = list(layers or (linears() for _ in range(2)))
        if has_alias:
            self.first = modules[0]
        names = {str(number): module for number, module in enumerate(modules)}
        self.layers = nn.ModuleDict(names) if is_dict else nn.ModuleList(modules)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers:
            x = layer(x) * self.scale
        return x


LAYERS = {"layers.0", "layers.1", None}
BLOCKS: dict[str, tuple[nn.Module, set[str | None]]] = {
    "list": (linears(), {"0", "1"}),
    "only member": (nn.Sequential(linears()), {"0.0", "0.1"}),
    "no two": (nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(4, 4)))), {"0"}),
    "unlike": (nn.Sequential(nn.ReLU(), linears(), nn.Tanh()), {"0", "1.0", "1.1", "2"}),
    "lists": (nn.Sequential(linears(), linears()), {"0", "1"}),
    "list within a list": (linears(linears()), {"0", "1", "2"}),
    "named": (nn.Sequential(OrderedDict(only=linears())), {"only.0", "only.1"}),
    "none": (nn.Sequential(OrderedDict(only=nn.Linear(4, 4))), {None}),
    "encoder": (Encoder(), LAYERS),
    "dict": (Encoder(is_dict=True), LAYERS),
    "alias": (Encoder(has_alias=True), LAYERS),
    "encoder as only member": (nn.Sequential(Encoder()), {"0.layers.0", "0.layers.1", None}),
    "encoder between linears": (
        nn.Sequential(nn.Linear(4, 4), Encoder(), nn.Linear(4, 4)), {"0", "1.layers.0", "1.layers.1", "2", None}
    ),
    "encoders in a list": (
        nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Sequential(Encoder(), Encoder())), {"0", "1.0", "1.1"}
    ),
    "shared": (Encoder([linears()] * 2), {"layers.0", None}),
}  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_members_of_the_outermost_list_of_layers(name: str) -> None:
    module, blocks = BLOCKS[name]
    captured_graph = capture(module, (torch.zeros(4, 4),), torch.sum)
    operators = [node for node in captured_graph.graph.graph.nodes if node.op == "call_function"]
    loss = {"sum", "expand", "full", "scalar_tensor"}
    assert {node.meta[BLOCK] for node in operators if not loss & {str(node.target).split(".")[1]}} == blocks


def test_a_shared_activation_belongs_to_the_layer_that_calls_it() -> None:
    tanh = nn.Tanh()
    layers = [nn.Sequential(nn.Linear(4, width), tanh, nn.Linear(width, 4)) for width in (4, 5)]  # not one block
    captured_graph = capture(Encoder(layers), (torch.zeros(4, 4),), torch.sum)
    nodes = captured_graph.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)
    assert [node.meta[BLOCK] for node in nodes] == ["layers.0", "layers.1"]


@pytest.mark.slow
def test_operators_outside_the_layers_are_not_recomputed() -> None:
    """Neither operators of a module nor of the only member of a list."""
    for build in (deep, member):
        captured_graph = capture(*build())
        assert recompute_blocks(captured_graph)
        blocks = {node.meta[RECOMPUTED][0] for node in captured_graph.graph.graph.nodes if RECOMPUTED in node.meta}
        assert {block.rpartition(".")[0] for block in blocks} <= {"blocks", "networks.0.blocks"}


def test_recomputation_needs_blocks() -> None:
    module = nn.Sequential()
    module.add_module("only", nn.Linear(4, 4))
    with expect_problem("requires", "recompute", True):
        sharding.plan(module, (torch.zeros(4, 4),), cores(2), loss=torch.sum, recompute=True)


@pytest.mark.slow
def test_experts_run_once_in_the_backward_pass() -> None:
    """The recomputed operator is also the one that is differentiated."""
    module, sample = BUILT["translation"]()
    captured_graph = capture(module, sample)
    program_of(captured_graph, make_plan((module, sample), recompute=True))
    experts = [node for node in captured_graph.graph.graph.nodes if "expert_feed_forward" in node.name]
    backward = [node for node in experts if "backward" in node.name]
    assert backward
    assert not any(RECOMPUTED in node.meta for node in experts)  # only its result is needed, outside its block
