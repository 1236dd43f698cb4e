"""Whole tensors of an applied module, on one rank."""

import torch
from torch import Tensor

from moe.parallel import together
from moe.sharding.applied.applied import Applied
from moe.sharding.exchange.exchange import gather, padded_to
from moe.sharding.placement import WHOLE, part_shape


@torch.no_grad()
def state_dict(applied: Applied) -> dict[str, Tensor]:
    """The module's state dictionary, with whole tensors on the CPU, on rank 0; elsewhere an empty one. All ranks call
    it. For models that one rank has room for; each rank has one whole tensor at a time."""
    degrees, found = applied.mesh.degrees, dict[str, Tensor]()
    names, shards = set(applied.state_dict()), applied.shards()
    for first, *others in applied.names():
        saved = [name for name in (first, *others) if name in names]
        if not saved:
            continue
        shard, here = shards[first], applied.placements_of(first)
        part = padded_to(shard.part, part_shape(shard.shape, here, degrees))
        for axis in reversed(range(len(degrees))):
            if (dim := here[axis].dim) is None:
                continue
            here = (*here[:axis], WHOLE, *here[axis + 1 :])
            part = gather(applied.mesh, part, axis, dim, part_shape(shard.shape, here, degrees)[dim])
        if together.rank() == 0:
            found |= dict.fromkeys(saved, part.cpu().clone(memory_format=torch.contiguous_format))
    return found
