"""GPU use of a worker process, as NVML reports it."""

import sys
from functools import cache
from typing import Any

from service.wire.run_status import DeviceUse


def device_use() -> DeviceUse | None:
    """Use of this process's current GPU; None if it trains on a CPU or has not initialized its GPU yet."""
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
    """(NVML, the GPU's NVML handle). Uses the NVML bindings vendored by Ray; torch needs a separate package for
    them."""
    from ray._private.thirdparty import pynvml

    pynvml.nvmlInit()  # type: ignore[no-untyped-call]
    name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
    return pynvml, pynvml.nvmlDeviceGetHandleByUUID(name)
