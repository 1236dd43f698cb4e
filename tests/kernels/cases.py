"""Random experts, choices and gradients, and their results by the reference in float64."""

import os
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from moe.experts import Activation, ExpertWeights, build_activation, feed_forward_reference
from moe.experts.weights import ExpertSettings
from moe.kernels.configs import Config, Configs
from tests.kernels.interpreter import replace_language_once

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
if DEVICE == "cpu":
    replace_language_once()
TILED = ("first_products", "product", "hidden_gradients", "weight_gradient")
SMALL = Configs(dict.fromkeys(TILED, Config(16, 16, 16, 4, 2)), num_programs=3)
"""Tiles so small that even few rows need several, and programs so few that each takes several."""
SMALL_TMA = Configs(dict.fromkeys(TILED, Config(16, 16, 16, 4, 2, uses_tma=True)), num_programs=3)
"""The same, with weights loaded by tensor descriptors."""
MEDIUM = Configs(dict.fromkeys(TILED, Config(32, 32, 32, 4, 2)), num_programs=3)
"""For tests of anything but tiles: in Triton's interpreter, a large tile takes as long as a small one."""


@dataclass(frozen=True)
class Case:
    """Tokens `x` `[T, M]`, their choices `[T, K]`, experts in float32, and the gradient `d_y` `[T, M]`."""

    x: Tensor
    expert: Tensor
    weight: Tensor
    kept: Tensor
    tensors: list[Tensor | None]
    """Weights of the experts, in the order of `ExpertWeights.tensors`."""
    settings: ExpertSettings
    activation: Activation
    d_y: Tensor

    @property
    def num_experts(self) -> int:
        return self.weights.w_in.shape[0]

    @property
    def weights(self) -> ExpertWeights:
        return ExpertWeights.from_tensors(self.tensors, self.settings)


@st.composite
def cases(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)) -> Case:
    """Layers of any widths, which need not be multiples of a tile, with experts that no token chooses."""
    num_experts = draw(st.integers(1, 6))
    num_tokens, per_token = draw(st.sampled_from((0, 1, 5, 24))), draw(st.integers(1, min(3, num_experts)))
    model_dim, hidden_dim = draw(st.sampled_from((8, 16, 33))), draw(st.sampled_from((8, 24, 37)))
    dtype = draw(st.sampled_from(dtypes))
    name = draw(st.sampled_from(("relu", "gelu", "swiglu", "geglu", "geglu_tanh", "swiglu_clamped")))
    # In a narrow dtype, a saved product near a limit may be on its other side.
    limit = 0.7 if dtype == torch.float32 else 7.0
    activation = build_activation(name, (1.702, limit) if name == "swiglu_clamped" else ())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def matrices(*shape: int, used: bool = True) -> Tensor | None:
        return torch.randn(shape, generator=generator).div(shape[-2] ** 0.5) if used else None

    # So may one with an adapter's rounded product near zero, where the gradient of ReLU jumps.
    ranks = (0,) if name == "relu" and dtype != torch.float32 else (0, 1, 4, 20)
    gated, biased, rank = activation.is_gated, draw(st.booleans()), draw(st.sampled_from(ranks))
    bias_first = draw(st.sampled_from((0, model_dim // 2))) if biased else 0
    tensors = [
        matrices(num_experts, model_dim, hidden_dim),
        matrices(num_experts, hidden_dim, model_dim),
        matrices(num_experts, model_dim, hidden_dim, used=gated),
        matrices(num_experts, hidden_dim, used=biased),
        matrices(num_experts, model_dim - bias_first, used=biased),
        matrices(num_experts, hidden_dim, used=biased and gated),
        matrices(num_experts, model_dim, rank, used=rank > 0),
        matrices(num_experts, rank, hidden_dim, used=rank > 0),
        matrices(num_experts, rank, hidden_dim, used=rank > 0 and gated),
        matrices(num_experts, hidden_dim, rank, used=rank > 0),
        matrices(num_experts, rank, model_dim, used=rank > 0),
        None, None, None,
    ]  # fmt: skip
    num_choosable = draw(st.integers(per_token, num_experts))  # the others get no rows
    scores = torch.rand(num_tokens, num_choosable, generator=generator)
    return Case(
        x=torch.randn(num_tokens, model_dim, generator=generator).to(dtype),
        expert=scores.topk(per_token, dim=1).indices,
        weight=torch.rand(num_tokens, per_token, generator=generator),
        kept=torch.rand(num_tokens, per_token, generator=generator) < draw(st.sampled_from((0.0, 0.8, 1.0))),
        tensors=tensors,
        settings=ExpertSettings(b_out_first=bias_first, in_lora_scale=0.7, out_lora_scale=0.9),
        activation=activation,
        d_y=torch.randn(num_tokens, model_dim, generator=generator).to(dtype),
    )


def inputs_of(case: Case, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """(tokens, weights of the choices, tensors of the experts) that take gradients; as the tokens' dtype rounds them,
    and then in `dtype`, if given."""

    def leaf(tensor: Tensor, *, rounds: bool) -> Tensor:
        values = tensor.to(case.x.dtype if rounds and dtype else tensor.dtype)
        return values.to(DEVICE, dtype or tensor.dtype, copy=True).requires_grad_()

    tensors = [None if tensor is None else leaf(tensor, rounds=True) for tensor in case.tensors]
    return leaf(case.x, rounds=False), leaf(case.weight, rounds=False), tensors


def reference(case: Case) -> list[Tensor]:
    """Sums by token, and gradients of tokens, of the choices' weights and of the experts' weights, in float64."""
    x, weight, tensors = inputs_of(case, torch.float64)
    weights = ExpertWeights.from_tensors(tensors, case.settings)
    if weights.b_out is not None:
        weights = replace(weights, b_out=functional.pad(weights.b_out, (case.settings.b_out_first, 0)))
    per_token, num_experts = case.expert.shape[1], case.num_experts
    queue = torch.where(case.kept, case.expert, num_experts).reshape(-1).to(DEVICE)
    choice = queue.argsort(stable=True)[: int(case.kept.sum())]
    counts = torch.bincount(queue, minlength=num_experts + 1)[:num_experts].tolist()
    rows = feed_forward_reference(x[choice // per_token], weight.reshape(-1)[choice], weights, counts, case.activation)
    y = torch.zeros_like(x).index_add(0, choice // per_token, rows)
    leaves = [x, weight, *(tensor for tensor in tensors if tensor is not None)]
    gradients = torch.autograd.grad(y, leaves, case.d_y.to(DEVICE, torch.float64), allow_unused=True)
    return [y, *(leaf.new_zeros(leaf.shape) if gradient is None else gradient
                 for leaf, gradient in zip(leaves, gradients, strict=True))]  # fmt: skip
