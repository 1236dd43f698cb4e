"""The fastest way to lay a module out and to run its step, of all that are looked at."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moe.sharding.planned import Considered
from moe.sharding.propagation.propagate import Propagated, Propagation
from moe.sharding.rules.registry import Rules
from moe.sharding.solve.accumulate import Loop, classes_of, in_loop, pins_in_loop
from moe.sharding.solve.bound import Bound, bound_by
from moe.sharding.solve.candidates import meshes, runs
from moe.sharding.solve.classes import classes
from moe.sharding.solve.costs import Costs
from moe.sharding.solve.recompute import with_again
from moe.sharding.solve.search import Search
from moe.sharding.solve.solved import Solved
from moe.sharding.solve.subject import Subject


@dataclass(frozen=True, eq=False)
class Way:
    """A plan within one mesh, one number of micro-batches, with or without recomputation."""

    solved: Solved
    degrees: dict[str, int]
    costs: Costs
    rules: Rules
    followed: Propagated | None
    count: int
    again: bool
    devices: tuple[int, ...]
    """Device at each place of the mesh."""


def best_way(of: Subject) -> tuple[Way | None, list[Considered]]:
    """(the fastest on any mesh that has room, in the fewest micro-batches with which one has; all that was looked at).
    The captured graph may be changed: a subject is good for one search."""
    best: Way | None = None
    considered: list[Considered] = []
    on = _meshes(of)
    for again, (count, loop) in _runs(of):
        for degrees in on:
            of.asked.progress.at(_in_words(degrees, count, again, best))
            way = _on_mesh(of, degrees, loop, count=count, again=again)
            used = None if way is None else int(way.solved.memory_bytes) + of.captured.input_bytes
            seconds = None if way is None else way.solved.seconds
            considered.append(Considered(degrees, seconds, used, count, again))
            if way is not None and (best is None or way.solved.seconds < best.solved.seconds):
                best = way
        if best is not None:
            break
    return best, considered


def _in_words(degrees: Mapping[str, int], count: int, again: bool, best: Way | None) -> str:
    parts = [f"mesh {dict(degrees)}", f"{count} micro-batch{'es' * (count > 1)}"]
    if again:
        parts.append("blocks computed again")
    if best is not None:
        parts.append(f"best step so far {1e3 * best.solved.seconds:.3g} ms")
    return ", ".join(parts)


def has_room(of: Subject) -> bool:
    """Whether there is a best way, without looking further than for a first. The captured graph may be changed."""
    if least_bytes(of) > of.limits.memory_bytes * of.asked.cluster.num_devices:
        return False
    return any(
        _on_mesh(of, degrees, loop, count=count, again=again, first=True) is not None
        for again, (count, loop) in _runs(of)
        for degrees in _meshes(of)
    )


def _meshes(of: Subject) -> list[dict[str, int]]:
    mesh, arrays = of.asked.mesh, of.found.mesh_of_arrays()
    if mesh is None and arrays is not None and math.prod(arrays.values()) == of.asked.cluster.num_devices:
        mesh = arrays
    return list(meshes(of.asked.cluster, mesh, of.found.axes))


def _runs(of: Subject) -> Iterator[tuple[bool, tuple[int, Loop | None]]]:
    asked = of.asked
    return runs(of.captured, Rules(asked.replicate), asked.micro_batches, asked.recompute)


def least_bytes(of: Subject) -> float:
    """Bytes that all devices together hold at the least: each parameter once, with its gradient and optimizer state."""
    captured, trained = of.captured, 2 + of.limits.optimizer_slots
    return sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize * (trained if leaf.name in captured.gradients else 1)
        for leaf in captured.leaves.values()
        if leaf.kind == "parameter"
    )


def _on_mesh(
    of: Subject, degrees: dict[str, int], loop: Loop | None, *, count: int, again: bool, first: bool = False
) -> Way | None:
    """The fastest on one mesh, or the first that is found; None where it has no room."""
    asked, captured, found = of.asked, of.captured, of.found
    devices = found.devices(degrees, of.without)
    pins = with_again(captured, found.pins(degrees, of.without))
    rules = Rules(asked.replicate, captured.parts, degrees)
    followed = None
    if found.wishes or not asked.search:
        said = {wish.node.name: wish.said for wish in found.wishes}
        followed = Propagation(captured, rules, tuple(degrees.values()), pins, said).propagated()
    begin = [] if followed is None else [followed.assignment]
    bound: Bound = {}
    if followed is not None and asked.search:
        bound = bound_by(captured, followed, rules, pins, in_loop=loop is not None)
    alike: Mapping[str, Any] = pins
    if loop is not None:
        pins = pins_in_loop(pins)
        begin, alike = [in_loop(each, loop, count) for each in begin], classes_of(loop, pins)
    costs = Costs(asked.cluster, (*([] if loop is None else [count]), *degrees.values()), loop)
    inner = Search(
        captured, costs, rules, of.limits, pins, classes(captured, alike) if asked.search else None, bound
    )
    solved = inner.best(begin, first=first) if asked.search else inner.priced(*begin)
    return None if solved is None else Way(solved, degrees, costs, rules, followed, count, again, devices)
