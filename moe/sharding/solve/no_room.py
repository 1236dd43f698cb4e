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
IN_TURN = 8
"""Number of cluster sizes tried one by one, smallest first. After these, sizes are doubled, then bisected."""

Mesh = Mapping[str, int]


def no_room(subject: CapturedRequest) -> SpecError:
    """The error for a subject for which no plan fits in memory."""
    cluster = subject.request.cluster
    if subject.limits.memory_bytes <= 0:
        whole = in_bytes(subject.capture.input_bytes)
        why = f"the batch, stored whole on each device, takes {whole} of {in_bytes(cluster.memory_bytes)}"
        return _of_cluster(cluster, why, "a smaller batch")
    room = in_bytes(subject.limits.memory_bytes)
    if hints := _hints_in_the_way(subject):
        return SpecError([_of_hint(name, hint, [other for other in hints if other != name], room)
                          for name, hint in hints.items()])  # fmt: skip
    return _of_cluster(cluster, f"no plan fits in {room} per device", _larger(subject))


def _of_cluster(cluster: Cluster, why: str, remedy: str) -> SpecError:
    return spec_error("does_not_fit", "cluster", f"{cluster.num_devices} x {cluster.device}",
                      f"is too small for the model: {why}", f"use {remedy}")  # fmt: skip


def _of_hint(name: str, hint: str, others: Sequence[str], room: str) -> Problem:
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

    for enough in range(too_few + 1, min(too_few + IN_TURN, max_units) + 1):
        if with_room(enough):
            return f"{with_room(enough)}, the smallest such cluster that fits"
    enough = too_few = too_few + IN_TURN
    while enough < max_units:
        too_few, enough = enough, min(2 * enough, max_units)
        if with_room(enough):
            between = range(too_few + 1, enough)
            enough = too_few + 1 + bisect_left(between, True, key=lambda units: with_room(units) is not None)
            less = (enough - 1) * unit
            return f"{with_room(enough)}, which fits ({less} devices do not)"
    qualifier = "" if mesh is None else " with one longer axis"
    return f"{alternatives}: no such cluster{qualifier} fits, up to {LARGEST_CLUSTER:,} devices"


def _with_room(request: ShardingRequest, num_devices: int) -> str | None:
    """Description of a cluster with this number of devices, and of its mesh if one was given; None if no plan fits."""
    cluster, mesh = request.cluster, request.mesh
    request.progress.at(f"no plan fits; trying {num_devices} devices")
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


def _fits(request: ShardingRequest, without: frozenset[str] = frozenset()) -> bool:
    try:
        return has_room(capture_request(request, without))
    except SpecError:  # of this mesh alone: a part done by hand, whose sizes it does not divide
        return False
