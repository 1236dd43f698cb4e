"""Read-only inputs of routing beside the tokens: state from earlier steps, and replayed choices."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe.routing.tokens import is_dense, kind_of


@dataclass(frozen=True)
class RoutingState:
    """State of one layer's router; defaults are the state before the first step."""

    bias: Tensor | None = None
    """float32 `[E]`: selection bias, added to scores for the choice but not the weights (arXiv 2408.15664)."""
    last_load: Tensor | None = None
    """`[E]`: choices of each expert in the global batch of the previous step; zeros before the first."""
    replayed: Tensor | None = None
    """int64 `[G, S, K]`, by preference: experts to use instead of the router's choices; -1 leaves a token to the
    router."""

    def taken(self, own: Tensor) -> Tensor:
        """int64 `[G, S, K]`: the replayed choices, or the router's `own` where there are none."""
        return own if self.replayed is None else torch.where(self.replayed >= 0, self.replayed, own)

    def check(self, num_experts: int, device: torch.device) -> None:
        """Raise ValueError for a field that does not fit `num_experts` or `device`."""
        if self.replayed is not None and self.replayed.device != device:
            raise ValueError(
                f"state.replayed (on {self.replayed.device}) must lie on {device}, as logits do; move it"
            )
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

    def check_replayed(self, shape: tuple[int, ...], num_experts: int) -> None:
        """Raise ValueError unless the replayed choices are int64 in `shape` `[G, S, K]`, below `num_experts`."""
        choices = self.replayed
        assert choices is not None
        if not is_dense(choices) or choices.dtype != torch.int64:
            raise ValueError(
                f"state.replayed (={kind_of(choices)}) must be a dense tensor of torch.int64; convert it"
            )
        if choices.shape != shape:
            raise ValueError(
                f"state.replayed {tuple(choices.shape)} must be {shape}: groups, tokens of each, experts of each token"
            )
        if bool((choices >= num_experts).any()):
            raise ValueError(
                f"state.replayed (has {int(choices.max())}) must have numbers of experts below {num_experts}"
            )
