"""Launch of kernels on the device of their tensors."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch


@contextmanager
def launching_on(device: torch.device) -> Iterator[None]:
    """Launch kernels on `device` within the context: Triton launches on the current one."""
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        yield
