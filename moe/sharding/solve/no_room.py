"""Problems of a model that does not fit in memory: the hints that prevent it, or the smallest cluster that has room."""

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

from moe.plan.cluster.cluster import Cluster
from moe.sharding.explain.explain import in_bytes
from moe.sharding.hints.hints import Devices
from moe.sharding.solve.captured_request import CapturedRequest, capture_request
from moe.sharding.solve.request import ShardingRequest
from moe.sharding.solve.strategies import has_room, least_bytes
from moe.spec import Problem, SpecError, spec_error

LARGEST_CLUSTER = 1 << 14
NUM_TRIED_SIZES = 8
"""Number of cluster sizes tried one by one, smallest first. After these, sizes are doubled, then bisected."""

Mesh = Mapping[str, int]


def no_room(subject: CapturedRequest) -> SpecError:
    """The error for a subject for which no plan fits in memory."""
    cluster = subject.request.cluster
    if subject.limits.memory_bytes <= 0:
        batch_bytes = in_bytes(subject.capture.input_bytes)
        reason = f"the batch, stored whole on each device, takes {batch_bytes} of {in_bytes(cluster.memory_bytes)}"
        return _cluster_error(cluster, reason, "a smaller batch")
    room = in_bytes(subject.limits.memory_bytes)
    if hints := _hints_in_the_way(subject):
        return SpecError([_hint_problem(name, hint, [hint_name for hint_name in hints if hint_name != name], room)
                          for name, hint in hints.items()])  # fmt: skip
    return _cluster_error(cluster, f"no plan fits in {room} per device", _larger(subject))


def _cluster_error(cluster: Cluster, reason: str, remedy: str) -> SpecError:
    return spec_error("does_not_fit", "cluster", f"{cluster.num_devices} x {cluster.device}",
                      f"is too small for the model: {reason}", f"use {remedy}")  # fmt: skip


def _hint_problem(name: str, hint: str, others: Sequence[str], room: str) -> Problem:
    other_hints = f" with {' and '.join(others)}" if others else ""
    rule = f"leaves no plan{other_hints} that fits in the memory of a device (={room})"
    remedy = f"drop {'one of them' if others else 'it'}, or use devices with more memory"
    return Problem("does_not_fit", name, hint, rule, remedy)


def _hints_in_the_way(subject: CapturedRequest) -> dict[str, str]:
    """A smallest set of hints, by name, with which no plan fits: a hint is left out if no plan fits without it
    either."""
    request = subject.request
    hints = {placement.origin: placement.hint for placement in subject.annotated_graph.requested_placements}
    if not hints or not _fits(request, frozenset(hints)):
        return {}
    names = set(hints)
    for name in hints:
        if not _fits(request, frozenset(set(hints) - (names - {name}))):
            names.discard(name)
    return {name: str(hints[name]) for name in sorted(names)}


def _larger(subject: CapturedRequest) -> str:
    """Remedy: the smallest cluster of the same kind that has room, in whole nodes, or, if a mesh was given, with one of
    its axes longer. If there is none, the alternatives."""
    alternatives = "devices with more memory, or a smaller batch"
    if any(isinstance(placement.hint, Devices) for placement in subject.annotated_graph.requested_placements):
        return f"{alternatives}: hints that name devices hold for this cluster only"
    cluster, mesh = subject.request.cluster, subject.request.mesh
    unit = cluster.devices_per_node if mesh is None else cluster.num_devices
    too_few = max(cluster.num_devices, math.ceil(least_bytes(subject) / subject.limits.memory_bytes) - 1) // unit
    max_units = LARGEST_CLUSTER // unit

    @cache
    def with_room(units: int) -> str | None:
        return _with_room(subject.request, units * unit)

    for enough in range(too_few + 1, min(too_few + NUM_TRIED_SIZES, max_units) + 1):
        if with_room(enough):
            return f"{with_room(enough)}, the smallest such cluster that fits"
    enough = too_few = too_few + NUM_TRIED_SIZES
    while enough < max_units:
        too_few, enough = enough, min(2 * enough, max_units)
        if with_room(enough):
            unit_counts = range(too_few + 1, enough)
            enough = too_few + 1 + bisect_left(unit_counts, True, key=lambda units: with_room(units) is not None)
            too_few_devices = (enough - 1) * unit
            return f"{with_room(enough)}, which fits ({too_few_devices} devices do not)"
    qualifier = "" if mesh is None else " with one longer axis"
    return f"{alternatives}: no such cluster{qualifier} fits, up to {LARGEST_CLUSTER:,} devices"


def _with_room(request: ShardingRequest, num_devices: int) -> str | None:
    """Description of a cluster with this number of devices, and of its mesh if one was given; None if no plan fits."""
    cluster, mesh = request.cluster, request.mesh
    request.progress.set_stage(f"no plan fits; trying {num_devices} devices")
    larger = cluster.sized_for(num_devices)
    for larger_mesh in _grow_axis(mesh, num_devices // cluster.num_devices):
        if _fits(replace(request, cluster=larger, mesh=larger_mesh)):
            nodes = f"{num_devices} devices ({larger.num_nodes} x {larger.devices_per_node})"
            return nodes + ("" if larger_mesh is None else f" and mesh={dict(larger_mesh)}")
    return None


def _grow_axis(mesh: Mesh | None, times: int) -> Iterator[Mesh | None]:
    """A given mesh with one of its axes `times` as long, for each axis."""
    if mesh is None:
        yield None
    for axis in mesh or ():
        yield {name: size * (times if name == axis else 1) for name, size in (mesh or {}).items()}


def _fits(request: ShardingRequest, ignored_hints: frozenset[str] = frozenset()) -> bool:
    try:
        return has_room(capture_request(request, ignored_hints))
    except SpecError:  # for this mesh only: it does not divide the sizes of a manual part
        return False
