"""Programs of calls that were not planned: in the other mode (evaluation with a plan for training), or with a batch of
other sizes. Placements of parameters and the memory limit are the plan's."""

import copy
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from moe.parallel import json_collectives
from moe.sharding.applied.callable_program import CallableProgram, make_callable, prepare, write_program
from moe.sharding.applied.materialise import tensors_of
from moe.sharding.capture.capture import CapturedGraph, capture, device_of
from moe.sharding.hints.hints import Pin
from moe.sharding.placement import Placements
from moe.sharding.plan_records import in_words
from moe.sharding.propagation.propagate import Propagation
from moe.sharding.rules.registry import Rules
from moe.sharding.sharding_plan import ShardingPlan
from moe.sharding.solve.accumulate import Loop, loop_of, pins_in_loop
from moe.sharding.solve.bound import bound_by
from moe.sharding.solve.costs import Costs
from moe.sharding.solve.placements import PlacementProgram
from moe.sharding.solve.recompute import with_recomputed_pins
from moe.sharding.solve.solution import MemoryLimits
from moe.spec import SpecError

_MEMORY_MULTIPLES = (2.0, 4.0, 8.0, 16.0, float("inf"))
"""Multiples of the device's memory that are tried in turn if no program fits."""


def program_of_other_call(
    skeleton: nn.Module,
    batch: Sequence[Any],
    loss: Callable[[Any], Tensor] | None,
    plan: ShardingPlan,
    replicate: Sequence[str],
    placements: Mapping[str, Placements],
) -> CallableProgram:
    """The program of a module, in its current mode, for a batch. A batch that does not fit as a whole is split into the
    plan's micro-batches; if that is not possible, the program exceeds the memory limit as little as possible. The
    plan's hints apply. A collective: rank 0 solves."""
    captured_graph = capture(skeleton, batch, loss, device_of(plan.cluster))
    hint_pins = prepare(captured_graph, plan).pins(plan.mesh)
    rules = Rules(replicate, captured_graph.parts, plan.mesh)
    fields = json_collectives.broadcast_from_rank0(
        lambda: _choose_placements(captured_graph, plan, replicate, rules, placements, hint_pins)
    )
    call_plan = replace(
        plan, parameters={name: in_words(tensor_placements) for name, tensor_placements in placements.items()}, **fields
    )
    return make_callable(captured_graph, write_program(captured_graph, call_plan, rules), call_plan, batch)


def _choose_placements(
    captured_graph: CapturedGraph,
    plan: ShardingPlan,
    replicate: Sequence[str],
    rules: Rules,
    placements: Mapping[str, Placements],
    hint_pins: Mapping[str, Pin],
) -> dict[str, Any]:
    """Fields of the plan for this graph, in which hints request `hint_pins`."""
    pins = dict(hint_pins) | {
        node.name: placements[leaf.name]
        for node, leaf in captured_graph.leaves.items()
        if leaf.kind in ("parameter", "buffer")
    }
    propagated_hints = None
    if hint_pins:
        degrees = tuple(plan.mesh.values())
        propagation = Propagation(captured_graph, rules, degrees, with_recomputed_pins(captured_graph, hint_pins), {})
        propagated_hints = propagation.run()
    slots = plan.memory.optimizer / plan.memory.gradients if plan.memory.gradients else 0.0
    for times, count, loop in _ways(captured_graph, plan, replicate):
        room = max(1.0, plan.cluster.memory_bytes * times - captured_graph.input_bytes)
        costs = Costs(plan.cluster, plan.degrees if loop is None else (count, *plan.degrees), loop)
        pins = with_recomputed_pins(captured_graph, pins)
        loop_pins = pins if loop is None else pins_in_loop(pins)
        requirements = (
            {}
            if propagated_hints is None
            else bound_by(captured_graph, propagated_hints, rules, hint_pins, in_loop=loop is not None)
        )
        solution = PlacementProgram(
            captured_graph, costs, rules, MemoryLimits(room, slots), loop_pins, bound=requirements
        ).solve()
        if solution is not None:
            options, kept_tensors = (solution.assignment.options.items(), sorted(solution.assignment.kept_tensors))
            return {
                "options": {name: [option.name for option in axis_options] for name, axis_options in options},
                "kept": [(name, in_words(tensor_placements)) for name, tensor_placements in kept_tensors],
                "micro_batches": count,
            }
    raise AssertionError("a program exists when memory has no limit")


def _ways(
    captured_graph: CapturedGraph, plan: ShardingPlan, replicate: Sequence[str]
) -> Iterator[tuple[float, int, Loop | None]]:
    """(multiple of the memory that may be used, number of micro-batches, loop over them), the best first."""
    yield 1.0, 1, None
    if plan.micro_batches > 1:
        try:
            loop = loop_of(captured_graph, Rules(replicate), plan.micro_batches)
        except SpecError:
            pass  # the results in this mode need the whole batch at once
        else:
            yield 1.0, plan.micro_batches, loop
    yield from ((times, 1, None) for times in _MEMORY_MULTIPLES)


def without_values(model: nn.Module) -> nn.Module:
    """A copy of a model on the meta device. Objects that cannot be copied, such as a lock or an open file, are
    shared."""
    memo: dict[int, Any] = {
        id(tensor): nn.Parameter(torch.empty_like(tensor, device="meta"), tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else torch.empty_like(tensor, device="meta")
        for tensor in tensors_of(model).values()
    }
    modules = list(model.modules())
    for module in modules:
        memo[id(module)] = type(module).__new__(type(module))
    for module in modules:
        vars(memo[id(module)]).update({name: _copy(value, memo) for name, value in vars(module).items()})
    return memo[id(model)]


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    """A deep copy, with copies of the objects in `memo` taken from there; the value itself if it cannot be copied."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    copies: dict[int, Any] = {}
    try:
        result = copy.deepcopy(value, ChainMap(copies, memo))  # type: ignore[arg-type]
    except Exception:  # a user's class may raise anything; a partial copy is in `copies` only
        if type(value) not in (list, tuple, dict):
            return value
        if type(value) is dict:
            return {key: _copy(element, memo) for key, element in value.items()}
        return type(value)(_copy(element, memo) for element in value)
    memo.update(copies)
    return result
