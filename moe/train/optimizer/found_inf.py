"""Updates without effect after a step that was not finite, decided on the device.

`found_inf` is a scalar on the device: 1 if the update must change nothing, else 0. None: the update is applied, since
the host has decided so. Values are selected, not multiplied by zero, since those not selected may be NaN; arithmetic is
the same with and without it.
"""

import torch
from torch import Tensor


def select(found_inf: Tensor | None, old: Tensor, new: Tensor) -> Tensor:
    """`new`, or `old` if `found_inf` is 1."""
    return new if found_inf is None else torch.where(found_inf != 0, old, new)


def scale_(tensor: Tensor, factor: float, found_inf: Tensor | None) -> None:
    """Multiply `tensor` by `factor` in place, unless `found_inf` is 1."""
    if found_inf is None:
        tensor.mul_(factor)
    else:
        tensor.copy_(select(found_inf, tensor, tensor * factor))
