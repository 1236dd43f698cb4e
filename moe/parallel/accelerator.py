"""Device interface for everything except arithmetic: copies, streams, timing, and what a device supports."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from moe.spec.resources import DeviceKind

_COLLECTIVES = {"cuda": "nccl"}
"""Process group backend by device type; gloo for others."""


class Accelerator(ABC):
    """Device of tensors."""

    kind: DeviceKind
    """Kind in plans and calibrations: everything except a CPU counts as a GPU."""
    matrix_dtype: torch.dtype
    """Dtype with fast matrix products, which torch's grouped product supports on it."""
    runs_ahead: bool
    """Whether the host runs ahead of the device, and must synchronize to read any number."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def collectives(self) -> str:
        """Backend of the process groups for its tensors."""
        return _COLLECTIVES.get(self.device.type, "gloo")

    @property
    @abstractmethod
    def name(self) -> str | None:
        """Vendor's name of the device; None for a CPU, which `processor()` names."""

    @abstractmethod
    def make_current(self) -> None:
        """Make this the current device of its type, which NCCL groups and tensors without an index use."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all submitted work."""

    @abstractmethod
    def take(self, host: Tensor) -> Tensor:
        """Copy a host tensor, which must not be written afterwards, to the device without waiting for it. RuntimeError
        while a graph is recorded, whose replays would read the host memory again."""

    def numbers(self, values: Sequence[int]) -> Tensor:
        """Copy integers to the device as int64, without waiting for it."""
        return self.take(torch.tensor(values, dtype=torch.int64))

    @abstractmethod
    def begin_copy_to_host(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begin to copy a tensor, which must not be written afterwards, to the host. The result returns the copy; it
        waits for the work submitted so far, not for later work."""

    @abstractmethod
    def keep_for_stream(self, tensor: Tensor) -> None:
        """Free the memory of a tensor from another stream only after the current stream's work."""

    @abstractmethod
    def timer(self) -> Any | None:
        """Timing event of its stream; None if the host's clock suffices."""


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

    def begin_copy_to_host(self, tensor: Tensor) -> Callable[[], Tensor]:
        return lambda: tensor

    def keep_for_stream(self, tensor: Tensor) -> None:
        pass

    def timer(self) -> None:
        return None


class _Gpu(Accelerator):
    """GPU, through torch's module for its type, which so far is always `torch.cuda`."""

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
        if self._module.is_current_stream_capturing():
            raise RuntimeError("a host tensor is copied to the device while a graph is recorded; copy it before")
        # Other copies wait for all earlier work of the device.
        return host.pin_memory().to(self.device, non_blocking=True)

    def begin_copy_to_host(self, tensor: Tensor) -> Callable[[], Tensor]:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").pin_memory()
        host.copy_(tensor, non_blocking=True)
        is_copied = self._module.Event()
        is_copied.record()

        def copy() -> Tensor:
            is_copied.synchronize()
            return host

        return copy

    def keep_for_stream(self, tensor: Tensor) -> None:
        tensor.record_stream(self._module.current_stream())

    def timer(self) -> Any:
        return self._module.Event(enable_timing=True)


def has_gpu() -> bool:
    """Whether torch finds a GPU for this process."""
    return torch.cuda.is_available()


def is_built_for_gpus() -> bool:
    """Whether this build of torch supports GPUs, NVIDIA's or AMD's."""
    return torch.version.cuda is not None or torch.version.hip is not None


@lru_cache
def accelerator(device: torch.device | str) -> Accelerator:
    """The accelerator for a device."""
    device = torch.device(device)
    return _Cpu(device) if device.type == "cpu" else _Gpu(device)


def multiplies(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the device has instructions for products in the dtype. A CPU without them is several times faster in
    float32, conversions included."""
    return device.type != "cpu" or _cpu_multiplies(dtype)


@cache
def _cpu_multiplies(dtype: torch.dtype) -> bool:
    """False if torch cannot tell: wide products are always correct."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    names = {torch.bfloat16: ("amx_bf16", "avx512_bf16"), torch.float16: ("amx_fp16", "avx512_fp16")}
    return dtype not in names or any(capabilities.get(name, False) for name in names[dtype])
