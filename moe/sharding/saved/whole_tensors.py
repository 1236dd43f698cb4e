"""Whole tensors of an applied module, on one rank."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from moe.parallel import json_collectives
from moe.sharding.applied.applied import Applied


@torch.no_grad()
def state_dict(applied: Applied) -> dict[str, Tensor]:
    """State dictionary of the module with whole tensors on the CPU, on rank 0; empty on other ranks. All ranks
    call it. The model must fit in the memory of one host; other ranks hold one whole tensor at a time."""
    state: dict[str, Tensor] = {}
    full_tensors: dict[int, Tensor] = {}
    for name, tensor in applied.state_dict(keep_vars=True).items():
        if id(tensor) not in full_tensors:
            detached = tensor.detach()
            full_tensor = detached.full_tensor() if isinstance(detached, DTensor) else detached
            if json_collectives.rank() == 0:
                full_tensors[id(tensor)] = full_tensor.cpu().clone(memory_format=torch.contiguous_format)
            else:
                full_tensors[id(tensor)] = torch.empty(0)
        if json_collectives.rank() == 0:
            state[name] = full_tensors[id(tensor)]
    return state
