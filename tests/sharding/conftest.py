"""Gloo ranks that stay up between tests, and padding that nobody may count on."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from moe.sharding.exchange import exchange
from tests.parity.conftest import ranks

__all__ = ["ranks"]


def _padded(part: Tensor, dim: int, size: int) -> Tensor:
    """As `exchange.pad_end`, but with what must not be used: no number, or a position that there is not."""
    if part.shape[dim] == size:
        return part
    behind = [0, 0] * (part.dim() - 1 - dim) + [0, size - part.shape[dim]]
    harmful = 1 if part.dtype == torch.bool else 77
    return pad(part, behind, value=float("nan") if part.is_floating_point() or part.is_complex() else harmful)


@pytest.fixture(scope="module", autouse=True)
def harmful_padding() -> Iterator[None]:
    """In this process, whose threads are ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "pad_end", _padded)
        yield
