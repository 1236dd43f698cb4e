"""Where the kernels are used. Does not import Triton, which need not be installed."""

import warnings
from functools import cache
from typing import Literal

import torch
from torch import Tensor, nn

KernelKind = Literal["experts", "routing", "norms", "rotary", "optimizer"]
"""Purpose of a set of kernels. Each set is checked, and used or not, by itself."""

ACTIVATIONS = ("relu", "gelu", "swiglu", "geglu", "swiglu_clamped")
MAX_NORM_WIDTH = 1 << 13
"""Widest rows that one program normalizes without spilling registers."""
MAX_EXPERTS = 512
"""Most experts whose counts or scores one program can hold."""
_MIN_CAPABILITY = 8
"""Major compute capability from which GPUs multiply bfloat16."""
MAX_ERROR = 0.1
"""Largest relative difference of two correct computations in bfloat16."""
_MAX_UPDATE_ERROR = 1e-3
"""Largest relative difference of two correct updates of float32 weights."""


def has_fast_products(dtype: torch.dtype) -> bool:
    """Whether tensor cores multiply a dtype; float32 only if TF32 is allowed."""
    if dtype == torch.float32:
        return torch.get_float32_matmul_precision() != "highest"
    return dtype in (torch.bfloat16, torch.float16)


def has_kernels(x: Tensor, kind: KernelKind) -> bool:
    """Whether the kernels of one kind take `x` and compute correctly where it is; see `kernels_are_correct`. They take
    plain tensors: no fake ones, no DTensors, and none that torch.compile traces, which fuses operations itself."""
    is_plain = x.is_cuda and type(x) in (Tensor, nn.Parameter) and not torch.compiler.is_compiling()
    return is_plain and kernels_are_correct(x.device, kind)


@cache
def kernels_are_correct(device: torch.device, kind: KernelKind) -> bool:
    """Whether the kernels of one kind compute correctly on a CUDA device, which is checked once. Warns of the reason if
    they do not, or if the device can run none."""
    reason = _why_unsupported(device)
    if reason is None:
        reason = _why_not(device, kind)
        if reason is not None:
            warnings.warn(f"kernels for {kind} are not used: {reason}", stacklevel=3)
    return reason is None


@cache
def _why_unsupported(device: torch.device) -> str | None:
    """Why a device can run no kernel, of which it warns; None if it can."""
    reason = None
    if torch.version.hip is not None:
        reason = "they are for NVIDIA's GPUs"
    elif (capability := torch.cuda.get_device_capability(device))[0] < _MIN_CAPABILITY:
        reason = f"compute capability {capability[0]}.{capability[1]} is below {_MIN_CAPABILITY}.0"
    else:
        try:
            import triton  # noqa: F401
        except ImportError as error:
            reason = f"Triton cannot be imported ({error})"
    if reason is not None:
        warnings.warn(f"fused kernels are not used: {reason}", stacklevel=4)
    return reason


def _why_not(device: torch.device, kind: KernelKind) -> str | None:
    try:
        from moe.kernels import check

        # The first use may be in a pass without gradients.
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
            difference = check.CHECKS[kind](device)
    except Exception as failure:  # compilers and drivers fail in many ways; layers are computed without kernels then
        return f"they fail on this GPU ({type(failure).__name__}: {failure})"
    limit = _MAX_UPDATE_ERROR if kind == "optimizer" else MAX_ERROR
    return None if difference < limit else f"they differ by {difference:.2g} from torch's operations on this GPU"
