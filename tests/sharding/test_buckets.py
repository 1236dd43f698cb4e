"""Exchanges of a program are joined into few collectives without longer waits."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn

from moe.plan import Cluster
from moe.sharding.capture.capture import CapturedGraph, capture
from moe.sharding.exchange import exchange, joint
from moe.sharding.exchange.moves import Moves
from moe.sharding.partition import buckets
from moe.sharding.partition.buckets import with_buckets
from moe.sharding.partition.overlap import MAX_IN_FLIGHT
from moe.sharding.partition.program import Partitioner, Program
from moe.sharding.placement import WHOLE, split
from moe.sharding.propagation.assignment import Assignment
from moe.sharding.rules.registry import rule_of
from tests.sharding.modules import Function, Stack
from tests.sharding.partitioned import differences, operators, program_of, run_program
from tests.sharding.thread_mesh import ThreadMesh, on_threads


def batch_split(captured_graph: CapturedGraph, leaves: int | None = None) -> Assignment:
    """Split along the batch wherever possible; parameters are replicated, or split in dimension `leaves`."""
    options = {}
    for node in operators(captured_graph):
        candidates = rule_of(node).axis_options()
        batch = [
            option for option in candidates if option.factor is not None and rule_of(node).sizes[option.factor] == 8
        ]
        options[node.name] = ((batch or candidates)[0],)
    place = WHOLE if leaves is None else split(leaves)
    names = {node.name: (place,) for node, leaf in captured_graph.leaves.items() if leaf.kind == "parameter"}
    return Assignment((2,), names, options)


def module_and_sample() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return Stack(6, 3).double(), (torch.randn(8, 6).double(),)


def collectives(program: Program, module: nn.Module, sample: tuple[Tensor, ...]) -> list[str]:
    def run(mesh: ThreadMesh) -> list[str]:
        run_program(program, module, sample, mesh)
        return [kind for kind, _, _ in mesh.log]

    first, second = on_threads((2,), run)
    assert first == second
    return first


@pytest.mark.sample(1)
@pytest.mark.parametrize(("leaves", "kind"), [(None, "all_reduce"), (0, "reduce_scatter")])
def test_all_gradients_are_one_collective(leaves: int | None, kind: str):
    module, sample = module_and_sample()
    captured_graph = capture(module, sample)
    assignment = batch_split(captured_graph, leaves)
    assert not differences(module, sample, captured_graph, assignment)
    program = program_of(captured_graph, assignment)
    assert program.backward is not None
    assert collectives(program, module, sample).count(kind) == 1 + (leaves is None)  # and the loss


class Halves(nn.Module):
    """Layers that use their weights by halves, so that gradients are concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(12, 6)) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = (x @ weight[:6].t()).tanh() * (x @ weight[6:].t())
        return x.pow(2).sum()


def test_concatenated_gradients_are_one_collective():
    torch.manual_seed(0)
    module, sample = Halves().double(), (torch.randn(8, 6).double(),)
    captured_graph = capture(module, sample)
    assignment = batch_split(captured_graph)
    assert not differences(module, sample, captured_graph, assignment)
    program = program_of(captured_graph, assignment)
    assert collectives(program, module, sample).count("all_reduce") == 2  # and the loss


def test_an_all_reduce_leaves_its_input_unchanged():
    def run(mesh: ThreadMesh) -> tuple[Tensor, list[Tensor]]:
        part = torch.full((2, 2), float(mesh.indices[0] + 1))
        return part, joint.finish(joint.begin_all_reduces(mesh, [part], 0, "sum"))

    for rank, (part, (total,)) in enumerate(on_threads((2,), run)):
        assert part.tolist() == [[rank + 1.0] * 2] * 2
        assert total.tolist() == [[3.0, 3.0]] * 2


def test_a_full_bucket_is_reduced_at_once(monkeypatch: pytest.MonkeyPatch):
    module, sample = module_and_sample()
    captured_graph = capture(module, sample)
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 6 * 6 * 8 + 1)
    program = program_of(captured_graph, batch_split(captured_graph))
    assert program.backward is not None
    nodes = list(program.backward.graph.nodes)
    reductions = [position for position, node in enumerate(nodes) if node.target is joint.begin_all_reduces]
    products = [position for position, node in enumerate(nodes) if node.target is torch.ops.aten.mm.default]
    assert len(reductions) >= 2
    assert reductions[0] < products[-1]
    assert not differences(module, sample, captured_graph, batch_split(captured_graph))


def test_few_reductions_are_in_flight(monkeypatch: pytest.MonkeyPatch):
    """Each reduction holds its input."""
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1)
    module, sample = module_and_sample()
    captured_graph = capture(module, sample)
    program = program_of(captured_graph, batch_split(captured_graph))
    assert program.backward is not None
    reductions = (exchange.begin_all_reduce, exchange.begin_reduce_scatter)
    in_flight, max_in_flight, total = set[fx.Node](), 0, 0
    for node in program.backward.graph.nodes:
        if node.target in reductions:
            in_flight.add(node)
            total += 1
        in_flight -= set(node.all_input_nodes) if node.target is exchange.finish else set()
        max_in_flight = max(max_in_flight, len(in_flight))
    assert total > max_in_flight == MAX_IN_FLIGHT


def test_exchanges_are_not_delayed_for_later_ones():
    """A maximum that gradients need does not wait for the maximum of the next layer."""

    def chain(x: Tensor) -> Tensor:
        x = x / x.amax(0)
        x = x / x.exp().amax(0)
        return (x / x.sum(0)).sum()

    module, sample = Function(chain), (torch.rand(8, 4).double() + 1,)
    captured_graph = capture(module, sample)
    assert not differences(module, sample, captured_graph, batch_split(captured_graph))
    moves = Moves(Cluster(num_nodes=1, devices_per_node=2), (2,))
    program = Partitioner(captured_graph, batch_split(captured_graph), rule_of, moves).program()
    before = len([node for node in program.forward.graph.nodes if "move" in node.meta])
    after = with_buckets(replace(program), (2,))
    assert before == len([node for node in after.forward.graph.nodes if "move" in node.meta]) > 2


def test_parts_of_any_dtype_and_shape_are_gathered_together():
    def run(mesh: ThreadMesh) -> list[Tensor]:
        rank = mesh.indices[0]
        parts = [
            torch.tensor([rank == 0, True]),
            torch.full((3, 2), rank, dtype=torch.int64),
            torch.full((1, 1), rank + 0.5).expand(2, 1),
        ]
        return joint.finish(joint.begin_gathers(mesh, parts, 0, [0, 1, 0], [3, 4, 4]))

    for truth, matrix, numbers in on_threads((2,), run):
        assert truth.tolist() == [True, True, False]
        assert matrix.tolist() == [[0, 0, 1, 1]] * 3
        assert numbers.flatten().tolist() == [0.5, 0.5, 1.5, 1.5]


def test_operands_precede_operators():
    module, sample = module_and_sample()
    captured_graph = capture(module, sample)
    program = program_of(captured_graph, batch_split(captured_graph, 0))
    earlier_nodes: set[fx.Node] = set()
    for node in program.forward.graph.nodes:
        assert set(node.all_input_nodes) <= earlier_nodes
        earlier_nodes.add(node)
