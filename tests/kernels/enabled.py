"""Kernels for tensors of any device, in float32, as tests compare them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from moe.dispatch import fused
from moe.kernels.configs import Configs
from moe.layers import kernel_routing, norm, rotary
from moe.train.optimizer import fused_adamw
from tests.kernels.cases import MEDIUM


@contextmanager
def kernels_everywhere() -> Iterator[None]:
    """Within the context, layers and optimizers use the kernels wherever they are."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (fused, kernel_routing, norm, rotary, fused_adamw):
            patch.setattr(module, "has_kernels", _yes)
        patch.setattr(fused, "has_fast_products", _yes)
        patch.setattr(Configs, "for_device", lambda device, dtype: MEDIUM)
        yield


def _yes(*_: Any) -> bool:
    return True
