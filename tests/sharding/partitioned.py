"""Programs of modules under random assignments, run on threads and compared with one device."""

import functools
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from moe.plan import Cluster
from moe.sharding.capture.capture import CapturedGraph, capture
from moe.sharding.exchange.exchange import part_of, strip_padding
from moe.sharding.exchange.moves import Moves
from moe.sharding.operands import is_operator
from moe.sharding.partition.buckets import with_buckets
from moe.sharding.partition.program import Partitioner, Program
from moe.sharding.placement import WHOLE, split
from moe.sharding.propagation.assignment import Assignment
from moe.sharding.rules.registry import rule_of
from moe.sharding.rules.rule import AxisOption, Options
from tests.grid import num_cases
from tests.sharding.modules import Function
from tests.sharding.thread_mesh import ThreadMesh, on_threads

MESHES = ((2,), (3,), (4,), (2, 2), (2, 3), (3, 2))


@dataclass(frozen=True)
class OneDevice:
    """Results of a module on one device."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def on_one_device(module: nn.Module, sample: Sequence[Any]) -> OneDevice:
    """Run both passes; buffers keep their values."""
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    outputs = _flat(module(*sample))
    for parameter in module.parameters():
        parameter.grad = None
    total = sum((output.sum() for output in outputs if output.requires_grad), torch.zeros(()))
    if total.requires_grad:
        total.backward()
    after = {name: buffer.clone() for name, buffer in module.named_buffers()}
    for name, buffer in module.named_buffers():
        buffer.data.copy_(before[name])
    gradients = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    return OneDevice([output.detach() for output in outputs], gradients, after)


def _flat(outputs: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]


def operators(captured_graph: CapturedGraph) -> list[fx.Node]:
    return [node for node in captured_graph.graph.graph.nodes if is_operator(node)]


def possible(node: fx.Node, degrees: tuple[int, ...]) -> list[Options]:
    rule = rule_of(node)
    candidates = itertools.product(*[rule.axis_options()] * len(degrees))
    return [options for options in candidates if rule.is_possible(options, degrees)]


def random_assignment(
    captured_graph: CapturedGraph,
    degrees: tuple[int, ...],
    draw: random.Random,
    prefer: Callable[[AxisOption], bool] | None = None,
) -> Assignment:
    """A random option for each operator, a preferred one if possible, and a random placement for each parameter."""
    options = {}
    for node in operators(captured_graph):
        candidates = possible(node, degrees)
        preferred_candidates = [
            candidate for candidate in candidates if prefer is not None and any(map(prefer, candidate))
        ]
        options[node.name] = draw.choice(preferred_candidates or candidates)
    leaves = {
        node.name: tuple(draw.choice([WHOLE, *map(split, range(len(leaf.shape)))]) for _ in degrees)
        for node, leaf in captured_graph.leaves.items()
        if leaf.kind in ("parameter", "buffer")
    }
    return Assignment(degrees, leaves, options)


def program_of(captured_graph: CapturedGraph, assignment: Assignment) -> Program:
    moves = _moves(assignment.degrees)
    return with_buckets(Partitioner(captured_graph, assignment, rule_of, moves).program(), assignment.degrees)


@functools.cache
def _moves(degrees: tuple[int, ...]) -> Moves:
    return Moves(Cluster(num_nodes=1, devices_per_node=math.prod(degrees), device="h100"), degrees)


def part_without_padding(program: Program, name: str, full_tensor: Tensor, mesh: ThreadMesh) -> Tensor:
    """A rank's part of a full tensor in a program."""
    placements = program.placements[name]
    return strip_padding(part_of(full_tensor.detach(), placements, mesh), full_tensor.shape, placements, mesh)


def arguments_of(program: Program, module: nn.Module, sample: Sequence[Any], mesh: ThreadMesh) -> list[Any]:
    """A rank's arguments of a program's forward pass."""
    tensors = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    inputs, arguments = _flat(list(sample)), []
    for leaf in program.leaves:
        if leaf.kind == "input":
            arguments.append(inputs[int(leaf.name.split(".")[1])])
        elif leaf.kind == "constant":
            arguments.append(program.constants[leaf.name])
        else:
            arguments.append(part_without_padding(program, leaf.name, tensors[leaf.name], mesh))
    return arguments


def run_program(
    program: Program, module: nn.Module, sample: Sequence[Any], mesh: ThreadMesh
) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """(outputs, padded parts of gradients, padded parts of buffers' new values) on one rank."""
    arguments = arguments_of(program, module, sample, mesh)
    results = list(program.forward(mesh, list(arguments)))
    outputs, results = results[: program.num_outputs], results[program.num_outputs :]
    updates, saved_tensors = results[: len(program.updates)], results[len(program.updates) :]
    gradients: dict[str, Tensor] = {}
    if program.backward is not None:
        tangents = [torch.ones_like(output) for output in outputs]
        sources = {"saved": saved_tensors, "leaf": arguments, "tangent": tangents}
        parts = program.backward(mesh, [sources[kind][number] for kind, number in program.backward_arguments])
        gradients = dict(zip(program.gradients, parts, strict=True))
    return outputs, gradients, dict(zip(program.updates, updates, strict=True))


def unlike_parts(
    program: Program,
    parts: dict[str, Tensor],
    full_tensors: dict[str, Tensor],
    mesh: ThreadMesh,
    is_close: Callable[[str, Tensor, Tensor], bool],
) -> list[str]:
    """Padded parts by name that differ from those of full tensors; a missing one is a scalar zero."""
    wrong = []
    for name, part in parts.items():
        tensor = full_tensors.get(name, torch.zeros(()))
        actual = strip_padding(part, tensor.shape, program.placements[name], mesh)
        expected = part_without_padding(program, name, tensor, mesh)
        if not is_close(name, actual, expected):
            wrong.append(f"{name} on {mesh.indices}: {actual} for {expected}")
    return wrong


def differences(
    module: nn.Module,
    sample: Sequence[Any],
    captured_graph: CapturedGraph,
    assignment: Assignment,
    tolerance: float = 1e-10,
    expected: OneDevice | None = None,
) -> list[str]:
    """Differences from one device, on any rank."""
    program, reference = program_of(captured_graph, assignment), expected or on_one_device(module, sample)

    def close(_: Any, part: Tensor, full_tensor: Tensor) -> bool:
        if part.shape != full_tensor.shape or part.dtype != full_tensor.dtype:
            return False
        if not (part.is_floating_point() or part.is_complex()):
            return torch.equal(part, full_tensor)
        return torch.allclose(part, full_tensor, rtol=tolerance, atol=tolerance, equal_nan=True)

    def run_rank(mesh: ThreadMesh) -> list[str]:
        outputs, gradients, updates = run_program(program, module, sample, mesh)
        pairs = enumerate(zip(outputs, reference.outputs, strict=True))
        wrong = [
            f"output {number}: {output} for {reference_output}"
            for number, (output, reference_output) in pairs
            if not close(0, output, reference_output)
        ]
        wrong += unlike_parts(program, gradients, reference.gradients, mesh, close)
        return wrong + unlike_parts(program, updates, reference.buffers, mesh, close)

    return [message for wrong in on_threads(assignment.degrees, run_rank) for message in wrong]


def check_at_random(
    module: nn.Module,
    sample: Sequence[Any],
    cases: int = 20,
    seed: int = 0,
    prefer: Callable[[AxisOption], bool] | None = None,
    meshes: Sequence[tuple[int, ...]] = MESHES,
) -> None:
    """Fail where a program of the module under a random assignment differs from one device."""
    captured_graph, expected = capture(module, sample), on_one_device(module, sample)
    for case in range(num_cases(cases)):
        draw = random.Random(1000 * seed + case)
        assignment = random_assignment(captured_graph, draw.choice(list(meshes)), draw, prefer)
        wrong = differences(module, sample, captured_graph, assignment, expected=expected)
        names = {name: [option.name for option in options] for name, options in assignment.options.items()}
        assert not wrong, (case, assignment.degrees, wrong[:3], names)


def check_function(
    function: Callable[..., Any], *parameters: tuple[int, ...] | Tensor, inputs: Sequence[Any] = (), **options: Any
) -> None:
    """The same for a function of parameters and inputs. A shape stands for a random parameter of float64."""
    tensors = [
        torch.randn(parameter, dtype=torch.float64) if isinstance(parameter, tuple) else parameter
        for parameter in parameters
    ]
    check_at_random(Function(function, *tensors), tuple(inputs), **options)


def node_of(target: Any, *args: Any) -> fx.Node:
    """A node that calls an operator with placeholders for tensors."""
    graph = fx.Graph()

    def with_placeholders(value: Any) -> Any:
        if isinstance(value, Tensor):
            node = graph.placeholder(f"x{len(graph.nodes)}")
            node.meta["val"] = value
            return node
        return [with_placeholders(element) for element in value] if isinstance(value, list) else value

    return graph.call_function(target, tuple(map(with_placeholders, args)))
