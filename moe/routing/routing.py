"""The result of routing: which tokens go to which experts, with what weights."""

from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from moe.routing.assignments import Assignments
from moe.routing.choices import Choices


@dataclass(frozen=True)
class Routing:
    """Choices of T = G·S tokens and E experts.

    `expert`, `weight`, `kept` and `position` show them by token in order, where tokens choose K experts each; where
    experts choose tokens, they are None.
    """

    choices: Choices
    expert: Tensor | None
    """int64 `[T, K]`, by preference."""
    weight: Tensor | None
    """`[T, K]`, at least float32; 0 where not kept."""
    kept: Tensor | None
    """bool `[T, K]`."""
    position: Tensor | None
    """int64 `[T, K]`: in the expert's buffer of the token's group; 0 where not kept."""
    num_groups: int
    capacity: int | None
    """Rows that an expert takes from one group; None routes without dropping."""
    chosen: Tensor
    """int64 `[E]`: choices of each expert before its capacity decided."""
    aux_loss: Tensor
    """Scalar before its coefficient: the mean over what the router balances, groups for one."""
    aux_units: Tensor
    """Scalar: how many of those this call has."""
    z_loss: Tensor
    """Scalar before its coefficient: mean over real tokens of the squared logsumexp of the logits (ST-MoE,
    arXiv 2202.08906, eq. 5)."""
    entropy: Tensor
    """Scalar, in nats: mean over real tokens of the entropy of their probabilities over the experts."""
    rejected: Tensor
    """Share of the real tokens' choices that the second-expert policy turned down."""
    dropped: Tensor
    """Share of the real tokens' choices that found their expert full."""
    num_choices: Tensor
    """int64 scalar: choices of real tokens, the denominator of both shares."""
    num_tokens: Tensor
    """int64 scalar: real tokens."""

    def detach(self) -> "Routing":
        """The same, only to be looked at."""
        weight = None if self.weight is None else self.weight.detach()
        aux_loss, z_loss = self.aux_loss.detach(), self.z_loss.detach()
        return replace(self, choices=self.choices.detach(), weight=weight, aux_loss=aux_loss, z_loss=z_loss)

    @property
    def load(self) -> Tensor:
        """int64 `[E]`: kept choices of each expert."""
        return self.choices.load

    @cached_property
    def assignments(self) -> Assignments:
        """The rows of kept choices. The device is asked how many there are."""
        return self.choices.to_rows(self.choices.device_counts.tolist())
