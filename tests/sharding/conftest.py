"""Gloo ranks that stay up between tests, and padding with values that nothing may use."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from moe.sharding.exchange import exchange
from tests.parity.conftest import ranks

__all__ = ["ranks"]


def pad_with_harmful_values(part: Tensor, dim: int, size: int) -> Tensor:
    """Pad like `exchange.pad_end`, but with values that must not be used: NaN, or a position that does not exist."""
    if part.shape[dim] == size:
        return part
    padding = [0, 0] * (part.dim() - 1 - dim) + [0, size - part.shape[dim]]
    harmful = 1 if part.dtype == torch.bool else 77
    return pad(part, padding, value=float("nan") if part.is_floating_point() or part.is_complex() else harmful)


@pytest.fixture(scope="module", autouse=True)
def harmful_padding() -> Iterator[None]:
    """In this process, whose threads are ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "pad_end", pad_with_harmful_values)
        yield
