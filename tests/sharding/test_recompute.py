"""Blocks that are computed again in the backward pass: the same losses and gradients, with less kept, where it is asked
for and where nothing else has room."""

import math
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe import sharding
from moe.sharding.applied.callable_program import program_of
from moe.sharding.applied.dtensors import local
from moe.sharding.capture.capture import capture
from moe.sharding.lines import BLOCK
from moe.sharding.operands import AGAIN
from moe.sharding.sharding_plan import ShardingPlan
from moe.sharding.solve.recompute import recompute_blocks
from moe.spec import SpecError
from tests.parity.gloo_ranks import Pools
from tests.sharding.gshard_listing import PaperModel
from tests.sharding.on_ranks import Built, cores, differences
from tests.sharding.test_our_models import softmax as translation


class Block(nn.Module):
    """With dropout in training, a buffer that is written, and a result that the next but one uses too."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        hidden = F.dropout(F.gelu(self.up(self.norm(x))), 0.2, self.training)
        self.seen += hidden.detach().mean()
        return x + self.down(hidden) + 0.1 * before


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


BUILT = {"deep": deep, "member": member, "paper": paper, "translation": translation}


def on_ranks(mesh: dict[str, int], model: str, micro_batches: int) -> tuple[list[str], bool]:
    wrong, plan = differences(BUILT[model], mesh, steps=2, recompute=True, micro_batches=micro_batches)
    return wrong, plan.recompute


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
    for wrong, recompute in ranks[math.prod(mesh.values())].run(on_ranks, mesh, model, micro_batches):
        assert (wrong, recompute) == ([], True)


def drawn(mesh: dict[str, int], micro_batches: int, hints: dict[str, sharding.Split]) -> list[str]:
    """What is not as without, where numbers are drawn: losses, gradients, buffers of two steps."""
    module, batch = deep()
    found = []
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
        values |= {name: local(each) for name, each in applied.named_buffers()}
        found.append(values)
        sharding.close(applied)
    assert not torch.equal(found[0]["loss 0"], found[0]["loss 1"])
    return [name for name, value in found[0].items() if not torch.allclose(value, found[1][name], rtol=1e-10)]


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("hints", [{"inputs": sharding.Split(0)}, {"*.weight": sharding.Split(0)}], ids=str)
def test_what_is_computed_again_draws_what_it_drew(
    ranks: Pools, micro_batches: int, hints: dict[str, sharding.Split]
) -> None:
    for wrong in ranks[2].run(drawn, {"a": 2}, micro_batches, hints):
        assert wrong == []


def planned(build: Built, memory_bytes: int = 1 << 33, **options: bool | int | None) -> ShardingPlan:
    module, sample = build
    return sharding.plan(module, sample, cores(2, memory_bytes), mesh={"a": 2}, **options)  # type: ignore[arg-type]


def kept_bytes(build: Built, plan: ShardingPlan) -> int:
    """That the program of rank 0 keeps from the forward pass to the backward pass, without its arguments."""
    captured = capture(*build)
    program = program_of(captured, plan)
    *_, output = program.forward.graph.nodes
    kept = output.args[0][program.num_outputs + len(program.updates) :]
    return sum(math.prod(each.meta["whole"]) for each in kept if "whole" in each.meta)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["deep", "member", "paper"])
def test_what_is_inside_blocks_is_not_kept(model: str) -> None:
    without, again = (planned(BUILT[model](), recompute=each) for each in (False, True))
    assert (without.recompute, again.recompute) == (False, True)
    assert again.memory.kept < 0.6 * without.memory.kept
    assert kept_bytes(BUILT[model](), again) < 0.6 * kept_bytes(BUILT[model](), without)
    assert again.step_s > without.step_s
    assert "recompute" in again.explain()


@pytest.mark.slow
def test_it_is_chosen_where_nothing_else_has_room() -> None:
    """One sample, which no micro-batches can divide."""
    large = deep()[0], (torch.zeros(1, 20_000, 8).double(), torch.zeros(1, 20_000, 3).double())
    without, again = (planned(large, recompute=each) for each in (False, True))
    assert again.memory.total < without.memory.total
    between = (again.memory.total + without.memory.total) // 2
    found = planned(large, between)
    assert found.recompute
    assert found.memory.total <= between
    assert [(each.recompute, each.step_s is None) for each in found.considered] == [(False, True), (True, False)]
    with pytest.raises(SpecError, match="no plan fits"):
        planned(large, between, recompute=False)


def linears(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), *more)


class Encoder(nn.Module):
    """Layers in a list, or in a dict with numbers as keys, and operators beside them. The first layer may have a name
    of its own, too."""

    def __init__(self, layers: nn.ModuleList | nn.ModuleDict, has_alias: bool = False) -> None:
        super().__init__()
        modules = layers.values() if isinstance(layers, nn.ModuleDict) else layers
        if has_alias:
            self.first = next(iter(modules))
        self.layers = layers
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers:
            x = layer(x) * self.scale
        return x


def encoder(**options: bool) -> Encoder:
    return Encoder(nn.ModuleList(linears() for _ in range(2)), **options)


def numbered() -> Encoder:
    return Encoder(nn.ModuleDict({str(number): linears() for number in range(2)}))


def with_shared_activation() -> Encoder:
    """Layers of two widths, which are therefore not captured as one block."""
    tanh = nn.Tanh()
    return Encoder(nn.ModuleList(nn.Sequential(nn.Linear(4, width), tanh, nn.Linear(width, 4)) for width in (4, 5)))


LAYERS = {"layers.0", "layers.1", None}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("module", "blocks"),
    [
        (linears(), {"0", "1"}),
        (nn.Sequential(linears()), {"0.0", "0.1"}),
        (nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(4, 4)))), {"0"}),
        (nn.Sequential(nn.ReLU(), linears(), nn.Tanh()), {"0", "1.0", "1.1", "2"}),
        (nn.Sequential(linears(), linears()), {"0", "1"}),
        (linears(linears()), {"0", "1", "2"}),
        (nn.Sequential(OrderedDict(only=linears())), {"only.0", "only.1"}),
        (nn.Sequential(OrderedDict(only=nn.Linear(4, 4))), {None}),
        (encoder(), LAYERS),
        (numbered(), LAYERS),
        (encoder(has_alias=True), LAYERS),
        (nn.Sequential(encoder()), {"0.layers.0", "0.layers.1", None}),
        (nn.Sequential(nn.Linear(4, 4), encoder(), nn.Linear(4, 4)), {"0", "1.layers.0", "1.layers.1", "2", None}),
        (nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Sequential(encoder(), encoder())), {"0", "1.0", "1.1"}),
        (Encoder(nn.ModuleList([linears()] * 2)), {"layers.0", None}),
    ],
    ids=[
        "list",
        "alone",
        "no-two",
        "unlike",
        "lists",
        "list-within",
        "named",
        "none",
        "encoder",
        "dict",
        "alias",
        "member",
        "between-linears",
        "sequentials",
        "shared",
    ],
)
def test_blocks_are_members_of_the_outermost_list_of_layers(module: nn.Module, blocks: set[str | None]) -> None:
    captured = capture(module, (torch.zeros(4, 4),), torch.sum)
    operators = [node for node in captured.graph.graph.nodes if node.op == "call_function"]
    loss = {"sum", "expand", "full", "scalar_tensor"}
    assert {node.meta[BLOCK] for node in operators if not loss & {str(node.target).split(".")[1]}} == blocks


def test_a_shared_activation_belongs_to_the_layer_that_calls_it() -> None:
    captured = capture(with_shared_activation(), (torch.zeros(4, 4),), torch.sum)
    nodes = captured.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)
    assert [node.meta[BLOCK] for node in nodes] == ["layers.0", "layers.1"]


@pytest.mark.slow
def test_operators_beside_the_layers_are_not_recomputed() -> None:
    """Neither in a module nor in the only member of a list."""
    for build in (deep, member):
        captured = capture(*build())
        assert recompute_blocks(captured)
        blocks = {node.meta[AGAIN][0] for node in captured.graph.graph.nodes if AGAIN in node.meta}
        assert {block.rpartition(".")[0] for block in blocks} <= {"blocks", "networks.0.blocks"}


def test_a_module_without_blocks_is_told_so() -> None:
    module = nn.Sequential()
    module.add_module("only", nn.Linear(4, 4))
    with pytest.raises(SpecError, match="needs blocks"):
        sharding.plan(module, (torch.zeros(4, 4),), cores(2), loss=torch.sum, recompute=True)


@pytest.mark.slow
def test_experts_are_kept_within_the_backward_pass() -> None:
    """The operator that is computed again is the one whose gradients are taken: it runs once there, not twice."""
    module, sample = translation()
    captured = capture(module, sample)
    program_of(captured, planned((module, sample), recompute=True))
    experts = [node for node in captured.graph.graph.nodes if "expert_feed_forward" in node.name]
    backward = [node for node in experts if "backward" in node.name]
    assert backward
    assert not any(AGAIN in node.meta for node in experts)  # its result alone is needed, by nobody in its block
