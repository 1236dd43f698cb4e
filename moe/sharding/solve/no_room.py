"""A model that does not fit, in words: the hints that are in the way, or the smallest cluster that would do."""

from collections.abc import Iterator, Mapping

from moe.plan.cluster.cluster import Cluster
from moe.sharding.explain.explain import in_bytes
from moe.sharding.hints.hints import Devices
from moe.sharding.rules.registry import Rules
from moe.sharding.solve.asked import Subject
from moe.sharding.solve.candidates import meshes
from moe.sharding.solve.classes import classes
from moe.sharding.solve.costs import Costs
from moe.sharding.solve.recompute import with_again
from moe.sharding.solve.search import Search
from moe.spec import Problem, SpecError

LARGEST_CLUSTER = 1 << 14

Mesh = Mapping[str, int]


def no_room(of: Subject) -> SpecError:
    """Of a subject that no plan fits."""
    cluster = of.asked.cluster
    if of.limits.memory_bytes <= 0:
        whole = in_bytes(cluster.memory_bytes - of.limits.memory_bytes)
        why = f"the batch, which lies whole on each device, takes {whole} of its {in_bytes(cluster.memory_bytes)}"
        return _of_cluster(cluster, why, "a smaller batch")
    room = in_bytes(of.limits.memory_bytes)
    if needed := _hints_in_the_way(of):
        dropped = "one of them" if len(needed) > 1 else "it"
        return SpecError(Problem(" and ".join(needed), None,
                                 f"cannot be had: with that no plan fits in the memory of a device (={room})",
                                 f"drop {dropped}, or use devices with more memory"))  # fmt: skip
    return _of_cluster(cluster, f"no plan fits in {room} a device", _larger(of))


def _of_cluster(cluster: Cluster, why: str, remedy: str) -> SpecError:
    return SpecError(Problem("cluster", f"{cluster.num_devices} x {cluster.device}",
                             f"has no room for the model: {why}", f"use {remedy}"))  # fmt: skip


def _hints_in_the_way(of: Subject) -> list[str]:
    """Fewest hints, with their values, that together leave no room: each is dropped where the rest still does."""
    cluster, mesh = of.asked.cluster, of.asked.mesh
    said = {wish.said: wish.hint for wish in of.found.wishes}
    if not said or not _fits_some(of, cluster, mesh, frozenset(said)):
        return []
    needed = set(said)
    for each in said:
        if not _fits_some(of, cluster, mesh, frozenset(set(said) - (needed - {each}))):
            needed.discard(each)
    return [f"{each} (={said[each]})" for each in sorted(needed)]


def _larger(of: Subject) -> str:
    """The first cluster of the kind that has room, doubled and doubled again; where there is none, what else."""
    others = "devices with more memory, or a smaller batch"
    if any(isinstance(wish.hint, Devices) for wish in of.found.wishes):
        return f"{others}: hints that name devices are of this cluster alone"
    cluster, devices = of.asked.cluster, of.asked.cluster.num_devices
    while devices < LARGEST_CLUSTER:
        devices *= 2
        larger = cluster.of(devices)
        for mesh in _grown(of.asked.mesh, devices // cluster.num_devices):
            if _fits_some(of, larger, mesh):
                how = "" if mesh is None else f" and mesh={dict(mesh)}"
                return f"{devices} devices{how}: doubled, the first cluster of this kind that has"
    grown = "" if of.asked.mesh is None else ", one axis as much longer,"
    return f"{others}: no cluster of this kind{grown} has room, up to {LARGEST_CLUSTER:,} devices"


def _grown(mesh: Mesh | None, times: int) -> Iterator[Mesh | None]:
    """A mesh that was given, with one axis so many times as long."""
    if mesh is None:
        yield None
    for axis in mesh or ():
        yield {name: size * (times if name == axis else 1) for name, size in (mesh or {}).items()}


def _fits_some(of: Subject, on: Cluster, mesh: Mesh | None, without: frozenset[str] = frozenset()) -> bool:
    return any(_fits(of, on, degrees, without) for degrees in meshes(on, mesh, of.found.axes))


def _fits(of: Subject, on: Cluster, degrees: Mesh, without: frozenset[str]) -> bool:
    captured = of.captured
    costs = Costs(on, tuple(degrees.values()))
    pins = with_again(captured, of.found.pins(degrees, without))
    rules = Rules(of.asked.replicate, captured.parts, degrees)
    try:
        return Search(captured, costs, rules, of.limits, pins, classes(captured, pins)).best() is not None
    except SpecError:  # a part done by hand, whose sizes such a mesh does not divide
        return False
