"""What an applied module returns, and gradients of it: as the plain module's."""

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.sharding.test_applied_state import Summed, X, applied_to


class Earlier(nn.Module):
    """It returns what was in buffers before it set them anew."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("last", torch.zeros(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        before, rows = self.seen, self.last[:2]
        self.seen, self.last = self.seen + x.mean(0), x[1]
        return (x * self.weight * self.seen).sum(), before, rows


def test_a_buffer_that_is_returned_is_as_it_was_when_it_is_set_anew():
    plain, applied = Earlier(), applied_to(Earlier(), X)
    for _ in range(3):
        assert all(torch.equal(*pair) for pair in zip(applied(X), plain(X), strict=True))
        for name, buffer in plain.named_buffers():
            assert torch.equal(applied.get_buffer(name), buffer)
