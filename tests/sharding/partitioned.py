"""Programs of modules under assignments drawn at random, run on threads, held against one device."""

import functools
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

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
from tests.sharding.thread_mesh import ThreadMesh, on_threads

MESHES = ((2,), (3,), (4,), (2, 2), (2, 3), (3, 2))


@dataclass(frozen=True)
class OneDevice:
    """Results of a module on one device."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def on_one_device(module: nn.Module, sample: Sequence[Any]) -> OneDevice:
    """The module is as it was afterwards."""
    before = {name: each.clone() for name, each in module.named_buffers()}
    outputs = _flat(module(*sample))
    for parameter in module.parameters():
        parameter.grad = None
    total = sum((each.sum() for each in outputs if each.requires_grad), torch.zeros(()))
    if total.requires_grad:
        total.backward()
    after = {name: each.clone() for name, each in module.named_buffers()}
    for name, each in module.named_buffers():
        each.data.copy_(before[name])
    gradients = {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
    return OneDevice([each.detach() for each in outputs], gradients, after)


def _flat(returned: Any) -> list[Tensor]:
    return [each for each in torch.utils._pytree.tree_leaves(returned) if isinstance(each, Tensor)]


def possible(captured: CapturedGraph, node: Any, degrees: tuple[int, ...]) -> list[Options]:
    rule = rule_of(node)
    every = itertools.product(*[rule.axis_options()] * len(degrees))
    return [options for options in every if rule.is_possible(options, degrees)]


def drawn(
    captured: CapturedGraph,
    degrees: tuple[int, ...],
    draw: random.Random,
    prefer: Callable[[AxisOption], bool] | None = None,
) -> Assignment:
    """An option for each operator and a placement for each parameter, at random; such that `prefer` likes first."""
    options = {}
    for node in captured.graph.graph.nodes:
        if is_operator(node):
            every = possible(captured, node, degrees)
            liked = [each for each in every if prefer is not None and any(map(prefer, each))]
            options[node.name] = draw.choice(liked or every)
    leaves = {
        node.name: tuple(draw.choice([WHOLE, *map(split, range(len(leaf.shape)))]) for _ in degrees)
        for node, leaf in captured.leaves.items()
        if leaf.kind in ("parameter", "buffer")
    }
    return Assignment(degrees, leaves, options)


def programmed(captured: CapturedGraph, assignment: Assignment) -> Program:
    moves = _moves(assignment.degrees)
    return with_buckets(Partitioner(captured, assignment, rule_of, moves).program(), assignment.degrees)


@functools.cache
def _moves(degrees: tuple[int, ...]) -> Moves:
    return Moves(Cluster(num_nodes=1, devices_per_node=math.prod(degrees), device="h100"), degrees)


def run_program(
    program: Program, module: nn.Module, sample: Sequence[Any], mesh: ThreadMesh
) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """(outputs, padded parts of gradients, padded parts of buffers' new values) on one rank."""
    tensors = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    inputs = _flat(list(sample))
    given = []
    for leaf in program.leaves:
        if leaf.kind == "input":
            given.append(inputs[int(leaf.name.split(".")[1])])
        elif leaf.kind == "constant":
            given.append(program.constants[leaf.name])
        else:
            whole, placements = tensors[leaf.name].detach(), program.placements[leaf.name]
            given.append(strip_padding(part_of(whole, placements, mesh), whole.shape, placements, mesh))
    results = list(program.forward(mesh, list(given)))
    outputs, results = results[: program.num_outputs], results[program.num_outputs :]
    updates, saved = results[: len(program.updates)], results[len(program.updates) :]
    found: dict[str, Tensor] = {}
    if program.backward is not None:
        tangents = [torch.ones_like(each) for each in outputs]
        sources = {"saved": saved, "leaf": given, "tangent": tangents}
        parts = program.backward(mesh, [sources[kind][number] for kind, number in program.backward_arguments])
        found = dict(zip(program.gradients, parts, strict=True))
    return outputs, found, dict(zip(program.updates, updates, strict=True))


def differences(
    module: nn.Module,
    sample: Sequence[Any],
    captured: CapturedGraph,
    assignment: Assignment,
    tolerance: float = 1e-10,
    expected: OneDevice | None = None,
) -> list[str]:
    """What is not as on one device, on any rank."""
    program = programmed(captured, assignment)
    if expected is None:
        expected = on_one_device(module, sample)

    def one(mesh: ThreadMesh) -> list[str]:
        outputs, gradients, updates = run_program(program, module, sample, mesh)
        wrong = [
            f"output {number}: {found} for {whole}"
            for number, (found, whole) in enumerate(zip(outputs, expected.outputs, strict=True))
            if not _close(found, whole, tolerance)
        ]
        for what, found, wanted in (("gradient", gradients, expected.gradients), ("buffer", updates, expected.buffers)):
            for name, part in found.items():
                placements, whole = program.placements[name], wanted.get(name, torch.zeros(()))
                mine = strip_padding(part, whole.shape, placements, mesh)
                true = strip_padding(part_of(whole, placements, mesh), whole.shape, placements, mesh)
                if not _close(mine, true, tolerance):
                    wrong.append(f"{what} of {name} on {mesh.indices}: {mine} for {true}")
        return wrong

    return [each for found in on_threads(assignment.degrees, one) for each in found]


def _close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not (found.is_floating_point() or found.is_complex()):
        return torch.equal(found, expected)
    return torch.allclose(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def check_at_random(
    module: nn.Module,
    sample: Sequence[Any],
    cases: int = 20,
    seed: int = 0,
    prefer: Callable[[AxisOption], bool] | None = None,
    meshes: Sequence[tuple[int, ...]] = MESHES,
) -> None:
    """Fail where a program of the module, under an assignment drawn at random, differs from one device."""
    captured, expected = capture(module, sample), on_one_device(module, sample)
    for case in range(num_cases(cases)):
        draw = random.Random(1000 * seed + case)
        assignment = drawn(captured, draw.choice(list(meshes)), draw, prefer)
        wrong = differences(module, sample, captured, assignment, expected=expected)
        assert not wrong, (
            case,
            assignment.degrees,
            wrong[:3],
            {n: [o.name for o in e] for n, e in assignment.options.items()},
        )
