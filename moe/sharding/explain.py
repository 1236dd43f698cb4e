"""Plans in words."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def in_bytes(num_bytes: float) -> str:
    """`1.5 GiB`."""
    unit = 0
    while num_bytes >= 1024 and unit < len(_UNITS) - 1:
        num_bytes, unit = num_bytes / 1024, unit + 1
    return f"{num_bytes:.0f} {_UNITS[unit]}" if unit == 0 else f"{num_bytes:.3g} {_UNITS[unit]}"


def explained(plan: Any) -> str:
    """A `ShardingPlan` for a person: mesh, placements, collectives with the user's lines, memory, time, what was
    considered."""
    lines = [f"mesh        {_mesh(plan.mesh)} on {plan.cluster.num_devices} x {plan.cluster.device}",
             f"step        {_time(plan.step_s)} predicted: arithmetic, memory and exchanges"]  # fmt: skip
    lines.append(f"memory      {in_bytes(plan.memory.total)} a device predicted: " + ", ".join(
        f"{name.replace('_', ' ')} {in_bytes(size)}" for name, size in vars(plan.memory).items() if size))  # fmt: skip
    if plan.micro_batches > 1:
        lines.append(f"batch       in {plan.micro_batches} micro-batches, one after the other")
    axes = list(plan.mesh)
    lines += ["", "placements"]
    by_placement: dict[str, list[str]] = defaultdict(list)
    for name, placements in plan.parameters.items():
        by_placement[placed_in_words(placements, axes)].append(name)
    for words, names in by_placement.items():
        lines += [f"  {words}", *(f"    {each}" for each in _shortened(names))]
    if plan.annotated:
        lines += ["", "annotated tensors"]
        lines += [f"  {place}: {placed_in_words(found, axes)}" for place, found in plan.annotated.items()]
    lines += ["", "collectives of a step, on each rank"]
    if not plan.collectives:
        lines.append("  none")
    totals: dict[tuple[str, str, str, str], list[int]] = defaultdict(list)
    for each in plan.collectives:
        totals[each.phase, each.kind, each.axis, each.where or "?"].append(each.num_bytes)
    for (phase, kind, axis, where), sizes in totals.items():
        times = f"{len(sizes)} x " if len(sizes) > 1 else ""
        lines.append(f"  {phase:8}  {kind:14}  over {axis:8}  {times}{in_bytes(sum(sizes)):>9}  {where}")
    lines += ["", "considered"]
    for each in plan.considered:
        cost = (
            "does not fit" if each.step_s is None else f"{_time(each.step_s)}, {in_bytes(each.memory_bytes)}"
        )
        times = f", {each.micro_batches} micro-batches" if each.micro_batches > 1 else ""
        lines.append(f"  {_mesh(each.mesh)}{times}: {cost}")
    return "\n".join(lines)


def placed_in_words(placements: str, axes: Iterable[str]) -> str:
    """`dimension 0 over expert`, for `R S(0)`."""
    said = [
        f"dimension {each[2:-1]} over {axis}" if each.startswith("S") else f"partial {each[2:-1]} over {axis}"
        for each, axis in zip(placements.split(), axes, strict=True)
        if each != "R"
    ]
    return ", ".join(said) or "whole on every rank"


def _mesh(mesh: dict[str, int]) -> str:
    return " x ".join(f"{axis} {degree}" for axis, degree in mesh.items())


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _shortened(names: list[str], most: int = 12) -> list[str]:
    return names if len(names) <= most else [*names[:most], f"and {len(names) - most} more"]
