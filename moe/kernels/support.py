"""Support of the kernels by devices. Does not import Triton, which need not be installed."""

import warnings
from functools import cache
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from moe.parallel import json_collectives

KernelKind = Literal["experts", "routing", "norms", "rotary", "optimizer"]
"""A set of kernels, checked and enabled independently."""

ACTIVATIONS = ("relu", "gelu", "swiglu", "geglu", "geglu_tanh", "swiglu_clamped")
MAX_EXPERTS = 512
"""Most experts whose counts or scores one program can hold."""
_MIN_CAPABILITY = 8
"""Lowest major compute capability with bfloat16 tensor cores."""
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
    """Whether `x` is a plain CUDA tensor and this kind of kernels computes correctly on its device. Fake tensors,
    DTensors and tensors that torch.compile traces are not plain."""
    is_plain = x.is_cuda and type(x) in (Tensor, nn.Parameter) and not torch.compiler.is_compiling()
    return is_plain and kind not in _DISABLED and kernels_are_correct(x.device, kind)


_DISABLED: set[KernelKind] = set()
"""Kinds of kernels that fail on some rank."""


def check_kernels(device: torch.device, *, is_alone: bool = False) -> None:
    """Check all kinds of kernels on a CUDA device, and disable those that fail on any rank. Otherwise ranks would
    round, and therefore route, differently, and their exchanges would not match. Collective, unless the process
    trains alone."""
    if device.type != "cuda":
        return
    device = torch.device(device.type, torch.cuda.current_device() if device.index is None else device.index)
    kinds = get_args(KernelKind)
    correct_kinds = [kind for kind in kinds if kernels_are_correct(device, kind)]
    for rank, rank_kinds in enumerate(() if is_alone else json_collectives.all_gather_json(correct_kinds)):
        for kind in set(correct_kinds) - set(rank_kinds) - _DISABLED:
            warnings.warn(f"kernels for {kind} are not used: they fail on rank {rank}", stacklevel=2)
            _DISABLED.add(kind)


@cache
def kernels_are_correct(device: torch.device, kind: KernelKind) -> bool:
    """Whether the kernels of one kind compute correctly on a CUDA device, which is checked once. Warns of the reason if
    they do not, or if the device can run none."""
    reason = _why_unsupported(device)
    if reason is None:
        reason = _failure_of(device, kind)
        if reason is not None:
            warnings.warn(f"kernels for {kind} are not used: {reason}", stacklevel=3)
    return reason is None


@cache
def _why_unsupported(device: torch.device) -> str | None:
    """Reason why the device can run no kernel, after warning of it; None if it can."""
    reason = None
    if torch.version.hip is not None:
        reason = "they require an NVIDIA GPU"
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


def _failure_of(device: torch.device, kind: KernelKind) -> str | None:
    try:
        from moe.kernels import check

        # The first use may be in a pass without gradients, or in one that a checkpoint recomputes.
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(device.type, enabled=False),
            torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
        ):
            difference = check.CHECKS[kind](device)
    except torch.OutOfMemoryError:  # says nothing of the kernels
        raise
    except Exception as failure:  # compilers and drivers fail in many ways; layers are computed without kernels then
        return f"they fail on this GPU ({type(failure).__name__}: {failure})"
    limit = _MAX_UPDATE_ERROR if kind == "optimizer" else MAX_ERROR
    return None if difference < limit else f"relative error {difference:.2g} against torch exceeds {limit:g}"
