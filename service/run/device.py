"""The device that a worker trains on."""

import os
import socket
from typing import TYPE_CHECKING

from moe.spec.resources import DeviceKind

if TYPE_CHECKING:
    import torch


def device_fault(kind: DeviceKind) -> str | None:
    """Reason why this worker lacks a device of that kind; None if it has one."""
    if kind == "cpu":
        return None
    import torch

    from moe.parallel.accelerator import has_gpu, is_built_for_gpus

    if has_gpu():
        return None
    if not is_built_for_gpus():
        cause = f"torch {torch.__version__} is built without them"
    else:
        cause = f"torch {torch.__version__} sees none; CUDA_VISIBLE_DEVICES={os.getenv('CUDA_VISIBLE_DEVICES')}"
    return (
        f"a worker on {socket.gethostname()} was assigned a GPU but finds none: {cause}; fix "
        "its driver or torch, or train on CPUs with resources.device=cpu or gpus_per_worker=0"
    )


def device_of(kind: DeviceKind) -> "torch.device":
    """The GPU that Ray assigned to this worker, or the CPU."""
    import torch

    if kind == "cpu":
        return torch.device("cpu")
    import ray.train.torch

    device: torch.device = ray.train.torch.get_device()
    return device
