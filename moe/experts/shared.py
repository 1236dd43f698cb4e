"""Experts that every token passes through, beside those that it is routed to (DeepSeekMoE, arXiv 2401.06066)."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from moe.experts.activation import ACTIVATIONS
from moe.parallel import Layout, narrowed, new_parameter
from moe.spec import MoESpec


class SharedExperts(nn.Module):
    """One feed-forward layer as wide as all shared experts together, with a gate of its own where the spec says so
    (Qwen2-MoE, arXiv 2407.10671). Tensor ranks each have all of it, and their own tokens."""

    def __init__(self, spec: MoESpec, layout: Layout, *, name: str, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        assert spec.shared_hidden_dim is not None
        width, hidden = spec.model_dim, spec.shared_hidden_dim
        self.activation = spec.activation
        self.recompute = layout.recompute == "selective"
        """Whether hidden states are made again in the backward pass."""

        def weights(in_dim: int, out_dim: int, parameter: str) -> nn.Parameter:
            shape, std = (in_dim, out_dim), in_dim**-0.5
            return new_parameter(shape, std, layout, name=f"{name}.{parameter}", seed=seed, dtype=dtype)

        self.w_in = weights(width, hidden, "w_in")
        self.w_gate = weights(width, hidden, "w_gate") if ACTIVATIONS[spec.activation].gated else None
        self.w_out = weights(hidden, width, "w_out")
        self.gate = weights(width, 1, "gate") if spec.shared_gate else None

    def forward(self, x: Tensor) -> Tensor:
        """`[T, M]` for `x` `[T, M]`, in its dtype."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._of, x, use_reentrant=False, preserve_rng_state=False)
        return self._of(x)

    def _of(self, x: Tensor) -> Tensor:
        up = x @ narrowed(self.w_in, x.dtype)
        gate = up if self.w_gate is None else x @ narrowed(self.w_gate, x.dtype)
        y = activated(self.activation, up, gate) @ narrowed(self.w_out, x.dtype)
        return y if self.gate is None else y * (x @ narrowed(self.gate, x.dtype)).sigmoid()


def activated(activation: str, up: Tensor, gate: Tensor) -> Tensor:
    """Hidden states by plain operations, which autograd knows."""
    if activation == "relu":
        return functional.relu(up)
    if activation == "gelu":
        return functional.gelu(up)
    return (functional.silu(gate) if activation == "swiglu" else functional.gelu(gate)) * up
