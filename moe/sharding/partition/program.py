"""Program of a plan: its forward pass and its backward pass, the same on every rank."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, fx

from moe.sharding.capture.capture import CapturedGraph, GraphInput
from moe.sharding.exchange.exchange import padded_to
from moe.sharding.exchange.moves import Moves
from moe.sharding.lines import BLOCK
from moe.sharding.operands import RECOMPUTED, is_operator, operands, shape_of, source
from moe.sharding.partition import runtime
from moe.sharding.partition.writer import ProgramWriter, identity
from moe.sharding.placement import WHOLE, Placements, axes_of, part_shape
from moe.sharding.propagation.assignment import Assignment
from moe.sharding.rules.creation import is_constant
from moe.sharding.rules.local import LocalCall
from moe.sharding.rules.manual import attribute_of
from moe.sharding.rules.rule import Options, Rule, operand_placements, result_placements

PREFETCH_DISTANCE = 6
"""Number of operators before its use at which the gather of a parameter starts."""

BackwardArgument = tuple[Literal["saved", "leaf", "tangent"], int]
"""An argument of the backward pass, by its number: a tensor saved by the forward pass, an argument of the forward pass,
or a tangent."""


@dataclass(frozen=True, eq=False)
class Program:
    """Local programs of the forward and backward pass. They are called with a mesh and a list of tensors, which they
    empty."""

    forward: fx.GraphModule
    """Returns the outputs, new values of buffers, and tensors saved for the backward pass, in this order."""
    leaves: tuple[GraphInput, ...]
    """Arguments of the forward pass."""
    num_outputs: int
    updates: tuple[str, ...]
    """Buffers for which the forward pass returns new values."""
    backward: fx.GraphModule | None
    backward_arguments: tuple[BackwardArgument, ...]
    """Arguments of the backward pass."""
    tangents: tuple[int, ...]
    """Number of the output of each tangent."""
    gradients: tuple[str, ...]
    """Parameters for which the backward pass returns gradients: in the parameters' placements, padded."""
    needed_tangents: tuple[frozenset[int], ...]
    """For each gradient, the outputs on whose tangents it depends."""
    placements: dict[str, Placements]
    """Placements of parameters and buffers by name."""
    constants: dict[str, Tensor]
    """Constants of the captured graph by name."""


def compile_program(program: Program, **options: Any) -> Program:
    """The program with both passes compiled by `torch.compile` with these options."""
    passes: list[Any] = [
        None if module is None else torch.compile(module, **options) for module in (program.forward, program.backward)
    ]
    return replace(program, forward=passes[0], backward=passes[1])


def drop_backward(program: Program) -> Program:
    """The program without a backward pass, and without the tensors saved for it."""
    if program.backward is None:
        return program
    graph = fx.Graph()
    results: Any = graph.graph_copy(program.forward.graph, {})
    graph.output(results[: program.num_outputs + len(program.updates)])
    forward = fx.GraphModule(program.forward, graph)
    return replace(program, forward=forward, backward=None, backward_arguments=(), gradients=(), needed_tangents=())


class Partitioner:
    """Writes the program of an assignment."""

    def __init__(
        self, capture: CapturedGraph, assignment: Assignment, rule_of: Callable[[fx.Node], Rule], moves: Moves
    ) -> None:
        self._capture, self._assignment, self._rule_of = capture, assignment, rule_of
        self._forward = ProgramWriter(assignment.degrees, moves)
        self._backward = ProgramWriter(assignment.degrees, moves)
        self._replicated: Placements = (WHOLE,) * len(assignment.degrees)
        self._in_backward = capture.backward
        self._arguments: list[fx.Node] = []
        self._saved_nodes: list[fx.Node] = []
        self._backward_arguments: list[BackwardArgument] = []
        nodes = list(filter(is_operator, capture.graph.graph.nodes))
        self._kept_for_gradients = {self._forward_of(node) for node in nodes}
        self._saved_parts: dict[fx.Node, list[fx.Node]] = {}
        by_name = {leaf.name: (node, leaf) for node, leaf in capture.leaves.items()}
        self._outputs = {gradient: self._placements_of(*by_name[name]) for name, gradient in capture.gradients.items()}
        self._order = {
            phase: [node for node in nodes if (node in self._in_backward) == phase] for phase in (False, True)
        }
        self._positions = {node: position for phase in self._order.values() for position, node in enumerate(phase)}

    def program(self) -> Program:
        capture, tangents = self._capture, 0
        for node in capture.graph.graph.nodes:
            if (leaf := capture.leaves.get(node)) is not None:
                if leaf.kind == "tangent":
                    self._backward_arguments.append(("tangent", tangents))
                    tangents += 1
                    self._backward.add(node, self._replicated, self._backward.argument())
                else:
                    self._begin(node, leaf)
            elif is_operator(node):
                self._write(self._backward if node in self._in_backward else self._forward, node)
        return self._finish()

    def _begin(self, node: fx.Node, leaf: GraphInput) -> None:
        """Add an argument of the forward pass."""
        writer, placements = self._forward, self._placements_of(node, leaf)
        part = writer.argument()
        self._arguments.append(node)
        shape = part_shape(leaf.shape, placements, writer.degrees)
        if self._is_uneven(leaf.shape, placements):
            part = writer.call(padded_to, part, list(shape))
        writer.add(node, placements, part)

    def _is_uneven(self, shape: tuple[int, ...], placements: Placements) -> bool:
        return any(self._forward.is_padded(size, axes_of(placements, dim)) for dim, size in enumerate(shape))

    def _placements_of(self, node: fx.Node, leaf: GraphInput) -> Placements:
        return self._assignment.leaves.get(node.name, self._replicated) if leaf.kind != "input" else self._replicated

    def _write(self, writer: ProgramWriter, node: fx.Node) -> None:
        rule, options = self._rule_of(node), self._assignment.options[node.name]
        self._begin_ahead(writer, node)
        writer.origin = _origin(node)
        first = self._forward_of(node)
        kept_parts = self._saved_parts.get(first, []) if first is not None else []
        inputs = operands(node)[: -len(operands(first))] if first is not None and kept_parts else operands(node)
        parts = []
        for number, operand in enumerate(inputs):
            placements = operand_placements(options, number)
            part = self._obtain(writer, operand, placements)
            parts.append(self._prepare_operand(writer, node, rule, number, part))
        local = LocalCall(node, rule, options, parts, writer)
        local.is_kept = node in self._kept_for_gradients
        local.saved_parts = [self._save_part(writer, kept_part) for kept_part in kept_parts]
        axes = [option for option in options if option.exchange is not None]
        if axes:
            result = self._lower_exchange(writer, local, options)
        else:
            result = rule.lower(local) if rule.lower is not None else local.default()
        if local.is_kept:
            self._saved_parts[node] = local.saved_parts
        if isinstance(node.meta.get("val"), list | tuple):
            for user in node.users:
                _, number = source(user)
                element = writer.call(user.target, result, number)
                self._add(writer, user, result_placements(options, number), element)
        else:
            self._add(writer, node, result_placements(options), result)

    def _add(self, writer: ProgramWriter, tensor: fx.Node, placements: Placements, part: fx.Node) -> None:
        """Add a computed tensor. If it is a gradient, its reduction starts at once, and overlaps with the rest of the
        backward pass."""
        writer.add(tensor, placements, part)
        if tensor in self._outputs and writer is self._backward:
            writer.begin(tensor, self._outputs[tensor])

    def _begin_ahead(self, writer: ProgramWriter, node: fx.Node) -> None:
        """Start gathers of the parameters of the operator `PREFETCH_DISTANCE` places after this one."""
        order = self._order[writer is self._backward]
        position = self._positions[node] + PREFETCH_DISTANCE
        if (writer is self._backward and node not in self._in_backward) or position >= len(order):
            return
        writer.origin = _origin(order[position])
        options = self._assignment.options[order[position].name]
        for number, operand in enumerate(operands(order[position])):
            leaf = self._capture.leaves.get(operand)
            if leaf is not None and leaf.kind == "parameter":
                placements = operand_placements(options, number)
                self._version(writer, operand, placements)
                writer.begin(operand, placements)

    def _forward_of(self, node: fx.Node) -> fx.Node | None:
        """The operator whose gradients this one computes, if both have the same options."""
        forward_node, options = self._rule_of(node).gradients_of, self._assignment.options
        if forward_node is None or forward_node.name not in options:
            return None
        names = [[option.name for option in options[operator.name]] for operator in (forward_node, node)]
        return forward_node if names[0] == names[1] else None

    def _save_part(self, writer: ProgramWriter, part: fx.Node) -> fx.Node:
        if writer is self._forward:
            return part
        if part not in self._saved_nodes:
            self._saved_nodes.append(part)
        self._backward_arguments.append(("saved", self._saved_nodes.index(part)))
        return writer.argument()

    def _lower_exchange(self, writer: ProgramWriter, local: LocalCall, options: Options) -> Any:
        axis, exchange = next(
            (index, option.exchange) for index, option in enumerate(options) if option.exchange is not None
        )
        result = exchange.lower(local, axis)
        num_other_parts = 1
        for other_axis, option in enumerate(options):
            if other_axis != axis and option.factor is not None:
                num_other_parts *= writer.degrees[other_axis]
        moved_bytes = exchange.moved_bytes(writer.degrees[axis]) / num_other_parts
        last = next(reversed(writer.graph.nodes))
        last.meta["exchange"] = (exchange.kind, axis, moved_bytes, local.node.name)
        return result

    def _prepare_operand(self, writer: ProgramWriter, node: fx.Node, rule: Rule, number: int, part: fx.Node) -> fx.Node:
        """An operand's part, with its padding masked where that affects the result, and zero on all ranks but the first
        where it is added to partial sums."""
        options = self._assignment.options[node.name]
        operand = operands(node)[number]
        dtype, shape = operand.meta["val"].dtype, shape_of(operand)
        for dim, factors in enumerate(rule.operands[number]):
            axes = tuple(axis for axis, option in enumerate(options) if option.operands[number].dim == dim)
            if not axes or not writer.is_padded(shape[dim], axes):
                continue
            if number in rule.indices:
                valid = rule.identity.get(number, identity("sum", dtype))
                part = writer.mask_padding(part, dim, shape[dim], axes, valid)
            elif number in rule.unmasked:
                continue
            elif factors and rule.is_reduced(factors[0]) and factors[0] in rule.combine:
                value = rule.identity.get(number, identity(rule.combine[factors[0]], dtype))
                part = writer.mask_padding(part, dim, shape[dim], axes, value)
        if number in rule.added:
            sum_axes = tuple(
                axis
                for axis, option in enumerate(options)
                if any(result.combine == "sum" for result in option.results) and option.operands[number] == WHOLE
            )
            if sum_axes:
                part = writer.call(runtime.zero_other_ranks, writer.mesh, part, sum_axes)
        return part

    def _obtain(self, writer: ProgramWriter, tensor: fx.Node, placements: Placements) -> fx.Node:
        self._version(writer, tensor, placements)
        return writer.obtain(tensor, placements)

    def _version(self, writer: ProgramWriter, tensor: fx.Node, placements: Placements) -> None:
        """Ensure that a pass has a version of a tensor from which these placements can be obtained."""
        if writer is self._forward or tensor in self._in_backward:
            return
        versions = writer.versions.setdefault(tensor, {})
        if placements in versions:
            return
        if is_operator(tensor) and is_constant(tensor):
            # no operands, and the same each time: computed again instead of saved
            if not versions:
                self._write(self._backward, tensor)
            return
        forward_versions = self._forward.versions[tensor]
        base = next(iter(forward_versions))
        keep = (
            placements
            if (tensor.name, placements) in self._assignment.kept_tensors and placements in forward_versions
            else base
        )
        if keep not in versions:
            versions[keep] = self._keep(tensor, forward_versions[keep], keep)

    def _keep(self, tensor: fx.Node, part: fx.Node, placements: Placements) -> fx.Node:
        """Make a tensor of the forward pass an argument of the backward pass."""
        argument = self._backward.argument()
        leaf = self._capture.leaves.get(tensor)
        if leaf is not None and leaf.kind != "buffer" and placements == next(iter(self._forward.versions[tensor])):
            self._backward_arguments.append(("leaf", self._arguments.index(tensor)))
            if self._is_uneven(leaf.shape, placements):
                shape = part_shape(leaf.shape, placements, self._backward.degrees)
                return self._backward.call(padded_to, argument, list(shape))
            return argument
        if part not in self._saved_nodes:
            self._saved_nodes.append(part)
        self._backward_arguments.append(("saved", self._saved_nodes.index(part)))
        return argument

    def _result(self, writer: ProgramWriter, tensor: fx.Node, placements: Placements) -> fx.Node:
        writer.origin = _origin(tensor)
        return self._obtain(writer, tensor, placements)

    def _finish(self) -> Program:
        capture, forward, backward = self._capture, self._forward, self._backward
        outputs = [
            self._result(forward, output, self._replicated) for output in capture.outputs if isinstance(output, fx.Node)
        ]
        places = {
            leaf.name: self._placements_of(node, leaf)
            for node, leaf in capture.leaves.items()
            if leaf.kind in ("parameter", "buffer")
        }
        updates = [self._result(forward, value, places[name]) for name, value in capture.updates.items()]
        gradients = [self._result(backward, gradient, places[name]) for name, gradient in capture.gradients.items()]
        tangents = _tangents_by_node(capture)
        forward.graph.output((*outputs, *updates, *self._saved_nodes))
        backward.graph.output(tuple(gradients))
        return Program(
            _module(capture, forward.graph),
            tuple(capture.leaves[argument] for argument in self._arguments),
            len(outputs),
            tuple(capture.updates),
            _module(capture, backward.graph) if gradients else None,
            tuple(self._backward_arguments),
            tuple(int(leaf.name.split(".")[1]) for leaf in capture.leaves.values() if leaf.kind == "tangent"),
            tuple(capture.gradients),
            tuple(tangents[gradient] for gradient in capture.gradients.values()),
            places,
            {
                leaf.name: getattr(capture.graph, leaf.name)
                for leaf in capture.leaves.values()
                if leaf.kind == "constant"
            },
        )


def _tangents_by_node(capture: CapturedGraph) -> dict[fx.Node, frozenset[int]]:
    """Outputs on whose tangents each node depends."""
    tangents: dict[fx.Node, frozenset[int]] = {}
    for node in capture.graph.graph.nodes:
        leaf = capture.leaves.get(node)
        numbers = (int(leaf.name.split(".")[1]),) if leaf is not None and leaf.kind == "tangent" else ()
        tangents[node] = frozenset(numbers).union(*(tangents[operand] for operand in node.all_input_nodes))
    return tangents


def _origin(node: fx.Node) -> dict[str, Any]:
    return {key: node.meta.get(key) for key in ("line", "block", BLOCK, RECOMPUTED)}


def _module(capture: CapturedGraph, graph: fx.Graph) -> fx.GraphModule:
    """GraphModule of the graph, with the manual parts that it uses."""
    parts = {attribute_of(name): part for name, part in capture.parts.items()}
    part_names = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    return fx.GraphModule({name: part for name, part in parts.items() if name in part_names}, graph)
