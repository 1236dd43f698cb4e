"""What routing carries from step to step: handed in, never changed by it."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class RoutingState:
    """The memory of one layer's router. Left out, what there is before the first step."""

    bias: Tensor | None = None
    """float32 `[E]`, added to an expert's score for the choice alone (arXiv 2408.15664)."""
    last_load: Tensor | None = None
    """`[E]`: choices of each expert in the whole batch of the step before; zeros before the first step."""
