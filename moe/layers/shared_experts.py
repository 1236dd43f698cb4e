"""Shared experts, which process every token in addition to its routed experts (DeepSeekMoE, arXiv 2401.06066)."""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe.experts import Activation
from moe.layers.adapter_dropout import AdapterDropout, DropoutKey
from moe.layers.linear import add_adapter, matrix_operand, product
from moe.parallel import Layout, cast_parameter


class SharedExperts(nn.Module):
    """Feed-forward layer as wide as all shared experts together, with an optional sigmoid gate (Qwen2-MoE, arXiv
    2407.10671). Replicated on tensor-parallel ranks, which process different tokens."""

    w_in: nn.Parameter
    """`[M, hidden]`"""
    w_gate: nn.Parameter | None
    """`[M, hidden]`"""
    w_out: nn.Parameter
    """`[hidden, M]`"""
    gate: nn.Parameter | None
    """`[M, 1]`"""
    lora_scales: Mapping[str, float] = MappingProxyType({})
    """Scales of the LoRA adapters, A `[r, in]` and B `[out, r]`, by matrix name."""
    dropout: Mapping[str, AdapterDropout] = MappingProxyType({})
    """Dropout of the adapters' inputs, by matrix name."""

    recompute = False
    """Recompute the hidden states in the backward pass."""

    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self.activation = activation
        for name in ("w_in", "w_gate", "w_out"):
            for part in (name, f"{name}_lora_a", f"{name}_lora_b"):
                self.register_parameter(part, None)
        self.register_parameter("gate", None)

    def set_layout(self, layout: Layout) -> None:
        self.recompute = layout.recompute == "selective"

    def forward(self, x: Tensor, dropout_key: DropoutKey | None = None) -> Tensor:
        """Return `[T, M]` in the dtype of `x` `[T, M]`; `dropout_key` keys the adapters' dropout in training."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._feed_forward, x, dropout_key, use_reentrant=False, preserve_rng_state=False)
        return self._feed_forward(x, dropout_key)

    def _feed_forward(self, x: Tensor, dropout_key: DropoutKey | None) -> Tensor:
        up = self._product(x, "w_in", dropout_key)
        gate = up if self.w_gate is None else self._product(x, "w_gate", dropout_key)
        y = self._product(self.activation.differentiable_forward(up, gate), "w_out", dropout_key)
        return y if self.gate is None else y * product(x, cast_parameter(self.gate, x.dtype)).sigmoid()

    def _product(self, x: Tensor, name: str, dropout_key: DropoutKey | None) -> Tensor:
        a, b = getattr(self, f"{name}_lora_a"), getattr(self, f"{name}_lora_b")
        dropout = self.dropout[name].masks_for(dropout_key) if name in self.dropout else None
        scale = self.lora_scales.get(name, 0.0)
        return add_adapter(product(x, matrix_operand(self, name, x.dtype)), x, a, b, scale, dropout)
