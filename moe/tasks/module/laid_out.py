"""Parts of a laid-out module's parameters and buffers, in the trainer's terms."""

import torch

from moe.parallel import ParameterShard
from moe.sharding import Applied


def note_parts(module: Applied) -> None:
    """Note, at each parameter and buffer, where in the whole this rank's part of it lies."""
    shards = module.shards()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        shard = shards[name]
        place = ParameterShard(torch.Size(shard.shape), offsets=shard.offsets, is_first=shard.is_first)
        tensor.part = place  # type: ignore[attr-defined]
