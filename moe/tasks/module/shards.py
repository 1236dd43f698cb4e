"""Shards of a laid-out user module, as the trainer's `ParameterShard`."""

import torch

from moe.parallel import ParameterShard
from moe.sharding import Applied


def attach_shards(module: Applied) -> None:
    """Set `part` of each parameter and buffer to this rank's shard."""
    shards = module.shards()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        shard = shards[name]
        place = ParameterShard(torch.Size(shard.shape), offsets=shard.offsets, is_first=shard.is_first)
        tensor.part = place  # type: ignore[attr-defined]
