"""`GradScaler` on applied modules: all ranks skip a step if one of them has a gradient that is not finite.

Torch's own reduction over DTensors uses the placements of the first gradient only.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from moe.sharding import torch_private
from moe.sharding.parameters import APPLIED


def _share_found(optimizer: Optimizer, by_device: dict[torch.device, Tensor]) -> None:
    """All-reduce whether any gradient is not finite, so that all ranks skip the step and use the same scale. A
    collective."""
    applied_meshes = [vars(module)["mesh"].device_mesh for module in APPLIED]
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    meshes = {
        id(parameter.device_mesh): parameter.device_mesh
        for parameter in parameters
        if isinstance(parameter, DTensor) and any(parameter.device_mesh is mesh for mesh in applied_meshes)
    }
    for mesh in meshes.values():
        for found_inf in by_device.values():
            for axis in range(mesh.ndim):
                dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=mesh.get_group(axis))


torch_private.after_unscaling(_share_found)
