"""A plan as a picture: its stages and mesh of ranks, and memory by kind, as values that a template draws as SVG."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from service.web.formats import number, size

MAX_ROWS, MAX_COLUMNS, MAX_STAGES = 8, 16, 8
"""Most ranks and stages that are drawn; more are drawn as one with their number."""
CELL, GAP, STAGE_GAP = 30, 4, 28
AXES: Mapping[str, tuple[str, str]] = {
    "expert": ("experts", "each rank has a part of every layer's experts; tokens travel to them by all-to-all"),
    "data": ("expert data", "ranks with the same experts, each with tokens of its own"),
    "expert_data": ("expert data", "ranks with the same experts, each with tokens of its own"),
    "pipeline": ("pipeline", "stages of consecutive layers, which pass activations on"),
    "tensor": ("tensor", "attention heads and dense layers are split over these ranks"),
    "context": ("context", "each sequence is split over these ranks"),
    "fsdp": ("FSDP", "parameters outside experts are sharded over these ranks, and gathered layer by layer"),
    "expert_tensor": ("expert tensor", "the hidden dimension of each expert is split over these ranks"),
    "expert_fsdp": ("expert FSDP", "each expert's parameters are sharded over these ranks"),
}
MEMORY_KINDS: Mapping[str, str] = {
    "parameters": "state-1", "gradients": "state-2", "optimizer": "state-3", "activations": "work-1",
    "workspace": "work-2", "logits": "work-3", "dispatch": "move-1", "communication": "move-2", "staging": "move-3",
}  # fmt: skip
"""Classes of colours by kind: state, work, moving."""


@dataclass(frozen=True)
class Cell:
    """One rank, or the rest of a row."""

    x: int
    y: int
    text: str
    is_rest: bool = False


@dataclass(frozen=True)
class Stage:
    x: int
    width: int
    title: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Segment:
    """Part of a bar, in thousandths of its width."""

    kind: str
    style: str
    x: float
    width: float
    amount: str


@dataclass(frozen=True)
class PlanPicture:
    width: int
    height: int
    stages: tuple[Stage, ...]
    columns: str
    rows: str
    axes: tuple[tuple[str, int, str], ...]
    """Name, degree and meaning of each axis in use."""
    memory: tuple[Segment, ...]
    memory_total: str
    memory_limit: str
    memory_share: float
    measured_memory: float | None
    """Measured bytes as a share of the limit."""
    description: str


def plan_picture(plan: Mapping[str, Any], measured_bytes: float | None) -> PlanPicture | None:
    """The picture of a plan of the API; None for one without degrees, as of a user's module."""
    degrees, memory = plan.get("degrees"), plan.get("memory")
    if not isinstance(degrees, dict) or not isinstance(memory, dict) or plan.get("module"):
        return None
    degree = {axis: int(degrees.get(axis) or 1) for axis in AXES if axis != "expert_data"}
    in_experts = degree["expert_tensor"]
    columns, rows, num_stages = degree["expert"] * in_experts, degree["data"], degree["pipeline"]
    stages = tuple(_stages(plan, num_stages, rows, columns))
    last = stages[-1]
    num_drawn_rows = min(rows, MAX_ROWS + 1)
    segments, limit = _memory(memory), max(1, int(memory.get("limit") or 1))
    total = sum(int(memory.get(kind) or 0) for kind in MEMORY_KINDS)
    axes = tuple((AXES[axis][0], size_, AXES[axis][1]) for axis, size_ in degree.items() if size_ > 1)
    mesh = ", ".join(f"{name} {number(size_)}" for name, size_, _ in axes) or "a single rank"
    return PlanPicture(
        width=last.x + last.width + 8,
        height=num_drawn_rows * (CELL + GAP) + 42,
        stages=stages,
        columns="experts, and their tensor parts" if in_experts > 1 else "experts",
        rows="expert data",
        axes=axes,
        memory=segments,
        memory_total=size(total),
        memory_limit=size(limit),
        memory_share=total / limit,
        measured_memory=None if not measured_bytes else measured_bytes / limit,
        description=f"{number(plan.get('num_workers'))} ranks: {mesh}; {size(total)} of {size(limit)} memory predicted",
    )


def _stages(plan: Mapping[str, Any], num_stages: int, rows: int, columns: int) -> Iterator[Stage]:
    options = plan.get("options") if isinstance(plan.get("options"), dict) else {}
    cuts = options.get("stages") if options else None
    num_shown = num_stages if num_stages <= MAX_STAGES else MAX_STAGES
    width = min(columns, MAX_COLUMNS + 1) * (CELL + GAP) - GAP + 16
    x = 8
    for stage in range(num_shown):
        is_rest = num_stages > MAX_STAGES and stage == num_shown - 1
        title = f"stage {stage + 1}" if num_stages > 1 else "all layers"
        if isinstance(cuts, list) and len(cuts) == num_stages:
            title += f": {cuts[stage]} layer{'' if cuts[stage] == 1 else 's'}"
        if is_rest:
            title = f"stages {stage + 1} to {num_stages}"
        first_rank = stage * rows * columns
        yield Stage(x, max(width, 8 * len(title)), title, tuple(_cells(first_rank, rows, columns)))
        x += max(width, 8 * len(title)) + STAGE_GAP


def _cells(first_rank: int, rows: int, columns: int) -> Iterator[Cell]:
    for row in range(min(rows, MAX_ROWS + 1)):
        y = row * (CELL + GAP)
        if row == MAX_ROWS:
            yield Cell(0, y, f"+{number(rows - MAX_ROWS)}", is_rest=True)
            return
        for column in range(min(columns, MAX_COLUMNS + 1)):
            x = column * (CELL + GAP)
            if column == MAX_COLUMNS:
                yield Cell(x, y, f"+{columns - MAX_COLUMNS}", is_rest=True)
            else:
                yield Cell(x, y, str(first_rank + row * columns + column))


def _memory(memory: Mapping[str, Any]) -> tuple[Segment, ...]:
    limit = max(1, int(memory.get("limit") or 1))
    x, segments = 0.0, []
    for kind, style in MEMORY_KINDS.items():
        amount = int(memory.get(kind) or 0)
        if amount > 0:
            width = 1000 * amount / limit
            segments.append(Segment(kind, style, round(x, 2), round(width, 2), size(amount)))
            x += width
    return tuple(segments)
