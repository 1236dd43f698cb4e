"""Process group of all ranks for tensors on the CPU."""

import torch.distributed as dist


def cpu_group() -> dist.ProcessGroup:
    """Return the default process group, or a gloo group of the same ranks if that has no CPU backend, as after
    `init_process_group("nccl")`. All ranks call it together: the first call creates the gloo group."""
    world = dist.group.WORLD
    assert world is not None
    if "cpu:" in str(dist.get_backend_config()):
        return world
    if world not in _BESIDE:
        _BESIDE.clear()  # entries of a destroyed default group
        _BESIDE[world] = dist.new_group(backend="gloo")
    return _BESIDE[world]


_BESIDE: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
"""Gloo group of the default group, if that has no CPU backend."""
