"""The feed-forward layer without experts: gradients of every activation, and the tensors saved for them."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from moe.experts import build_activation
from moe.layers.feed_forward import FeedForward
from moe.layers.shared_experts import SharedExperts
from moe.parallel import SequenceShard, declare
from moe.spec.parameter import linear

M, HIDDEN, TOKENS = 6, 40, 9
ACTIVATED = {
    "relu": lambda up, gate: functional.relu(up),
    "gelu": lambda up, gate: functional.gelu(up),
    "swiglu": lambda up, gate: functional.silu(gate) * up,
    "geglu": lambda up, gate: functional.gelu(gate) * up,
    "geglu_tanh": lambda up, gate: functional.gelu(gate, approximate="tanh") * up,
}


def layer_of(activation: str, dtype: torch.dtype = torch.float64) -> FeedForward:
    layer = FeedForward(activation)
    names = ("w_in", "w_gate") if layer.activation.is_gated else ("w_in",)
    input_weights = (linear(name, ("hidden", HIDDEN), ("model", M)) for name in names)
    declare(layer, (*input_weights, linear("w_out", ("model", M), ("hidden", HIDDEN))), dtype)
    return layer


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("activation", ACTIVATED)
def test_outputs_and_gradients_equal_plain_operations(activation: str, recompute: bool) -> None:
    torch.manual_seed(0)
    layer, x = layer_of(activation), torch.randn(TOKENS, M, dtype=torch.float64, requires_grad=True)
    layer.recompute = recompute
    y = layer(x, SequenceShard(TOKENS))
    up = x @ layer.w_in.weight.t()
    gate = up if layer.w_gate is None else x @ layer.w_gate.weight.t()
    expected = ACTIVATED[activation](up, gate) @ layer.w_out.weight.t()
    torch.testing.assert_close(y, expected)
    gradient, leaves = torch.randn_like(y), (x, *layer.parameters())
    assert len(leaves) == (4 if layer.activation.is_gated else 3)
    gradients, expected_gradients = (
        torch.autograd.grad(output, leaves, gradient, retain_graph=True) for output in (y, expected)
    )
    torch.testing.assert_close(gradients, expected_gradients)


@pytest.mark.parametrize("activation", ACTIVATED)
def test_only_the_outputs_of_the_first_matrices_are_saved_for_the_backward_pass(activation: str) -> None:
    layer, x = layer_of(activation), torch.randn(TOKENS, M, dtype=torch.float64, requires_grad=True)
    shapes: dict[int, tuple[int, ...]] = {}

    def save(tensor: Tensor) -> Tensor:
        shapes[tensor.data_ptr()] = tuple(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        layer(x, SequenceShard(TOKENS))
    assert sum(shape == (TOKENS, HIDDEN) for shape in shapes.values()) == (2 if layer.w_gate else 1)


def test_a_frozen_matrix_has_no_gradient() -> None:
    layer = layer_of("swiglu")
    layer.w_out.weight.requires_grad_(False)
    layer(torch.randn(TOKENS, M).double(), SequenceShard(TOKENS)).sum().backward()
    assert layer.w_out.weight.grad is None
    assert layer.w_gate.weight.grad.abs().max() > 0


def shared_experts(has_gate: bool, dtype: torch.dtype) -> SharedExperts:
    layer = SharedExperts(build_activation("swiglu"))
    shapes = {
        "w_in": (M, HIDDEN),
        "w_gate": (M, HIDDEN),
        "w_out": (HIDDEN, M),
        **({"gate": (M, 1)} if has_gate else {}),
    }
    for name, shape in shapes.items():
        layer.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype)))
    return layer


@pytest.mark.parametrize("kind", [*ACTIVATED, False, True], ids=[*ACTIVATED, "shared", "shared with gate"])
def test_a_bfloat16_layer_is_the_float32_one_rounded(kind: str | bool) -> None:
    def results(dtype: torch.dtype) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).bfloat16().to(dtype)

        layer = layer_of(kind, dtype) if isinstance(kind, str) else shared_experts(kind, dtype)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(draw(*parameter.shape))
        x = draw(TOKENS, M).requires_grad_()
        y = layer(x, SequenceShard(TOKENS)) if isinstance(kind, str) else layer(x)
        return [y, *torch.autograd.grad(y, [x, *layer.parameters()], draw(*y.shape))]

    for narrow, wide in zip(results(torch.bfloat16), results(torch.float32), strict=True):
        assert narrow.dtype == torch.bfloat16
        torch.testing.assert_close(narrow.float(), wide, rtol=0, atol=2**-6 * wide.abs().max().item())
