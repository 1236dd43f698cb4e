"""Log lines about parts of a model for which there are no kernels."""

from collections.abc import Callable, Iterator

import torch
from torch import nn

from moe.dispatch.fused import unsupported_experts
from moe.kernels.configs import MAX_NORM_WIDTH
from moe.kernels.support import KernelKind, kernels_are_correct
from moe.layers.kernel_routing import unsupported_router
from moe.layers.moe import MoELayer
from moe.layers.norm import RMSNorm


def kernel_notes(model: nn.Module, device: torch.device, dtype: torch.dtype) -> list[str]:
    """One line per property for which torch's operations are used although kernels of that kind run on the device."""
    if device.type != "cuda":
        return []
    return list(notes_where(lambda kind: kernels_are_correct(device, kind), model, dtype))


def notes_where(is_used: Callable[[KernelKind], bool], model: nn.Module, dtype: torch.dtype) -> Iterator[str]:
    """Lines about the kinds of kernels that are used."""
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    widths = [module.weight.numel() for module in model.modules() if isinstance(module, RMSNorm)]
    properties: dict[KernelKind, list[str | None]] = {
        "experts": [unsupported_experts(layer.experts, dtype) for layer in layers],
        "routing": [
            unsupported_router(layer.route, layer.spec.num_experts, drops=layer.spec.routing.capacity(1, 1) is not None)
            for layer in layers
        ],
        "norms": [f"width {width}, more than {MAX_NORM_WIDTH}" for width in widths if width > MAX_NORM_WIDTH],
    }
    for kind, unsupported_values in properties.items():
        for value in dict.fromkeys(unsupported_values):
            if value is not None and is_used(kind):
                yield f"kernels for {kind} do not support {value}; torch's operations are used"
