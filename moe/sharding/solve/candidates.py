"""Candidates among which a plan is chosen: meshes, numbers of micro-batches, with or without recomputation."""

import math
from collections.abc import Iterator, Mapping

from moe.plan.cluster.cluster import Cluster
from moe.sharding.capture.capture import CapturedGraph
from moe.sharding.rules.registry import Rules
from moe.sharding.solve.accumulate import Loop, loop_of
from moe.sharding.solve.recompute import recompute_blocks
from moe.spec import Problem, SpecError

MOST_MICRO_BATCHES = 64


def meshes(cluster: Cluster, mesh: Mapping[str, int] | None, axis_names: tuple[str, ...]) -> Iterator[dict[str, int]]:
    """At most two meshes for any number of devices: one axis, and two axes. The inner of two axes is the devices of a
    node; within one node the two axes are as close to a square as possible."""
    total = cluster.num_devices
    if mesh is not None:
        if math.prod(mesh.values()) != total:
            raise SpecError(
                Problem(
                    "mismatch",
                    "mesh",
                    dict(mesh),
                    f"must have sizes that multiply to all devices (={total})",
                    "correct them",
                )
            )
        yield dict(mesh)
        return
    if len(axis_names) > 2:
        raise SpecError(
            Problem(
                "missing",
                "hints",
                ", ".join(axis_names),
                "name more than two mesh axes, whose sizes nothing says",
                "give plan(mesh={name: size}), or name one or two",
            )
        )
    inner = cluster.devices_per_node
    if cluster.num_nodes == 1 or inner == 1:
        inner = next((d for d in range(math.isqrt(total), 1, -1) if total % d == 0), 1)
    if len(axis_names) < 2:
        yield {axis_names[0] if axis_names else "devices": total}
    if 1 < inner < total:
        outer_name, inner_name = (
            axis_names if len(axis_names) == 2 else ("outer", axis_names[0] if axis_names else "inner")
        )
        yield {outer_name: total // inner, inner_name: inner}
    elif len(axis_names) == 2:
        yield {axis_names[0]: 1, axis_names[1]: total}


def runs(
    capture: CapturedGraph, rules: Rules, micro_batches: int | None, recompute: bool | None
) -> Iterator[tuple[bool, tuple[int, Loop | None]]]:
    """(whether blocks are recomputed, (number of micro-batches, its loop)). When the first run with recomputation is
    returned, the captured graph has been changed to recompute. Raises SpecError if the request is not possible."""
    if not recompute:
        yield from ((False, loop) for loop in _loops(capture, rules, micro_batches))
    if recompute is False:
        return
    if recompute_blocks(capture):
        yield from ((True, loop) for loop in _loops(capture, rules, micro_batches))
    elif recompute:
        raise SpecError(
            Problem(
                "requires",
                "recompute",
                True,
                "needs blocks: modules in a list, of whose values the backward pass needs some",
                "put layers into an nn.ModuleList, or omit it",
            )
        )


def _loops(capture: CapturedGraph, rules: Rules, micro_batches: int | None) -> Iterator[tuple[int, Loop | None]]:
    """Numbers of micro-batches, each with its loop. Raises SpecError if the requested number is not possible."""
    if micro_batches in (None, 1):
        yield 1, None
    elif micro_batches is not None:
        yield micro_batches, loop_of(capture, rules, micro_batches)
    count = 2
    while micro_batches is None and count <= MOST_MICRO_BATCHES:
        try:
            loop = loop_of(capture, rules, count)
        except SpecError:
            return
        yield count, loop
        count *= 2
