"""Shared experts, which process every token beside its routed experts (DeepSeekMoE, arXiv 2401.06066)."""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe.experts import Activation
from moe.layers.adapter_dropout import AdapterDropout, DropoutKey
from moe.layers.linear import adapted, factor, product
from moe.parallel import Layout, narrowed


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
    lora_scale = 0.0
    """Scale of the LoRA adapters, A `[r, in]` and B `[out, r]` of each matrix."""
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

    def wire(self, layout: Layout) -> None:
        self.recompute = layout.recompute == "selective"

    def forward(self, x: Tensor, draws: DropoutKey | None = None) -> Tensor:
        """Return `[T, M]` in the dtype of `x` `[T, M]`; `draws` keys the adapters' dropout in training."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._of, x, draws, use_reentrant=False, preserve_rng_state=False)
        return self._of(x, draws)

    def _of(self, x: Tensor, draws: DropoutKey | None) -> Tensor:
        up = self._product(x, "w_in", draws)
        gate = up if self.w_gate is None else self._product(x, "w_gate", draws)
        y = self._product(self.activation.plain(up, gate), "w_out", draws)
        return y if self.gate is None else y * product(x, narrowed(self.gate, x.dtype)).sigmoid()

    def _product(self, x: Tensor, name: str, draws: DropoutKey | None) -> Tensor:
        a, b = getattr(self, f"{name}_lora_a"), getattr(self, f"{name}_lora_b")
        dropout = self.dropout[name].by(draws) if name in self.dropout else None
        return adapted(product(x, factor(self, name, x.dtype)), x, a, b, self.lora_scale, dropout)
