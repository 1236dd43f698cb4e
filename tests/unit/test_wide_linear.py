"""Products of narrow rows in a wider dtype, as of a router, which save the rows once."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from moe.layers import MoELayer
from moe.layers.linear import _CAST_ROWS, wide_linear
from moe.spec import MoESpec

NUM_TOKENS, MODEL_DIM = 32, 64


def operands(num_rows: int, *, has_bias: bool, by_column: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    x = torch.randn(num_rows, 24, dtype=torch.bfloat16)
    weight = torch.randn(24, 6).t() if by_column else torch.randn(6, 24)
    return x, weight, torch.randn(6) if has_bias else None


@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 50])
def test_results_are_those_of_the_cast_rows_bit_for_bit(num_rows: int, has_bias: bool, by_column: bool) -> None:
    x, weight, bias = operands(num_rows, has_bias=has_bias, by_column=by_column)
    leaves, results = [tensor.requires_grad_() for tensor in (x, weight, bias) if tensor is not None], []
    for y in (wide_linear(x, weight, bias), functional.linear(x.float(), weight, bias)):
        gradients = torch.autograd.grad(y, leaves, torch.linspace(-1, 1, y.numel()).view_as(y))
        results.append([y, *gradients])
    for result, expected in zip(*results, strict=True):
        assert result.dtype == expected.dtype
        assert torch.equal(result, expected)
    assert [tensor.stride() for tensor in results[0]] == [tensor.stride() for tensor in results[1]]


@pytest.mark.parametrize("by_column", [False, True])
def test_gradients_of_weights_are_summed_over_blocks_of_rows(by_column: bool) -> None:
    x, weight, _ = operands(2 * _CAST_ROWS + 7, has_bias=False, by_column=by_column)
    gradient = torch.randn(x.shape[0], 6)
    (d_weight,) = torch.autograd.grad(wide_linear(x, weight.requires_grad_(), None), weight, gradient)
    torch.testing.assert_close(d_weight, (gradient.double().t() @ x.double()).float(), rtol=1e-5, atol=1e-4)
    assert d_weight.stride() == weight.stride()


@pytest.mark.parametrize("trained", [(True, False), (False, True)])
def test_frozen_rows_and_weights_have_no_gradient(trained: tuple[bool, bool]) -> None:
    x, weight, _ = operands(9, has_bias=False, by_column=False)
    x.requires_grad_(trained[0])
    weight.requires_grad_(trained[1])
    wide_linear(x, weight, None).sum().backward()
    assert (x.grad is not None, weight.grad is not None) == trained


@pytest.mark.parametrize("backward_too", [False, True])
def test_autocast_leaves_logits_in_float32(backward_too: bool) -> None:
    layer = MoELayer(MoESpec(num_experts=4, model_dim=16, hidden_dim=8, group_tokens=32))
    x = torch.randn(32, 16, dtype=torch.bfloat16, requires_grad=True)
    plain, _ = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        y, routing = layer(x)
    assert torch.equal(routing.expert, layer(x)[1].expert)
    with torch.autocast("cpu", torch.bfloat16) if backward_too else nullcontext():
        y.sum().backward()
    assert plain.dtype == y.dtype
    assert layer.router.grad is not None
    assert layer.router.grad.dtype == torch.float32


def saved_rows(jitter: float) -> set[torch.dtype]:
    """Dtypes in which a layer saves all its rows for backward."""
    layer = MoELayer(
        MoESpec(num_experts=4, model_dim=MODEL_DIM, hidden_dim=8, group_tokens=NUM_TOKENS, input_jitter=jitter)
    )
    dtypes = set()

    def record_dtype(tensor: Tensor) -> Tensor:
        if tensor.shape == (NUM_TOKENS, MODEL_DIM):
            dtypes.add(tensor.dtype)
        return tensor

    x = torch.randn(NUM_TOKENS, MODEL_DIM, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(record_dtype, lambda tensor: tensor):
        layer(x)
    return dtypes


def test_only_jitter_saves_a_float32_copy() -> None:
    assert torch.float32 in saved_rows(0.1)
    assert saved_rows(0.0) == {torch.bfloat16}
