"""Layout of a plan on this rank: its process groups, mesh indices and token groups."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache, cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moe.deprecation import warn_renamed
from moe.parallel.accelerator import accelerator
from moe.plan import ModuleLayout, Plan
from moe.plan.candidate import Recompute, Sharding
from moe.plan.executable import refusal
from moe.plan.placement import Placement
from moe.plan.schedule import rank_of_stage
from moe.spec import SpecError, spec_error
from moe.spec.parallel import ContextExchange, PipelineSchedule

DATA_AXES = ("data_replica", "data_fsdp")
"""Axes along which ranks have different rows."""
STAGE_AXES = (*DATA_AXES, "context_replica", "context_fsdp", "tensor")
"""Axes over the ranks that have the same layers."""
DENSE_AXES = ("pipeline", *STAGE_AXES)
"""Axes of all parameters except those of experts, outermost first."""
EXPERT_AXES = ("pipeline", "expert_replica", "expert_fsdp", "expert", "expert_tensor")
"""Axes of the experts' parameters, over the same ranks. Expert-data parallelism is (expert_replica, expert_fsdp)."""
JOINED_AXES = {"fsdp": ("data_fsdp", "context_fsdp"), "context": ("context_replica", "context_fsdp")}
"""Axes that consist of several of a mesh. FSDP shards parameters over context ranks, which are near one another, and
then over data ranks. Along `context`, ranks have parts of the same rows."""

COLLECTIVE_TIMEOUT_S = 600.0
"""Maximum time that ranks wait for one another within a step: longer than any step takes."""


@dataclass(frozen=True)
class Layout:
    """This rank's position on the dense mesh and the expert mesh, which cover the same ranks.

    The last axis of each mesh varies fastest, so ranks of one tensor or expert group are consecutive.
    """

    rank: int
    world_size: int
    device: torch.device
    degrees: Mapping[str, int] = field(default_factory=dict)
    """Ranks along the axes `pipeline`, `data_replica`, `fsdp`, `context` and `tensor`, and along those of experts; 1 if
    omitted."""
    groups: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)
    """Process groups by axis, or by axes joined with a plus: the ranks that differ from this one only in these. Also
    `node`, the ranks of its expert group on its node, and `rail`, the ranks at its position on other nodes."""
    num_chunks: int = 1
    """Option of the plan, as are the fields that follow, down to `overlap`."""
    max_rows: int | None = None
    recompute: Recompute = "none"
    sharding: Sharding = "parameters"
    virtual_stages: int = 1
    """Pipeline stages of this rank."""
    schedule: PipelineSchedule = "1f1b"
    stages: tuple[int, ...] | None = None
    """Layers of each virtual stage, in model order; None: as even as possible."""
    context_exchange: ContextExchange = "gather"
    overlap: bool = False
    placements: tuple[Placement, ...] | None = None
    """Placements of parameters; None for the planner's."""
    module: ModuleLayout | None = None
    """Layout of a user's module, also from the plan: it has its own mesh over all ranks."""

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> "Layout":
        """Layout of one process that holds everything."""
        return cls(rank=0, world_size=1, device=torch.device(device))

    @classmethod
    def build(
        cls, plan: Plan, device: torch.device | str = "cpu", *, timeout_s: float = COLLECTIVE_TIMEOUT_S
    ) -> "Layout":
        """Build this process's layout for `plan`. All ranks call it, with the default process group initialized.

        A collective over some of the ranks fails if one does not join within `timeout_s`; one over all ranks, if it
        uses the default group, after that group's timeout. Tensors are exchanged over NCCL on GPUs and gloo on CPUs,
        regardless of the default backend. Raises SpecError if the number of processes is not the plan's, and for a plan
        that cannot be executed yet.
        """
        if (problem := refusal(plan)) is not None:
            raise SpecError(problem)
        device = torch.device(device)
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        if world_size != plan.num_workers:
            raise spec_error("mismatch", "plan.num_workers", plan.num_workers,
                             f"must equal the number of processes (={world_size})",
                             "plan again for the current number of processes")  # fmt: skip
        options = plan.options
        return cls.from_degrees(
            plan.degrees.axes, device, options.ranks_per_node, timeout_s=timeout_s, num_chunks=options.num_chunks,
            max_rows=options.max_rows, recompute=options.recompute, sharding=options.sharding,
            virtual_stages=options.virtual_stages, schedule=options.pipeline_schedule, stages=options.stages,
            context_exchange=options.context_exchange,
            overlap=options.overlap, placements=plan.placements, module=plan.module,
        )  # fmt: skip

    @classmethod
    def from_degrees(
        cls,
        degrees: Mapping[str, int],
        device: torch.device | str = "cpu",
        ranks_per_node: int | None = None,
        *,
        timeout_s: float = COLLECTIVE_TIMEOUT_S,
        **options: Any,
    ) -> "Layout":
        """Build this process's layout on meshes with `degrees`, whose product is the number of processes. `options` are
        the plan's fields."""
        device = torch.device(device)
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls(0, 1, device, **options)
        device_accelerator = accelerator(device)
        device_accelerator.make_current()
        layout = cls(dist.get_rank(), dist.get_world_size(), device, degrees, **options)
        groups = _groups(layout, device_accelerator.collectives, ranks_per_node, timedelta(seconds=timeout_s))
        return replace(layout, groups=groups)

    @classmethod
    def over(cls, *args: Any, **kwargs: Any) -> "Layout":
        """Deprecated name of `from_degrees`."""
        warn_renamed("Layout.over", "Layout.from_degrees")
        return cls.from_degrees(*args, **kwargs)

    def close(self) -> None:
        """Destroy the layout's process groups, with their threads and connections. All ranks call it, with groups in
        the same order, since NCCL waits for a group's other ranks; nothing built with the layout may be used
        afterwards."""
        for group in reversed(dict.fromkeys(self.groups.values())):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)

    def degree(self, *axes: str) -> int:
        """Number of ranks along these axes."""
        return math.prod(self._sizes.get(axis, 1) for axis in _mesh_axes(axes))

    def index(self, axis: str) -> int:
        """This rank's index along an axis."""
        return self._indices[axis]

    @cached_property
    def _indices(self) -> dict[str, int]:
        """This rank's index along every axis: layers ask for it in every pass."""
        indices: dict[str, int] = {}
        for axes in (DENSE_AXES, EXPERT_AXES):
            for number, axis in enumerate(axes):
                indices[axis] = self.rank // self.degree(*axes[number + 1 :]) % self.degree(axis)
        for joined_axis, parts in JOINED_AXES.items():
            indices[joined_axis] = 0
            for axis in parts:
                indices[joined_axis] = indices[joined_axis] * self.degree(axis) + indices[axis]
        return indices

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return mesh_sizes(self.degrees)

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """Process group of the ranks that differ from this one only in these axes; None if there are no others."""
        return self.groups.get("+".join(axes))

    def reduction_group(self, *axes: str) -> dist.ProcessGroup | None:
        """Process group for sums of gradients over these axes, None if there are no others. It is not that of `group`
        if passes have collectives, since those of one group run in one order."""
        return self.groups.get(_reduction_name(axes))

    def stage_group(self, source: int, destination: int) -> dist.ProcessGroup | None:
        """Process group for transfers from a pipeline stage to the next or the previous one; None if this rank has
        neither or both."""
        return self.groups.get(_stage_name(source, destination))

    @property
    def tied_tables_group(self) -> dist.ProcessGroup | None:
        """Process group of the ranks with the first and the last pipeline stage, which both have a table that is tied;
        None if this rank has neither or both."""
        return self.groups.get(_TIED_TABLES)

    def rank_of_stage(self, stage: int) -> int:
        """Rank with a pipeline stage, at this rank's place within the stage."""
        num_ranks = self.degree("pipeline")
        pipeline_rank = rank_of_stage(self.schedule, stage, num_ranks, self.virtual_stages)
        return self.rank + (pipeline_rank - self.index("pipeline")) * self.degree(*STAGE_AXES)

    @property
    def num_stages(self) -> int:
        """Virtual pipeline stages of the model."""
        return self.degree("pipeline") * self.virtual_stages

    @property
    def world_group(self) -> dist.ProcessGroup | None:
        """Process group of all ranks, with the device's backend; None on one process."""
        return self.group(*DENSE_AXES)

    @property
    def lockstep_group(self) -> dist.ProcessGroup | None:
        """Process group of all ranks if a forward pass needs collectives, so that all must run the same number of
        passes; else None."""
        return self.world_group if self.degree(*_LOCKSTEP_AXES) > 1 else None

    @property
    def in_step(self) -> dist.ProcessGroup | None:
        """Deprecated name of `lockstep_group`."""
        warn_renamed("Layout.in_step", "Layout.lockstep_group")
        return self.lockstep_group

    @property
    def data_ranks(self) -> int:
        """Number of ranks with different rows."""
        return self.degree(*DATA_AXES)

    @property
    def is_first_with_rows(self) -> bool:
        """Whether this rank is the first of the context and tensor ranks that have the same rows."""
        return self.index("context") == self.index("tensor") == 0

    @property
    def reports_rows(self) -> bool:
        """Whether this rank is the first of all that have the same results for the same rows, pipeline stages
        included."""
        return self.index("pipeline") == 0 and self.is_first_with_rows

    def copies(self, *axes: str) -> int:
        """Number of ranks with the same part of a parameter sharded over these axes."""
        return self.degree(*STAGE_AXES) // self.degree(*axes)

    def local_groups(self, num_groups: int) -> range:
        """This data rank's token groups of a global batch: consecutive, and none if there are too few."""
        data_rank = self.index("data_replica") * self.degree("data_fsdp") + self.index("data_fsdp")
        first = data_rank * num_groups // self.data_ranks
        return range(first, (data_rank + 1) * num_groups // self.data_ranks)


_LOCKSTEP_AXES = ("fsdp", "context", "tensor", "expert", "expert_tensor", "expert_fsdp")
"""Axes whose ranks exchange values in every forward and backward pass."""
_EXCHANGE_AXES: tuple[tuple[str, ...], ...] = (
    DENSE_AXES,
    STAGE_AXES,
    ("pipeline",),
    ("tensor",),
    ("context",),
    ("data_replica",),
    ("fsdp",),
    ("expert", "expert_tensor"),
    ("expert_tensor",),
    ("expert_replica",),
    ("expert_fsdp",),
)
"""Axes of every process group used within a pass or between steps."""
_REDUCTION_AXES: tuple[tuple[str, ...], ...] = (
    ("context_replica",),
    ("context_replica", "tensor"),
    (*DATA_AXES, "context"),
    (*DATA_AXES, "context", "tensor"),
    ("expert_tensor",),
    ("expert_replica", "expert_fsdp"),
    ("expert_replica", "expert_fsdp", "expert_tensor"),
)
"""Axes of every process group over which gradients are summed."""
_SCATTER_AXES: tuple[tuple[str, ...], ...] = (
    ("fsdp",),
    ("data_replica", "context_replica"),
    ("data_replica", "context_replica", "tensor"),
    ("expert_fsdp",),
    ("expert_replica",),
    ("expert_replica", "expert_tensor"),
)
"""Axes of further groups if gradients of whole parameters are reduce-scattered: those of the reduce-scatters, and those
over which the parts are summed then."""


def _reduction_name(axes: tuple[str, ...]) -> str:
    return f"reduction over {'+'.join(axes)}"


_TIED_TABLES = "tied tables"


def _stage_name(source: int, destination: int) -> str:
    return f"stage {source} to stage {destination}"


def _groups(
    layout: Layout, backend: str, ranks_per_node: int | None, timeout: timedelta
) -> dict[str, dist.ProcessGroup]:
    """This rank's process groups. All ranks create all groups in the same order; names with the same ranks share a
    group, except those of reductions that overlap with other collectives, and of transfers between stages."""
    degrees = layout.degrees
    groups_by_ranks: dict[tuple[int, ...], dist.ProcessGroup] = {}
    world = tuple(range(dist.get_world_size()))
    if dist.get_backend() == backend:
        groups_by_ranks[world] = dist.group.WORLD  # type: ignore[assignment]
    groups_by_name: dict[str, dist.ProcessGroup] = {}

    def make(name: str, rank_lists: Iterable[list[int]], groups: dict[tuple[int, ...], dist.ProcessGroup]) -> None:
        for ranks in map(tuple, rank_lists):
            if len(ranks) == 1:
                continue
            if ranks not in groups:
                groups[ranks] = dist.new_group(list(ranks), timeout, backend=backend)
            if dist.get_rank() in ranks:
                groups_by_name[name] = groups[ranks]

    for axes in _EXCHANGE_AXES:
        make("+".join(axes), ranks_along(axes, degrees), groups_by_ranks)
    has_collectives = math.prod(degrees.get(axis, 1) for axis in _LOCKSTEP_AXES) > 1
    reduction_groups = {} if has_collectives else groups_by_ranks
    scatter_axes = _SCATTER_AXES if layout.sharding != "parameters" else ()
    for axes in (*_REDUCTION_AXES, *scatter_axes):
        make(_reduction_name(axes), ranks_along(axes, degrees), reduction_groups)
    if ranks_per_node is not None:
        for group in ranks_along(("expert", "expert_tensor"), degrees):
            nodes = [group[first : first + ranks_per_node] for first in range(0, len(group), ranks_per_node)]
            if len(nodes) > 1:
                make("node", nodes, groups_by_ranks)
                make("rail", [list(rail) for rail in zip(*nodes, strict=True)], groups_by_ranks)
    for name, pairs in _stage_pairs(layout):
        make(name, pairs, {})
    return groups_by_name


def mesh_sizes(degrees: Mapping[str, int]) -> dict[str, int]:
    """Ranks along each axis of both meshes."""
    fsdp, context = degrees.get("fsdp", 1), degrees.get("context", 1)
    context_fsdp = math.gcd(fsdp, context)
    return {
        **degrees, "data_fsdp": fsdp // context_fsdp,
        "context_replica": context // context_fsdp, "context_fsdp": context_fsdp,
    }  # fmt: skip


@cache
def _mesh_axes(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Axes of one mesh that `axes` consist of, in order and without repeats."""
    return tuple(dict.fromkeys(part for axis in axes for part in JOINED_AXES.get(axis, (axis,))))


def _stage_pairs(layout: Layout) -> Iterator[tuple[str, list[list[int]]]]:
    """Name and pairs of ranks of every process group between two pipeline stages."""
    pipelines = ranks_along(("pipeline",), layout.degrees)

    def pairs(*stages: int) -> list[list[int]]:
        indices = {rank_of_stage(layout.schedule, stage, layout.degree("pipeline"), layout.virtual_stages)
                   for stage in stages}  # fmt: skip
        return [[ranks[index] for index in sorted(indices)] for ranks in pipelines]

    last = layout.num_stages - 1
    for stage in range(last):
        yield _stage_name(stage, stage + 1), pairs(stage, stage + 1)
        yield _stage_name(stage + 1, stage), pairs(stage, stage + 1)
    if last:
        yield _TIED_TABLES, pairs(0, last)


def ranks_along(axes: tuple[str, ...], degrees: Mapping[str, int]) -> list[list[int]]:
    """Every set of ranks that differ only in these axes of one mesh."""
    axes, sizes = _mesh_axes(axes), mesh_sizes(degrees)
    mesh_axes = EXPERT_AXES if set(axes) <= set(EXPERT_AXES) else DENSE_AXES
    ranks = torch.arange(math.prod(sizes.get(axis, 1) for axis in mesh_axes))
    mesh = ranks.view([sizes.get(axis, 1) for axis in mesh_axes])
    last = [mesh_axes.index(axis) for axis in axes]
    first = [dim for dim in range(len(mesh_axes)) if dim not in last]
    size = math.prod(sizes.get(axis, 1) for axis in axes)
    return mesh.permute(*first, *last).reshape(-1, size).tolist()


def mesh_of(layout: Layout, axes: tuple[str, ...], device_type: str) -> DeviceMesh:
    """Device mesh of the ranks that differ from this one only in these axes of one mesh, the first axis outermost, for
    tensors on `device_type`. It only describes placement, and has no process groups."""
    own_ranks = next(ranks for ranks in ranks_along(axes, layout.degrees) if layout.rank in ranks)
    shape = [layout.degree(axis) for axis in axes]
    return DeviceMesh(device_type, torch.tensor(own_ranks).view(shape), mesh_dim_names=axes, _init_backend=False)
