"""GPU use of a worker process, as NVML reports it."""

import sys
from functools import cache
from typing import Any

from service.wire.run_status import DeviceUse


def device_use() -> DeviceUse | None:
    """Use of this process's GPU; None on a CPU or before its initialization."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_available() or not cuda.is_initialized():
        return None
    try:
        free, total = cuda.mem_get_info()
        return DeviceUse(utilization=_utilization(cuda), memory_bytes=total - free, memory_total_bytes=total)
    except Exception:  # a failing GPU driver must not stop heartbeats
        return None


def _utilization(cuda: Any) -> float | None:
    try:
        nvml, handle = _handle(str(cuda.get_device_properties(cuda.current_device()).uuid))
        return float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
    except Exception:
        return None


@cache
def _handle(uuid: str) -> tuple[Any, Any]:
    """(NVML, the GPU's handle), from Ray's vendored bindings: torch needs another package."""
    from ray._private.thirdparty import pynvml

    pynvml.nvmlInit()  # type: ignore[no-untyped-call]
    name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
    return pynvml, pynvml.nvmlDeviceGetHandleByUUID(name)
