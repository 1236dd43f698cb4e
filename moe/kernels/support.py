"""Where the kernels are used. Does not import Triton, which need not be installed."""

import warnings
from functools import cache

import torch

ACTIVATIONS = ("relu", "gelu", "swiglu", "geglu", "swiglu_clamped")
MAX_EXPERTS = 512
"""Most experts whose counts or scores one program can hold."""
_MIN_CAPABILITY = 8
"""Major compute capability from which GPUs multiply bfloat16."""
_MAX_ERROR = 0.1
"""Largest relative difference of two correct computations in bfloat16."""


def has_fast_products(dtype: torch.dtype) -> bool:
    """Whether tensor cores multiply a dtype; float32 only if TF32 is allowed."""
    if dtype == torch.float32:
        return torch.get_float32_matmul_precision() != "highest"
    return dtype in (torch.bfloat16, torch.float16)


@cache
def has_kernels(device: torch.device) -> bool:
    """Whether the kernels compute correctly on a device, which is checked once. Warns of the reason if a CUDA device
    cannot run them."""
    if device.type != "cuda":
        return False
    reason = _why_not(device)
    if reason is not None:
        warnings.warn(f"fused kernels are not used: {reason}", stacklevel=3)
    return reason is None


def _why_not(device: torch.device) -> str | None:
    if torch.version.hip is not None:
        return "they are for NVIDIA's GPUs"
    major, minor = torch.cuda.get_device_capability(device)
    if major < _MIN_CAPABILITY:
        return f"compute capability {major}.{minor} is below {_MIN_CAPABILITY}.0"
    try:
        from moe.kernels import check
    except ImportError as error:
        return f"Triton cannot be imported ({error})"
    try:
        # The first use may be in a pass without gradients.
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
            difference = max(check.kernel_error(device), check.routing_error(device))
    except Exception as failure:  # compilers and drivers fail in many ways; layers are computed without kernels then
        return f"they fail on this GPU ({type(failure).__name__}: {failure})"
    return None if difference < _MAX_ERROR else f"they differ by {difference:.2g} from torch's operations on this GPU"
