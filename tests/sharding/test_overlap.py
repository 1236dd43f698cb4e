"""All-to-alls of a layer of experts overlap with independent work."""

import random
from collections.abc import Callable
from functools import partial
from itertools import groupby
from operator import getitem
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from moe import sharding
from moe.layers import MoELayer
from moe.sharding.applied.callable_program import program_of
from moe.sharding.capture.capture import capture
from moe.sharding.exchange import exchange
from moe.sharding.exchange.ring import ring_product
from moe.sharding.lines import BLOCK
from moe.sharding.partition.buckets import put_in_buckets
from moe.sharding.partition.program import Program
from moe.sharding.rules.differentiable import begin_forward, begin_forward_kept, finish
from moe.sharding.solve.recompute import recompute_blocks
from moe.spec import MoESpec
from tests.parity.gloo_ranks import Pools
from tests.sharding import partitioned
from tests.sharding.modules import MeanSquare
from tests.sharding.on_ranks import Built, check_on_ranks, cores
from tests.sharding.partitioned import random_assignment
from tests.sharding.test_expert_operators import exchanges

aten = torch.ops.aten


class SharedExpert(nn.Module):
    """Experts and a dense layer for the same tokens, which is called before or after the experts."""

    def __init__(self, is_last: bool = False, num_experts: int = 4, dim: int = 6, hidden_dim: int = 8) -> None:
        super().__init__()
        self.is_last = is_last
        self.up = nn.Parameter(torch.randn(num_experts, dim, hidden_dim) * dim**-0.5)
        self.down = nn.Parameter(torch.randn(num_experts, hidden_dim, dim) * hidden_dim**-0.5)
        self.dense_up, self.dense_down = nn.Linear(dim, 16), nn.Linear(16, dim)
        self.router = nn.Linear(dim, num_experts)

    def forward(self, x: Tensor) -> Tensor:
        expert_inputs = torch.einsum("gse,gsm->egsm", self.router(x).softmax(-1), x)
        expert_inputs = sharding.shard(expert_inputs, {"expert": 0})
        dense_output = None if self.is_last else self.dense_down(self.dense_up(x).tanh())
        y = torch.einsum("egsh,ehm->egsm", torch.einsum("egsm,emh->egsh", expert_inputs, self.up).tanh(), self.down)
        y = sharding.shard(y, {"expert": 1})
        if dense_output is None:
            dense_output = self.dense_down(self.dense_up(x).tanh())
        return (y.sum(0) + dense_output).square().mean()


class Block(nn.Module):
    """Experts after a dense layer."""

    def __init__(self, num_experts: int = 4, dim: int = 6) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(num_experts, dim, dim) * dim**-0.5)
        self.dense = nn.Linear(dim, dim)
        self.router = nn.Linear(dim, num_experts)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense(x.tanh()).tanh()
        weights = self.router(x).softmax(-1)
        expert_inputs = sharding.shard(torch.einsum("gse,gsm->egsm", weights, x), {"expert": 0})
        y = sharding.shard(torch.einsum("egsm,emh->egsh", expert_inputs, self.up), {"expert": 1})
        return x + y.tanh().sum(0)


def build(is_last: bool = False) -> Built:
    torch.manual_seed(0)
    return SharedExpert(is_last).double(), (torch.randn(4, 5, 6, dtype=torch.float64),)


HINTS = {"inputs": sharding.Split(0), "up": sharding.Split(0), "down": sharding.Split(0)}


BEGINS = (exchange.begin_all_to_all, begin_forward, begin_forward_kept)
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, ring_product)


def build_program(module: nn.Module, batch: tuple[Any, ...], **options: Any) -> Program:
    plan = sharding.plan(module, batch, cores(2), mesh={"expert": 2}, **options)
    captured_graph = capture(module, batch)
    if plan.recompute:
        recompute_blocks(captured_graph)
    return program_of(captured_graph, plan)


def windows(program: fx.GraphModule | None) -> list[list[fx.Node]]:
    """For each all-to-all, the calls between its start and the wait for it."""
    assert program is not None
    nodes = list(program.graph.nodes)
    assert exchange.all_to_all not in [node.target for node in nodes]
    calls_in_flight = []
    for index, node in enumerate(nodes):
        if node.target in BEGINS:
            (wait,) = node.users
            assert wait.target in (exchange.finish, finish)
            calls_in_flight.append(nodes[index + 1 : nodes.index(wait)])
    return calls_in_flight


def products_of(block: str, window: list[fx.Node]) -> int:
    return sum(node.target in PRODUCTS and (node.meta.get("block") or "").startswith(block) for node in window)


@pytest.mark.slow
def test_products_run_between_the_start_and_the_wait():
    program = build_program(*build(), hints=HINTS)
    for graph in (program.forward, program.backward):
        calls_in_flight = windows(graph)
        assert len(calls_in_flight) >= 2
        assert any(node.target in PRODUCTS for window in calls_in_flight for node in window)


@pytest.mark.sample(1)
@pytest.mark.parametrize("is_last", [False, True])
def test_tokens_are_sent_to_experts_before_a_shared_branch(is_last: bool):
    hints = HINTS | {"dense_*": sharding.Replicate()}
    send_window, _ = windows(build_program(*build(is_last), hints=hints).forward)
    assert products_of("dense", send_window) == 2


@pytest.mark.slow
def test_the_operator_of_experts_sends_tokens_before_shared_experts():
    torch.manual_seed(0)
    spec = MoESpec(
        num_experts=4, model_dim=6, hidden_dim=5, group_tokens=8, shared_hidden_dim=4,
        router="softmax_topk",
    )  # fmt: skip
    layer, x = MoELayer(spec, dtype=torch.float64), torch.randn(4, 8, 6, dtype=torch.float64)
    captured_graph = capture(layer, (x,))
    assignment = random_assignment(captured_graph, (2,), random.Random(0), exchanges)
    (send_window,) = windows(partitioned.program_of(captured_graph, assignment).forward)
    assert products_of("shared", send_window) == 2


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_a_block_ends_before_the_next_starts(recompute: bool):
    """Otherwise the activations of several blocks would be live at once."""
    torch.manual_seed(0)
    batch = (torch.randn(4, 5, 6, dtype=torch.float64),)
    hints = {"inputs": sharding.Split(0), "layers.*.up": sharding.Split(0)}
    hints |= {f"layers.*.{name}.*": sharding.Replicate() for name in ("dense", "router")}
    program = build_program(MeanSquare(Block(), Block()).double(), batch, hints=hints, recompute=recompute)
    for graph, order in ((program.forward, "01"), (program.backward, "10")):
        calls_in_flight = windows(graph)
        assert len(calls_in_flight) >= 4
        products = [node for node in graph.graph.nodes if node.target in PRODUCTS]
        blocks = [block for block, _ in groupby(node.meta[BLOCK] for node in products)]
        assert blocks == [f"layers.{number}" for number in order]


def all_to_all(graph: fx.Graph, mesh: fx.Node, operand: fx.Node) -> fx.Node:
    return graph.call_function(exchange.all_to_all, (mesh, operand, 0, 0, 1, 4, 4))


def operator_of_experts(graph: fx.Graph, mesh: fx.Node, operand: fx.Node) -> fx.Node:
    start = graph.call_function(begin_forward, (mesh, "expert_feed_forward", (), operand))
    return graph.call_function(getitem, (graph.call_function(finish, (start,)), 0))


@pytest.mark.parametrize(
    "calls",
    [[all_to_all] * 6, [operator_of_experts] * 6, [all_to_all, operator_of_experts] * 3],
    ids=["all-to-alls", "operators", "both"],
)
def test_no_more_than_two_all_to_alls_are_in_flight(calls: list[Callable[..., fx.Node]]):
    """Only the program's output uses the results, so that all could be in flight at once."""
    graph = fx.Graph()
    mesh, part = graph.placeholder("mesh"), graph.placeholder("tensors")
    results = []
    for call in calls:
        part = graph.call_function(aten.tanh.default, (part,))
        results.append(call(graph, mesh, part))
    graph.output(tuple(results))
    put_in_buckets(fx.GraphModule({}, graph), (2,))
    in_flight, max_in_flight = 0, 0
    for node in graph.nodes:
        in_flight += (node.target in BEGINS) - (node.target in (exchange.finish, finish))
        max_in_flight = max(max_in_flight, in_flight)
    assert (in_flight, max_in_flight) == (0, 2)


def test_an_operator_without_users_keeps_its_place():
    graph = fx.Graph()
    mesh, part = graph.placeholder("mesh"), graph.placeholder("tensors")
    begin = graph.call_function(begin_forward, (mesh, "expert_feed_forward", (), part))
    result = graph.call_function(getitem, (graph.call_function(finish, (begin,)), 0))
    graph.output((part,))
    put_in_buckets(fx.GraphModule({}, graph), (2,))
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [begin_forward, finish, getitem]
    assert not result.users


@pytest.mark.slow
@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_results_are_those_of_one_device(ranks: Pools, num_ranks: int, is_last: bool):
    plan = check_on_ranks(ranks, partial(build, is_last), {"expert": num_ranks}, HINTS, steps=2)
    assert [collective.kind for collective in plan.collectives].count("all_to_all") >= 4
