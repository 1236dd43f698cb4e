"""This rank's place in a plan: its process groups, and which experts and groups of tokens are its own."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moe.plan import Plan
from moe.spec import Problem, SpecError


@dataclass(frozen=True)
class Layout:
    """Where this rank stands on the mesh (expert_data, expert). Ranks of one expert group are consecutive:
    rank = data_rank * expert_degree + expert_rank."""

    rank: int
    world_size: int
    device: torch.device
    expert_degree: int = 1
    data_degree: int = 1
    mesh: DeviceMesh | None = None
    """None on one process."""
    world_group: dist.ProcessGroup | None = None
    """All ranks, with the backend of the device; None on one process."""

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> "Layout":
        """One process that holds everything."""
        return cls(rank=0, world_size=1, device=torch.device(device))

    @classmethod
    def build(cls, plan: Plan, device: torch.device | str = "cpu") -> "Layout":
        """The place of this process in `plan`. All ranks call it, with the default process group up.

        Tensors travel over NCCL on GPUs and gloo on CPUs, whatever the default group's backend is.
        Raises SpecError where the number of processes is not the plan's.
        """
        device = torch.device(device)
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        if world_size != plan.num_workers:
            raise SpecError(Problem("plan.num_workers", plan.num_workers,
                                    f"must equal the number of processes (={world_size})",
                                    "plan again for the processes there are"))  # fmt: skip
        if world_size == 1:
            return cls.single(device)
        backend = "nccl" if device.type == "cuda" else "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)  # NCCL's groups and DeviceMesh take the current one
        mesh = init_device_mesh(
            device.type,
            (plan.data, plan.expert),
            mesh_dim_names=("expert_data", "expert"),
            backend_override={"expert_data": backend, "expert": backend},
        )
        world = dist.group.WORLD if dist.get_backend() == backend else dist.new_group(backend=backend)
        return cls(dist.get_rank(), world_size, device, plan.expert, plan.data, mesh, world)

    @property
    def expert_rank(self) -> int:
        return self.rank % self.expert_degree

    @property
    def data_rank(self) -> int:
        return self.rank // self.expert_degree

    @property
    def expert_group(self) -> dist.ProcessGroup | None:
        """The ranks that the experts of a layer are spread over; None where one rank holds them all."""
        return self.mesh.get_group("expert") if self.mesh is not None and self.expert_degree > 1 else None

    @property
    def expert_data_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same experts; None where there is only this one."""
        return self.mesh.get_group("expert_data") if self.mesh is not None and self.data_degree > 1 else None

    def experts_here(self, num_experts: int) -> range:
        """The experts of a layer that this rank holds."""
        each = num_experts // self.expert_degree
        return range(self.expert_rank * each, (self.expert_rank + 1) * each)

    def groups_here(self, num_groups: int) -> range:
        """This rank's share of a global batch: whole groups, in order; none where there are too few."""
        first = self.rank * num_groups // self.world_size
        return range(first, (self.rank + 1) * num_groups // self.world_size)
