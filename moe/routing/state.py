"""State that routing carries from step to step: handed in, never changed by it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe.routing.tokens import is_dense, kind_of


@dataclass(frozen=True)
class RoutingState:
    """The memory of one layer's router. Left out, what there is before the first step."""

    bias: Tensor | None = None
    """float32 `[E]`, added to an expert's score for the choice alone (arXiv 2408.15664)."""
    last_load: Tensor | None = None
    """`[E]`: choices of each expert in the whole batch of the step before; zeros before the first step."""

    def check(self, num_experts: int, device: torch.device) -> None:
        """Raises ValueError where a field cannot be of `num_experts` experts on `device`."""
        for name, tensor in (("bias", self.bias), ("last_load", self.last_load)):
            if tensor is None:
                continue
            if not is_dense(tensor) or tensor.is_complex():
                raise ValueError(f"state.{name} (={kind_of(tensor)}) must be a dense tensor of real numbers")
            if tensor.shape != (num_experts,):
                raise ValueError(
                    f"state.{name} {tuple(tensor.shape)} must have a number for each of {num_experts} experts"
                )
            if tensor.device != device:
                raise ValueError(
                    f"state.{name} (on {tensor.device}) must lie on {device}, as logits do; move it"
                )
