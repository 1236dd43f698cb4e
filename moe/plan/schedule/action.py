"""Actions of a pipeline schedule."""

from typing import Literal, NamedTuple

ActionKind = Literal["forward", "backward", "backward_input", "backward_weight"]
"""`backward` computes all gradients; `backward_input` and `backward_weight` split it (arXiv 2401.10241)."""


class Action(NamedTuple):
    """A pass of one stage on one micro-batch."""

    kind: ActionKind
    stage: int
    """In model order: stage 0 has the embedding, the last one the head."""
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind} of stage {self.stage}, micro-batch {self.micro_batch}"

    @property
    def completes_backward(self) -> bool:
        """Whether it completes a stage's backward pass of a micro-batch, whose activations are freed then."""
        return self.kind in ("backward", "backward_weight")


Order = tuple[Action, ...]
"""Actions of one pipeline rank, in the order in which it runs them."""


def without_padding(order: list[Action], num_micro_batches: int) -> Order:
    """Return the order without the micro-batches from `num_micro_batches` on.

    The remaining actions still cannot deadlock, since they depend on no other micro-batch's actions, and no more
    activations are in flight at any time.
    """
    return tuple(action for action in order if action.micro_batch < num_micro_batches)
