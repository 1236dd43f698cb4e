"""Result of routing: each token's experts and weights within their capacity, and the rows of the kept choices."""

from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from moe.routing.assignments import Assignments
from moe.routing.choices import Choices, UnqueuedChoices


@dataclass(frozen=True)
class Routing:
    """Choices for T = G·S tokens and E experts.

    `expert`, `weight`, `kept` and `position` list the choices by token under token choice; they are None under expert
    choice.
    """

    choices: Choices
    expert: Tensor | None
    """int64 `[T, K]`, by preference."""
    weight: Tensor | None
    """`[T, K]`, at least float32; 0 where not kept."""
    kept: Tensor | None
    """bool `[T, K]`."""
    known_position: Tensor | None
    """`position`, unless it is computed when it is read."""
    num_groups: int
    capacity: int | None
    """Rows that an expert accepts from one group; None disables dropping."""
    chosen: Tensor
    """int64 `[E]`: choices of each expert before capacity."""
    aux_loss: Tensor
    """Scalar without its coefficient: mean over the router's balancing units: groups, sequences or tokens."""
    aux_units: Tensor
    """Scalar: number of those units in this call."""
    z_loss: Tensor
    """Scalar without its coefficient: mean over real tokens of the squared logsumexp of the logits (ST-MoE, arXiv
    2202.08906, eq. 5)."""
    entropy: Tensor
    """Scalar, in nats: mean over real tokens of the entropy of the router probabilities."""
    rejected: Tensor
    """Fraction of the real tokens' choices rejected by the second-expert policy."""
    dropped: Tensor
    """Fraction of the real tokens' choices dropped because their expert was full."""
    num_choices: Tensor
    """int64 scalar: choices of real tokens, the denominator of both fractions."""
    num_tokens: Tensor
    """int64 scalar: real tokens."""
    weighted_loss: Tensor | None = None
    """Scalar: this call's share of both losses times their coefficients, where kernels computed it."""
    one: Tensor | None = None
    """Scalar 1 on the device, written with `weighted_loss`."""

    def detach(self) -> "Routing":
        """The same routing, detached from the autograd graph."""
        weight = None if self.weight is None else self.weight.detach()
        aux_loss, z_loss = self.aux_loss.detach(), self.z_loss.detach()
        return replace(
            self, choices=self.choices.detach(), weight=weight, aux_loss=aux_loss, z_loss=z_loss, weighted_loss=None
        )

    def scale_weights(self, factor_E: Tensor) -> "Routing":
        """The same routing, with weights multiplied by the factor of each expert."""
        choices = self.choices.scale_weights(factor_E)
        by_token = choices.by_token
        return replace(self, choices=choices, weight=None if by_token is None else by_token.weight)

    @cached_property
    def position(self) -> Tensor | None:
        """int64 `[T, K]`: position in the expert's buffer for the token's group; 0 where not kept."""
        return self.choices.queued.position if isinstance(self.choices, UnqueuedChoices) else self.known_position

    @property
    def load(self) -> Tensor:
        """int64 `[E]`: kept choices of each expert."""
        return self.choices.load

    @cached_property
    def assignments(self) -> Assignments:
        """Rows of the kept choices. Synchronizes the device to read their number."""
        return self.choices.to_rows(self.choices.device_counts.tolist())
