"""Descriptions of plans as text."""

import math
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from moe.sharding import placement
from moe.sharding.explain.name_patterns import Fold, fold_names
from moe.sharding.plan_records import Collective, StoredTensor, parse_placements

Plan = Any
"""A `ShardingPlan`, whose module imports this one."""

WIDTH = 100
"""Width of the text in columns."""
_BAR = 24
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_KINDS = {
    "gather": "all-gather", "reduce_scatter": "reduce-scatter", "all_reduce": "all-reduce", "all_to_all": "all-to-all",
    "halo": "halo exchange", "ring": "ring",
}  # fmt: skip
_MEMORY = {
    "parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer state", "buffers": "buffers",
    "kept": "kept for the backward pass", "inputs": "batch", "largest_operator": "largest operator",
}  # fmt: skip


def in_bytes(num_bytes: float) -> str:
    """Bytes as text: `1.5 GiB`."""
    unit = 0
    while num_bytes >= 999.5 and unit < len(_UNITS) - 1:
        num_bytes, unit = num_bytes / 1024, unit + 1
    return f"{num_bytes:.0f} {_UNITS[unit]}" if unit == 0 else f"{num_bytes:.3g} {_UNITS[unit]}"


def in_seconds(seconds: float) -> str:
    """Seconds as text: `12.3 ms`."""
    for size, unit in ((1, "s"), (1e-3, "ms")):
        if seconds >= 0.9995 * size:
            return f"{seconds / size:,.0f} {unit}" if seconds >= 100 * size else f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def kind_in_words(kind: str) -> str:
    return _KINDS.get(kind, kind.replace("_", " "))


def memory_in_words(plan: Plan) -> list[tuple[str, int]]:
    """(kind of memory, bytes), without kinds that take none."""
    return [(_MEMORY.get(name, name), size) for name, size in asdict(plan.memory).items() if size]


def mesh_in_words(mesh: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {degree}" for axis, degree in mesh.items())


def placed_in_words(placements: str, axes: Iterable[str]) -> str:
    """Placements as text: `dimension 0 over expert` for `R S(0)`."""
    phrases = []
    for axis_placement, axis in zip(parse_placements(placements), axes, strict=True):
        if axis_placement.dim is not None:
            phrases.append(f"dimension {axis_placement.dim} over {axis}")
        elif axis_placement.combine is not None:
            phrases.append(f"partial {axis_placement.combine} over {axis}")
    return ", ".join(phrases) or "whole on every rank"


def shape_in_words(shape: Sequence[int], placements: str, axes: Sequence[str]) -> str:
    """Shape as text, with the axes that split each dimension: `[128/expert, 1024]`."""
    sizes = [str(size) for size in shape]
    for axis_placement, axis in zip(parse_placements(placements), axes, strict=True):
        if axis_placement.dim is not None:
            sizes[axis_placement.dim] += f"/{axis}"
    return f"[{', '.join(sizes)}]"


def part_bytes(plan: Plan, tensor: StoredTensor) -> int:
    """Bytes of one rank's part, padded."""
    placements = parse_placements(plan.parameters[tensor.name])
    return placement.part_bytes(tensor.shape, _ITEM_BYTES.get(tensor.dtype, 4), placements, plan.degrees)


_ITEM_BYTES = {
    "float64": 8, "int64": 8, "complex64": 8, "complex128": 16, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2,
    "int16": 2, "uint8": 1, "int8": 1, "bool": 1,
}  # fmt: skip


def folds_of(plan: Plan) -> list[Fold]:
    """Parameters and buffers in the order in which they are used, with repeated ones folded."""
    return fold_names({
        entry.name: (plan.parameters[entry.name], tuple(entry.shape), entry.dtype, entry.kind) for entry in plan.stored
    })  # fmt: skip


def explain_plan(plan: Plan) -> str:
    """Description of a plan for people: mesh, time, memory, placements, the collectives of a step with the user's
    lines, and the candidates."""
    parts = [_summary(plan), _hints(plan), _placements(plan), _annotations(plan), _collectives(plan), _memory(plan),
             _candidates(plan)]  # fmt: skip
    return "\n\n".join("\n".join(lines) for lines in map(list, parts) if lines)


def _table(
    rows: Sequence[Sequence[str]], right: Iterable[int] = (), max_widths: Mapping[int, int] | None = None
) -> list[str]:
    """Lines with aligned columns. Columns in `right` are right-aligned; cells longer than `max_widths` are cut at their
    beginnings."""
    right, max_widths = set(right), max_widths or {}
    cut_rows = [[_end(cell, max_widths.get(index, len(cell))) for index, cell in enumerate(row)] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cut_rows, strict=True)]
    lines = (
        "  ".join(cell.rjust(width) if index in right else cell.ljust(width)
                  for index, (cell, width) in enumerate(zip(row, widths, strict=True)))
        for row in cut_rows
    )  # fmt: skip
    return [f"  {line.rstrip()}" for line in lines]


def _end(text: str, max_width: int) -> str:
    """Text of at most `max_width` characters: the beginning of its last word is left out, of a path up to a slash."""
    if len(text) <= max_width:
        return text
    head, space, tail = text.rpartition(" ")
    end = tail[len(text) - max_width + 1 :]
    return head + space + "…" + (end[end.index("/") :] if "/" in end else end)


def _summary(plan: Plan) -> Iterator[str]:
    cluster = plan.cluster
    yield f"mesh        {mesh_in_words(plan.mesh)} on {plan.num_devices:,} x {cluster.device}"
    if plan.devices:
        yield f"            devices in the order {', '.join(map(str, plan.devices))}"
    for axis, stride in zip(plan.mesh, _strides(plan.degrees), strict=True):
        if len(plan.mesh) > 1:
            spacing = "consecutive ranks" if stride == 1 else f"ranks {stride} apart"
            yield f"            {axis}: {spacing}"
    yield f"step        {in_seconds(plan.step_s)} predicted, {_gap(plan)}"
    if plan.micro_batches > 1:
        yield f"batch       in {plan.micro_batches} micro-batches, one after the other"
    if plan.recompute:
        yield "recompute   whole blocks, in the backward pass"
    share = plan.memory.total / cluster.memory_bytes
    yield f"memory      {in_bytes(plan.memory.total)} on each rank predicted, {_share(share)} of a device"
    parameters = [parameter for parameter in plan.stored if parameter.kind == "parameter"]
    count = sum(math.prod(parameter.shape) for parameter in parameters)
    num_bytes = sum(part_bytes(plan, parameter) for parameter in parameters)
    yield f"parameters  {count:,} in {len(parameters)} tensors, {in_bytes(num_bytes)} on each rank"
    moved_bytes = sum(collective.num_bytes for collective in plan.collectives)
    exchanges = "1 collective" if len(plan.collectives) == 1 else f"{len(plan.collectives)} collectives"
    yield f"exchanged   {in_bytes(moved_bytes)} by each rank in {exchanges} of a step"


def _share(share: float) -> str:
    return f"{share:.0%}" if share >= 0.005 or share == 0 else "less than 1%"


def _strides(degrees: Sequence[int]) -> list[int]:
    return [math.prod(degrees[axis + 1 :]) for axis in range(len(degrees))]


def _gap(plan: Plan) -> str:
    excess = plan.step_s / plan.relaxed_s - 1 if plan.relaxed_s > 0 else 0.0
    if excess < 5e-4:
        return "as low as the bound of the relaxed program"
    return f"{excess:.1%} above the bound of the relaxed program ({in_seconds(plan.relaxed_s)})"


def _hints(plan: Plan) -> Iterator[str]:
    if plan.hints:
        yield "hints"
        yield from _table([(name, str(hint)) for name, hint in _sort_by_line(plan.hints)])
    if plan.conflicts:
        yield "where hints meet that cannot both be followed"
        for conflict in plan.conflicts:
            yield from textwrap.wrap(
                conflict, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
            )


def _sort_by_line(entries: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Entries sorted by the files and lines in their keys."""
    return sorted(entries.items(), key=lambda entry: [(int(part or 0), part) if part.isdigit() else (-1, part)
                                                      for part in re.split(r"(\d+)", entry[0])])  # fmt: skip


def _placements(plan: Plan) -> Iterator[str]:
    axes, stored = list(plan.mesh), {entry.name: entry for entry in plan.stored}
    cuts = [f"{size}/{axis}" for entry in plan.stored for size, axis in _cuts(plan, entry)]
    yield (f"placements ({cuts[0]}: cut along that axis; the rest is whole)" if cuts else "placements (all is whole)")
    rows = []
    for fold in folds_of(plan):
        first = stored[fold.names[0]]
        placements = plan.parameters[first.name]
        kind = "" if first.kind == "parameter" else first.kind
        num_bytes = sum(part_bytes(plan, stored[name]) for name in fold.names)
        rows.append((str(fold), shape_in_words(first.shape, placements, axes), in_bytes(num_bytes), kind))
    yield from _table(rows, right={2}) if rows else ["  no parameters"]


def _cuts(plan: Plan, entry: StoredTensor) -> Iterator[tuple[int, str]]:
    for axis_placement, axis in zip(parse_placements(plan.parameters[entry.name]), plan.mesh, strict=True):
        if axis_placement.dim is not None:
            yield entry.shape[axis_placement.dim], axis


def _annotations(plan: Plan) -> Iterator[str]:
    if not plan.annotated:
        return
    yield "annotated tensors"
    axes = list(plan.mesh)
    rows = [(place, placed_in_words(placements, axes)) for place, placements in _sort_by_line(plan.annotated)]
    yield from _table(rows, max_widths={0: WIDTH - 4 - max(len(words) for _, words in rows)})


def _collectives(plan: Plan) -> Iterator[str]:
    yield "collectives of a step (bytes that each rank gives; of an all-gather, that it is given)"
    if not plan.collectives:
        yield "  none"
        return
    rows: list[tuple[str, ...]] = [("", "over", "times", "each", "total", "of", "line")]
    phase = ""
    for collectives, tensors in _groups(plan.collectives):
        first, total = collectives[0], sum(collective.num_bytes for collective in collectives)
        if first.phase != phase:
            phase = first.phase
            rows.append((phase, *[""] * 6))
        sizes = {collective.num_bytes for collective in collectives}
        size = in_bytes(sizes.pop()) if len(sizes) == 1 else "various"
        rows.append((f"  {kind_in_words(first.kind)}", first.axis, f"{len(collectives):,}", size, in_bytes(total),
                     tensors, first.where or ""))  # fmt: skip
    *other_widths, tensor_width, line_width = (max(map(len, column)) for column in zip(*rows, strict=True))
    available = WIDTH - 2 - sum(other_widths) - 2 * 6
    tensor_width = min(tensor_width, max(available - line_width, available // 2))
    yield from _table(rows, right={2, 3, 4}, max_widths={5: tensor_width, 6: available - tensor_width})
    yield from _totals(plan)


def _groups(collectives: Sequence[Collective]) -> Iterator[tuple[list[Collective], str]]:
    """(collectives that differ only in the layer, the names of their tensors or modules as a pattern)."""
    groups: dict[tuple[Any, ...], list[Collective]] = defaultdict(list)
    for collective in collectives:
        subject = collective.tensor if "." in collective.tensor else collective.block or ""
        pattern = fold_names(dict.fromkeys((subject, *_differing_names(subject)), ""))[0].pattern
        groups[collective.phase, collective.kind, collective.axis, collective.where, pattern].append(collective)
    for members in groups.values():
        names = dict.fromkeys(_subject(collective) for collective in members)
        folds = fold_names(dict.fromkeys(names, ""))
        yield members, ", ".join(fold.pattern for fold in folds)


def _differing_names(name: str) -> list[str]:
    """The same name with every number changed, so that all numbers are folded."""
    return [".".join(f"{part}0" if part.isdigit() else part for part in name.split("."))]


def _subject(collective: Collective) -> str:
    """Subject of a collective: a parameter or gradient by name, else the module that it is for."""
    if "." in collective.tensor:
        return collective.tensor.replace("gradient of", "grad")
    return f"in {collective.block}" if collective.block else "in the module itself"


def _totals(plan: Plan) -> Iterator[str]:
    totals: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for collective in plan.collectives:
        totals[collective.kind][collective.phase].append(collective.num_bytes)
    rows: list[tuple[str, ...]] = [("", "times", "forward", "backward", "total")]
    for kind, by_phase in totals.items():
        rows.append(_total(kind_in_words(kind), by_phase["forward"], by_phase["backward"]))
    if len(totals) > 1:
        phases = ("forward", "backward")
        rows.append(
            _total(
                "all",
                *(
                    [collective.num_bytes for collective in plan.collectives if collective.phase == phase]
                    for phase in phases
                ),
            )
        )
    yield ""
    yield "in all"
    yield from _table(rows, right={1, 2, 3, 4})


def _total(label: str, forward: Sequence[int], backward: Sequence[int]) -> tuple[str, ...]:
    sums = sum(forward), sum(backward), sum(forward) + sum(backward)
    return (
        label,
        f"{len(forward) + len(backward):,}",
        *(in_bytes(num_bytes) if num_bytes else "" for num_bytes in sums),
    )


def _memory(plan: Plan) -> Iterator[str]:
    yield "memory on each rank, predicted"
    total = plan.memory.total or 1
    rows = [
        (name, in_bytes(size), f"{size / total:.0%}", "█" * round(_BAR * size / total))
        for name, size in memory_in_words(plan)
    ]
    yield from _table([*rows, ("total", in_bytes(plan.memory.total), "", "")], right={1, 2})


def _candidates(plan: Plan) -> Iterator[str]:
    if not plan.considered:
        return
    yield "considered"
    rows = []
    for candidate in plan.considered:
        times = f"{candidate.micro_batches} micro-batches" if candidate.micro_batches > 1 else ""
        times += (", " if times else "") + "recompute" if candidate.recompute else ""
        cost = (
            ("does not fit", "")
            if candidate.step_s is None
            else (in_seconds(candidate.step_s), in_bytes(candidate.memory_bytes or 0))
        )
        key = plan.mesh, plan.micro_batches, plan.recompute, plan.layout
        is_this = (candidate.mesh, candidate.micro_batches, candidate.recompute, candidate.layout) == key
        rows.append((mesh_in_words(candidate.mesh), candidate.layout, times, *cost, "this plan" if is_this else ""))
    yield from _table(rows, right={3, 4})
