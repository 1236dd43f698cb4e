"""Losses of logits that a module computes are those of the same table."""

import pytest
import torch

from moe.layers.linear import linear
from moe.layers.nll import smoothed_nll, token_nll
from moe.layers.projected_nll import projected_nll, projected_token_nll

IGNORED = -1


def draws(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(hidden states, table, labels, of which a third are ignored)"""
    generator = torch.Generator().manual_seed(num_tokens)
    hidden, table = (
        torch.randn(size, 6, generator=generator, dtype=torch.float64).requires_grad_() for size in (num_tokens, 31)
    )
    labels = torch.randint(0, 31, (num_tokens,), generator=generator)
    labels[::3] = IGNORED
    return hidden, table, labels


@pytest.mark.parametrize("num_tokens", [0, 1, 50])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("projects_all", [False, True])
def test_sums_are_those_of_the_table(num_tokens: int, smoothing: float, projects_all: bool) -> None:
    hidden, table, labels = draws(num_tokens)
    project = lambda states, _: linear(states, table)  # noqa: E731
    values = []
    for objective, nll in (
        smoothed_nll(hidden, table, labels, smoothing, IGNORED, projects_all=projects_all),
        projected_nll(hidden, project, labels, smoothing, IGNORED, 31, projects_all=projects_all),
    ):
        gradients = torch.autograd.grad(objective, [hidden, table])
        values.append((objective.detach(), nll.detach(), *gradients))
    torch.testing.assert_close(values[1], values[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_tokens", [0, 1, 50])
def test_values_of_tokens_are_those_of_the_table(num_tokens: int) -> None:
    """Positions reach the projection as those of the hidden states."""
    hidden, table, labels = draws(num_tokens)
    positions = []

    def project(states: torch.Tensor, chunk: torch.Tensor) -> torch.Tensor:
        positions.append(chunk)
        assert torch.equal(states, hidden[chunk])
        return linear(states, table)

    expected = token_nll(hidden, table, labels, IGNORED)
    nll = projected_token_nll(hidden, project, labels, IGNORED, 31)
    torch.testing.assert_close(nll, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(torch.cat(positions), (labels != IGNORED).nonzero().squeeze(1))
    weights = torch.linspace(1, 2, num_tokens, dtype=torch.float64)
    gradients, expected_gradients = (
        torch.autograd.grad((values * weights).sum(), [hidden, table]) for values in (nll, expected)
    )
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-12, atol=1e-12)
