"""Everything that is asked of a device beside arithmetic: all of this library's questions of CUDA."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from moe.spec.resources import DeviceKind

_COLLECTIVES = {"cuda": "nccl"}
"""Backend of process groups by the type of device; gloo where none is named."""


class Accelerator(ABC):
    """One device that tensors lie on."""

    kind: DeviceKind
    """The kind that plans and calibrations know: everything that is no CPU is counted as a GPU."""
    matrix_dtype: torch.dtype
    """The dtype whose products it is made for, and which torch's grouped product takes on it."""
    runs_ahead: bool
    """Whether the host runs ahead of it, and has to wait for any number that it asks for."""

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
    def take(self, host: Tensor) -> Tensor:
        """A tensor of the host, which nobody writes to afterwards, on the device; the host does not wait for it."""

    def numbers(self, values: Sequence[int]) -> Tensor:
        """int64, likewise."""
        return self.take(torch.tensor(values, dtype=torch.int64))

    @abstractmethod
    def keep_for_stream(self, tensor: Tensor) -> None:
        """Free the memory of a tensor, which was made on another stream, no sooner than the current one is done."""

    @abstractmethod
    def timer(self) -> Any | None:
        """An event of its stream that knows its time; None where the host's clock tells it."""


class _Cpu(Accelerator):
    kind: DeviceKind = "cpu"
    matrix_dtype = torch.float32
    runs_ahead = False
    name = None

    def make_current(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def take(self, host: Tensor) -> Tensor:
        return host

    def keep_for_stream(self, tensor: Tensor) -> None:
        pass

    def timer(self) -> None:
        return None


class _Gpu(Accelerator):
    """Through the module that torch has for its type, which is `torch.cuda` for all that anybody has."""

    kind: DeviceKind = "cuda"
    matrix_dtype = torch.bfloat16
    runs_ahead = True

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

    def take(self, host: Tensor) -> Tensor:
        # Any other copy waits for all that the device was given to do before.
        return host.pin_memory().to(self.device, non_blocking=True)

    def keep_for_stream(self, tensor: Tensor) -> None:
        tensor.record_stream(self._module.current_stream())

    def timer(self) -> Any:
        return self._module.Event(enable_timing=True)


def has_gpu() -> bool:
    """Whether torch finds a GPU that this process may use."""
    return torch.cuda.is_available()


def is_built_for_gpus() -> bool:
    """Whether this build of torch knows any kind of GPU, NVIDIA's or AMD's."""
    return torch.version.cuda is not None or torch.version.hip is not None


@lru_cache
def accelerator(device: torch.device | str) -> Accelerator:
    """The accelerator that a device is."""
    device = torch.device(device)
    return _Cpu(device) if device.type == "cpu" else _Gpu(device)


def multiplies(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the device has instructions that multiply numbers of the dtype. A CPU without them takes several times
    as long for products of narrow numbers as for those of float32, with copies to it and back."""
    return device.type != "cpu" or _cpu_multiplies(dtype)


@cache
def _cpu_multiplies(dtype: torch.dtype) -> bool:
    """Where it is not known, as in torch's releases that tell nothing, wide numbers are never wrong."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    names = {torch.bfloat16: ("amx_bf16", "avx512_bf16"), torch.float16: ("amx_fp16", "avx512_fp16")}
    return dtype not in names or any(capabilities.get(name, False) for name in names[dtype])
