"""Initial values of declared parameters."""

import math

import pytest
import torch
from torch import nn

from moe.parallel import declare
from moe.spec.parameter import Parameter


def initial_values(declaration: Parameter) -> torch.Tensor:
    module = nn.Module()
    module.register_parameter(declaration.name, None)
    declare(module, [declaration])
    return getattr(module, declaration.name).detach()


@pytest.mark.parametrize(("low", "high"), [(0.01, 16.0), (3.0, 4.0)])
def test_logarithms_are_of_uniform_draws_between_the_bounds(low: float, high: float) -> None:
    values = initial_values(Parameter("decay", (20_000,), ("heads",), log_of=(low, high))).exp()
    assert low <= values.min() < low + 0.01 * (high - low)
    assert high - 0.01 * (high - low) < values.max() <= high * (1 + 1e-6)
    assert values.mean().item() == pytest.approx((low + high) / 2, rel=0.02)
    assert values.std().item() == pytest.approx((high - low) / math.sqrt(12), rel=0.02)


def test_matrices_have_their_standard_deviation_and_vectors_are_ones() -> None:
    matrix = initial_values(Parameter("w", (100, 200), ("model", "hidden"), std=0.3))
    assert matrix.std().item() == pytest.approx(0.3, rel=0.02)
    assert matrix.abs().max() <= 0.3 * math.sqrt(3)
    assert (initial_values(Parameter("scale", (7,), ("model",))) == 1).all()
