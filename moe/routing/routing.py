"""The result of routing: which tokens go to which experts, with what weights."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Assignments:
    """The kept choices, a row for each, ordered by expert, then preference, then token: what dispatchers consume.

    Of n rows: `token`, `expert` and `position` (in the expert's buffer of the token's group) int64 `[n]`,
    `weight` `[n]` at least float32.
    """

    token: Tensor
    expert: Tensor
    weight: Tensor
    position: Tensor
    row_of_choice: Tensor
    """int64 `[T, K]`: the row of each token's choices, n where not kept."""


@dataclass(frozen=True)
class Routing:
    """Assignments of T = G·S tokens to E experts, at most K each, by token in order."""

    assignments: Assignments
    expert: Tensor
    """int64 `[T, K]`, by preference."""
    weight: Tensor
    """`[T, K]`, at least float32; 0 where not kept."""
    kept: Tensor
    """bool `[T, K]`."""
    position: Tensor
    """int64 `[T, K]`: in the expert's buffer of the token's group."""
    num_groups: int
    capacity: int | None
    """Rows that an expert takes from one group; None routes without dropping."""
    load: Tensor
    """int64 `[E]`: kept choices of each expert."""
    aux_loss: Tensor
    """Scalar before its coefficient: the mean over these groups."""
    z_loss: Tensor
    """Scalar before its coefficient: mean over real tokens of the squared logsumexp of the logits (ST-MoE,
    arXiv 2202.08906, eq. 5)."""
    rejected: Tensor
    """Share of the real tokens' choices that the second-expert policy turned down."""
    dropped: Tensor
    """Share of the real tokens' choices that found their expert full."""
    num_choices: Tensor
    """int64 scalar: choices of real tokens, the denominator of both shares."""
