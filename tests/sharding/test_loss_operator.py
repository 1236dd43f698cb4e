"""The loss over a vocabulary as one operator, with and without a cap of the logits."""

import pytest
import torch

from moe.layers import nll
from moe.sharding.bindings import nll as operator


@pytest.mark.parametrize("cap", [None, 1.5])
def test_the_operator_computes_the_loss_and_its_gradients(cap: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    labels, results = torch.tensor([3, 0, 7, 2, 0, 9]), []
    values = [torch.randn(rows, 5, generator=generator, dtype=torch.float64) for rows in (6, 11)]
    for loss_of in (nll.smoothed_nll, operator.smoothed_nll):
        hidden_states, table = (value.clone().requires_grad_() for value in values)
        loss, plain = loss_of(hidden_states, table, labels, 0.1, 0, cap=cap)
        (2.5 * loss).backward()
        results.append([loss.detach(), plain, hidden_states.grad, table.grad])
    torch.testing.assert_close(*results)
