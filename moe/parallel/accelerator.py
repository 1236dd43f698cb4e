"""Everything that is asked of a device beside arithmetic: all of this library's questions of CUDA."""

from abc import ABC, abstractmethod
from typing import Any, Literal

import torch
from torch import Tensor

_COLLECTIVES = {"cuda": "nccl"}
"""Backend of process groups by the type of device; gloo where none is named."""


class Accelerator(ABC):
    """One device that tensors lie on."""

    kind: Literal["cpu", "cuda"]
    """The kind that plans and calibrations know: everything that is no CPU is counted as a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def collectives(self) -> str:
        """Backend of the process groups that carry its tensors."""
        return _COLLECTIVES.get(self.device.type, "gloo")

    @property
    @abstractmethod
    def name(self) -> str | None:
        """As its maker calls it; None for a CPU, which `processor()` names."""

    @abstractmethod
    def make_current(self) -> None:
        """Have what is made without naming a device of this type, NCCL's groups among it, take this one."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all that it was given to do."""

    @abstractmethod
    def keep_for_stream(self, tensor: Tensor) -> None:
        """Free the memory of a tensor, which was made on another stream, no sooner than the current one is done."""

    @abstractmethod
    def timer(self) -> Any | None:
        """An event of its stream that knows its time; None where the host's clock tells it."""


class _Cpu(Accelerator):
    kind = "cpu"
    name = None

    def make_current(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def keep_for_stream(self, tensor: Tensor) -> None:
        pass

    def timer(self) -> None:
        return None


class _Gpu(Accelerator):
    """Through the module that torch has for its type, which is `torch.cuda` for all that anybody has."""

    kind = "cuda"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._module = torch.get_device_module(device)

    @property
    def name(self) -> str:
        return str(self._module.get_device_name(self.device))

    def make_current(self) -> None:
        self._module.set_device(self.device)

    def synchronize(self) -> None:
        self._module.synchronize(self.device)

    def keep_for_stream(self, tensor: Tensor) -> None:
        tensor.record_stream(self._module.current_stream())

    def timer(self) -> Any:
        return self._module.Event(enable_timing=True)


def accelerator(device: torch.device | str) -> Accelerator:
    """The accelerator that a device is."""
    device = torch.device(device)
    return _Cpu(device) if device.type == "cpu" else _Gpu(device)
