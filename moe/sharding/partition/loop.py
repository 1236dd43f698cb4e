"""Program of a step over micro-batches: a prologue for what is the same for all of them; the forward and backward pass
of each micro-batch; an epilogue for what is done with the sums."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from moe.sharding.exchange import exchange
from moe.sharding.exchange.loop_mesh import LoopMesh
from moe.sharding.exchange.mesh import Mesh
from moe.sharding.partition import runtime
from moe.sharding.partition.program import Program


class Section(IntEnum):
    """Section of a step."""

    PROLOGUE = 0
    BODY = 1
    EPILOGUE = 2


@dataclass(frozen=True, eq=False)
class LoopProgram:
    """A step on one rank, called with the leaves of its program."""

    micro_batches: int
    prologue: fx.GraphModule
    body: fx.GraphModule
    """Called for each micro-batch with the prologue's results and a list to which it adds its results."""
    epilogue: fx.GraphModule
    num_sums: int

    def __call__(self, mesh: Mesh, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Returns the outputs, new values of buffers, and, with a backward pass, gradients for a gradient of the loss
        of 1."""
        loop_mesh = LoopMesh(mesh, self.micro_batches)
        prologue_results = self.prologue(loop_mesh, list(leaves))
        sums: list[Any] = [None] * self.num_sums
        for number in range(self.micro_batches):
            loop_mesh.go_to(number)
            self.body(loop_mesh, prologue_results, sums)
        return tuple(self.epilogue(loop_mesh, prologue_results, sums))


def add_up(sums: list[Any], number: int, part: Tensor, combine: str) -> None:
    """Combine a micro-batch's partial result with those of earlier micro-batches."""
    total = sums[number]
    if total is None:
        sums[number] = part.clone()
    elif combine == "sum":
        total.add_(part)
    else:
        sums[number] = (torch.maximum if combine == "max" else torch.minimum)(total, part)


def append(sums: list[Any], number: int, part: Tensor) -> None:
    """Append a micro-batch's rows to those of earlier micro-batches."""
    if sums[number] is None:
        sums[number] = []
    sums[number].append(part)


def join_parts(parts: list[Tensor], dim: int, size: int) -> Tensor:
    return torch.cat(parts, dim).narrow(dim, 0, size)


_SUMS = (exchange.all_reduce, exchange.begin_all_reduce)
_ROWS = (exchange.gather, exchange.begin_gather)
_POSITIONS = (runtime.first, runtime.valid)
_ONE_AXIS = (
    *_SUMS, *_ROWS, exchange.take_part, exchange.keep_first, exchange.all_to_all, exchange.reduce_scatter,
    exchange.begin_reduce_scatter,
)  # fmt: skip


def loop_over_micro_batches(
    program: Program, micro_batches: int, loss_dtype: torch.dtype, with_backward: bool
) -> LoopProgram:
    """The loop of a program whose mesh has it as axis 0. Notes in each exchange how many times it is run in a step."""
    graph, results = _step(program, loss_dtype, with_backward)
    loop_split = _LoopSplit(graph, results)
    loop_split.note_times(micro_batches)
    return loop_split.program(micro_batches)


def unit_gradient(leaf: Tensor, dtype: torch.dtype) -> Tensor:
    """Gradient of the loss with respect to itself: 1."""
    return torch.ones((), dtype=dtype, device=leaf.device)


def _step(program: Program, loss_dtype: torch.dtype, with_backward: bool) -> tuple[fx.Graph, list[fx.Node]]:
    """(forward and backward pass as one graph, its results)."""
    graph = fx.Graph()
    mesh, tensors = graph.placeholder("mesh"), graph.placeholder("tensors")
    leaves = [graph.call_function(getitem, (tensors, index)) for index in range(len(program.leaves))]

    def copy_nodes(module: fx.GraphModule, arguments: list[fx.Node]) -> list[fx.Node]:
        program_mesh, program_tensors = [
            placeholder for placeholder in module.graph.nodes if placeholder.op == "placeholder"
        ]
        copies = {program_mesh: mesh, program_tensors: tensors}
        for node in module.graph.nodes:
            if node.op == "output":
                return [copies[result] for result in node.args[0]]
            if node.op == "placeholder" or node.op == "call_method":  # which empties the list
                continue
            if node.target is getitem and node.args[0] is program_tensors:
                copies[node] = arguments[node.args[1]]
                continue
            copies[node] = graph.node_copy(node, lambda operand: copies[operand])
            copies[node].meta["original"] = node
        raise AssertionError("a program has outputs")

    outputs = copy_nodes(program.forward, leaves)
    results = outputs[: program.num_outputs + len(program.updates)]
    if with_backward and program.backward is not None:
        sources = {"saved": outputs[len(results) :], "leaf": leaves}
        tangent = graph.call_function(unit_gradient, (leaves[0], loss_dtype))
        arguments = [
            tangent if kind == "tangent" else sources[kind][number] for kind, number in program.backward_arguments
        ]
        results += copy_nodes(program.backward, arguments)
    return graph, results


class _LoopSplit:
    """Splits a step's graph into its three sections, by what depends on the loop's axis."""

    def __init__(self, graph: fx.Graph, results: list[fx.Node]) -> None:
        self._results = results
        self._mesh, self._tensors, *self._nodes = graph.nodes
        self._section: dict[fx.Node, Section] = {self._mesh: Section.PROLOGUE, self._tensors: Section.PROLOGUE}
        self._ends: dict[fx.Node, int] = {}
        """Exchanges along the loop, each with the number of its sum."""
        for node in self._nodes:
            self._section[node] = self._section_of(node)

    def _section_of(self, node: fx.Node) -> Section:
        sections = {self._section[operand] for operand in node.all_input_nodes}
        if node.target in (*_SUMS, *_ROWS) and node.args[2] == 0:
            assert sections == {Section.PROLOGUE, Section.BODY}, node
            self._ends[node] = len(self._ends)
            return Section.EPILOGUE
        if Section.EPILOGUE in sections:
            assert Section.BODY not in sections, node
            return Section.EPILOGUE
        return Section.BODY if Section.BODY in sections or self._looks_at_loop(node) else Section.PROLOGUE

    def _looks_at_loop(self, node: fx.Node) -> bool:
        if self._mesh not in node.args:
            return False
        if node.target in _ONE_AXIS:
            return bool(node.args[2] == 0)
        if node.target in (*_POSITIONS, runtime.zero_other_ranks):
            return 0 in node.args[2]  # type: ignore[operator]
        return True

    def note_times(self, micro_batches: int) -> None:
        for node in self._nodes:
            if (original := node.meta.pop("original", None)) is not None:
                times = micro_batches if self._section[node] == Section.BODY else 1
                original.meta["times"] = 0 if node in self._ends else times

    def program(self, micro_batches: int) -> LoopProgram:
        assert all(self._section[result] != Section.BODY for result in self._results)
        prologue_nodes = [
            node
            for node in self._nodes
            if self._section[node] == Section.PROLOGUE
            and (node in self._results or any(self._section[user] != Section.PROLOGUE for user in node.users))
        ]
        return LoopProgram(
            micro_batches,
            self._prologue(prologue_nodes),
            self._body(prologue_nodes),
            self._epilogue(prologue_nodes),
            len(self._ends),
        )

    def _prologue(self, prologue_nodes: list[fx.Node]) -> fx.GraphModule:
        graph = fx.Graph()
        copies = {self._mesh: graph.placeholder("mesh"), self._tensors: graph.placeholder("tensors")}
        self._copy(graph, copies, Section.PROLOGUE)
        graph.output([copies[node] for node in prologue_nodes])
        return fx.GraphModule({}, graph)

    def _begin_graph(self, prologue_nodes: list[fx.Node]) -> tuple[fx.Graph, dict[fx.Node, fx.Node], fx.Node]:
        graph = fx.Graph()
        copies = {self._mesh: graph.placeholder("mesh")}
        prologue_results, sums = graph.placeholder("prologue_results"), graph.placeholder("sums")
        for index, node in enumerate(prologue_nodes):
            copies[node] = graph.call_function(getitem, (prologue_results, index))
        return graph, copies, sums

    def _body(self, prologue_nodes: list[fx.Node]) -> fx.GraphModule:
        graph, copies, sums = self._begin_graph(prologue_nodes)
        ends: dict[fx.Node, list[fx.Node]] = {}
        for end in self._ends:
            ends.setdefault(end.args[1], []).append(end)  # type: ignore[arg-type]
        for node in self._nodes:
            if self._section[node] != Section.BODY:
                continue
            copies[node] = graph.node_copy(node, lambda operand: copies[operand])
            for end in ends.get(node, ()):
                if end.target in _SUMS:
                    graph.call_function(add_up, (sums, self._ends[end], copies[node], end.args[3]))
                else:
                    graph.call_function(append, (sums, self._ends[end], copies[node]))
        graph.output(None)
        return fx.GraphModule({}, graph)

    def _epilogue(self, prologue_nodes: list[fx.Node]) -> fx.GraphModule:
        graph, copies, sums = self._begin_graph(prologue_nodes)
        for node in self._nodes:
            if self._section[node] != Section.EPILOGUE:
                continue
            if node in self._ends:
                copies[node] = graph.call_function(getitem, (sums, self._ends[node]))
                if node.target in _ROWS:
                    copies[node] = graph.call_function(join_parts, (copies[node], *node.args[3:5]))
            elif node.target is exchange.finish and node.args[0] in self._ends:
                copies[node] = copies[node.args[0]]
            else:
                copies[node] = graph.node_copy(node, lambda operand: copies[operand])
        graph.output(tuple(copies[result] for result in self._results))
        return fx.GraphModule({}, graph)

    def _copy(self, graph: fx.Graph, copies: dict[fx.Node, fx.Node], section: Section) -> None:
        for node in self._nodes:
            if self._section[node] == section:
                copies[node] = graph.node_copy(node, lambda operand: copies[operand])
