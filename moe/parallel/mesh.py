"""This rank's place in a plan: its process groups, and which experts and groups of tokens are its own."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moe.parallel.accelerator import accelerator
from moe.plan import ModuleLayout, Plan
from moe.plan.candidate import Recompute
from moe.plan.executable import refusal
from moe.plan.placement import Placement
from moe.spec import Problem, SpecError

DATA_AXES = ("data_replica", "fsdp")
"""Along these, ranks have tokens of rows of their own."""
STAGE_AXES = (*DATA_AXES, "context", "tensor")
"""Of the ranks that have the same layers. Along `context` they have parts of the same rows."""
DENSE_AXES = ("pipeline", *STAGE_AXES)
"""Of all parameters but those of experts, outermost first."""
EXPERT_AXES = ("pipeline", "expert_replica", "expert_fsdp", "expert", "expert_tensor")
"""Of the experts' parameters, over the same ranks. Expert-data is (expert_replica, expert_fsdp)."""

COLLECTIVE_TIMEOUT_S = 600.0
"""Longest that ranks wait for one another within a step: longer than any step takes, shorter than patience."""


@dataclass(frozen=True)
class Layout:
    """This rank's place on the two meshes that the same ranks are folded into.

    Ranks are numbered with the last axis of each running fastest, so that those of one tensor or expert group are
    consecutive.
    """

    rank: int
    world_size: int
    device: torch.device
    degrees: Mapping[str, int] = field(default_factory=dict)
    """Ranks along each axis; 1 where it is left out."""
    groups: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)
    """By axis, or axes joined by a plus, the ranks that differ from this one in these alone; beside them `node`, those
    of this one's expert group on its node, and `rail`, those with its place on other nodes."""
    num_chunks: int = 1
    """These four are the plan's."""
    max_rows: int | None = None
    recompute: Recompute = "none"
    placements: tuple[Placement, ...] | None = None
    """Placements of parameters; left out, those of the planner."""
    module: ModuleLayout | None = None
    """Layout of a user's module, which is the plan's too: its own mesh is over all ranks."""

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> "Layout":
        """One process that holds everything."""
        return cls(rank=0, world_size=1, device=torch.device(device))

    @classmethod
    def build(
        cls, plan: Plan, device: torch.device | str = "cpu", *, timeout_s: float = COLLECTIVE_TIMEOUT_S
    ) -> "Layout":
        """The place of this process in `plan`. All ranks call it, with the default process group up.

        A collective over some of the ranks fails when one does not come for `timeout_s`; one over all of them, where
        the default group serves for that, when its own time is over. Tensors travel over NCCL on GPUs and gloo on
        CPUs, whatever the default group's backend is.
        Raises SpecError where the number of processes is not the plan's, and for a plan that nothing can run yet.
        """
        if (problem := refusal(plan)) is not None:
            raise SpecError(problem)
        device = torch.device(device)
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        if world_size != plan.num_workers:
            raise SpecError(Problem("mismatch", "plan.num_workers", plan.num_workers,
                                    f"must equal the number of processes (={world_size})",
                                    "plan again for the processes there are"))  # fmt: skip
        options = plan.options
        return cls.over(
            plan.degrees.axes, device, options.ranks_per_node, timeout_s=timeout_s, num_chunks=options.num_chunks,
            max_rows=options.max_rows, recompute=options.recompute, placements=plan.placements, module=plan.module,
        )  # fmt: skip

    @classmethod
    def over(
        cls,
        degrees: Mapping[str, int],
        device: torch.device | str = "cpu",
        ranks_per_node: int | None = None,
        *,
        timeout_s: float = COLLECTIVE_TIMEOUT_S,
        **options: Any,
    ) -> "Layout":
        """The place of this process on meshes of these degrees, which multiply to the number of processes. `options`
        are the fields that are a plan's."""
        device = torch.device(device)
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls(0, 1, device, **options)
        lies_on = accelerator(device)
        lies_on.make_current()
        groups = _groups(degrees, lies_on.collectives, ranks_per_node, timedelta(seconds=timeout_s))
        return cls(dist.get_rank(), dist.get_world_size(), device, degrees, groups, **options)

    def close(self) -> None:
        """End the process groups made for it, with their threads and connections. All ranks call it, and use
        nothing that was built with it any more.

        All ranks end them in one order: over NCCL, to end a group is to wait for its other ranks.
        """
        for group in reversed(dict.fromkeys(self.groups.values())):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)

    def degree(self, *axes: str) -> int:
        """Ranks along these axes together."""
        return math.prod(self.degrees.get(axis, 1) for axis in axes)

    def index(self, axis: str) -> int:
        """This rank's index along an axis."""
        axes = EXPERT_AXES if axis in EXPERT_AXES else DENSE_AXES
        inner = self.degree(*axes[axes.index(axis) + 1 :])
        return self.rank // inner % self.degree(axis)

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """The ranks that differ from this one in these axes alone; None where there are no others."""
        return self.groups.get("+".join(axes))

    @property
    def world_group(self) -> dist.ProcessGroup | None:
        """All ranks, with the backend of the device; None on one process."""
        return self.group(*DENSE_AXES)

    @property
    def in_step(self) -> dist.ProcessGroup | None:
        """All ranks, where a forward pass on one needs one on others, so that all make as many of them; else None."""
        is_collective = self.degree("fsdp", "tensor", "expert", "expert_tensor", "expert_fsdp") > 1
        return self.world_group if is_collective else None

    @property
    def data_ranks(self) -> int:
        """Ranks that have rows of their own."""
        return self.degree(*DATA_AXES)

    def copies(self, *axes: str) -> int:
        """Ranks that have the same part of a parameter that is sharded over these axes."""
        return self.degree(*STAGE_AXES) // self.degree(*axes)

    def groups_here(self, num_groups: int) -> range:
        """This data rank's share of a global batch: whole groups, in order; none where there are too few."""
        data_rank = self.index("data_replica") * self.degree("fsdp") + self.index("fsdp")
        first = data_rank * num_groups // self.data_ranks
        return range(first, (data_rank + 1) * num_groups // self.data_ranks)


_JOINED = (
    DENSE_AXES,
    ("tensor",),
    ("context",),
    ("context", "tensor"),
    ("data_replica",),
    ("fsdp",),
    (*DATA_AXES, "context"),
    STAGE_AXES,
    ("expert", "expert_tensor"),
    ("expert_tensor",),
    ("expert_replica",),
    ("expert_fsdp",),
    ("expert_replica", "expert_fsdp"),
    ("expert_replica", "expert_fsdp", "expert_tensor"),
)
"""The axes over which something is exchanged or summed."""


def _groups(
    degrees: Mapping[str, int], backend: str, ranks_per_node: int | None, timeout: timedelta
) -> dict[str, dist.ProcessGroup]:
    """The groups of this rank. All ranks make all groups, in the same order; those of the same ranks are one."""
    groups_by_ranks: dict[tuple[int, ...], dist.ProcessGroup] = {}
    world = tuple(range(dist.get_world_size()))
    if dist.get_backend() == backend:
        groups_by_ranks[world] = dist.group.WORLD  # type: ignore[assignment]
    groups_by_name: dict[str, dist.ProcessGroup] = {}

    def make(name: str, rank_lists: Iterable[list[int]]) -> None:
        for ranks in map(tuple, rank_lists):
            if len(ranks) == 1:
                continue
            if ranks not in groups_by_ranks:
                groups_by_ranks[ranks] = dist.new_group(list(ranks), timeout, backend=backend)
            if dist.get_rank() in ranks:
                groups_by_name[name] = groups_by_ranks[ranks]

    for axes in _JOINED:
        make("+".join(axes), ranks_along(axes, degrees))
    if ranks_per_node is not None:
        for group in ranks_along(("expert", "expert_tensor"), degrees):
            nodes = [group[first : first + ranks_per_node] for first in range(0, len(group), ranks_per_node)]
            if len(nodes) > 1:
                make("node", nodes)
                make("rail", [list(rail) for rail in zip(*nodes, strict=True)])
    return groups_by_name


def ranks_along(axes: tuple[str, ...], degrees: Mapping[str, int]) -> list[list[int]]:
    """Every set of ranks that differ in these axes of one mesh alone."""
    mesh_axes = EXPERT_AXES if set(axes) <= set(EXPERT_AXES) else DENSE_AXES
    ranks = torch.arange(math.prod(degrees.get(axis, 1) for axis in mesh_axes))
    mesh = ranks.view([degrees.get(axis, 1) for axis in mesh_axes])
    last = [mesh_axes.index(axis) for axis in axes]
    first = [dim for dim in range(len(mesh_axes)) if dim not in last]
    size = math.prod(degrees.get(axis, 1) for axis in axes)
    return mesh.permute(*first, *last).reshape(-1, size).tolist()


def mesh_of(layout: Layout, axes: tuple[str, ...]) -> DeviceMesh:
    """The ranks that differ from this one in these axes of one mesh alone, the first axis outermost: only to say how
    something lies on them, without process groups of its own."""
    own_ranks = next(ranks for ranks in ranks_along(axes, layout.degrees) if layout.rank in ranks)
    shape = [layout.degree(axis) for axis in axes]
    return DeviceMesh(
        layout.device.type, torch.tensor(own_ranks).view(shape), mesh_dim_names=axes, _init_backend=False
    )
