"""Choices that a unit's time for one micro-batch depends on, and the passes that a micro-batch takes."""

from typing import NamedTuple

from moe.plan.candidate import Candidate, Recompute
from moe.plan.cost.units import BACKWARD, Products
from moe.plan.degrees import WorkSplit


class MicroBatch(NamedTuple):
    """Choices of a candidate that a unit's time for one micro-batch depends on."""

    groups: int
    recompute: Recompute
    split: WorkSplit
    num_chunks: int = 1
    ranks_per_node: int | None = None
    overlap: bool = False
    fsdp: int = 1
    expert_fsdp: int = 1
    """Ranks that parameters are gathered from."""
    prefetches: bool = True
    """Whether that hides behind arithmetic, as far as it can."""
    adds_gradients: bool = False
    """Whether gradients are added to those of other micro-batches."""

    @classmethod
    def from_candidate(cls, candidate: Candidate) -> "MicroBatch":
        degrees, options, gathers = candidate.degrees, candidate.options, candidate.gathers
        return cls(
            options.micro_batch_groups, options.recompute, degrees.split, options.num_chunks,
            options.ranks_per_node, options.overlap, degrees.fsdp if gathers else 1,
            degrees.expert_fsdp if gathers else 1, degrees.pipeline == 1 or not gathers,
            options.num_micro_batches > 1,
        )  # fmt: skip

    @property
    def full_recompute(self) -> float:
        """Forward passes of whole blocks that a backward pass recomputes."""
        return recomputed_passes(self.recompute)[0]

    @property
    def hidden_recompute(self) -> float:
        """Forward passes of the first products, which give hidden states, that a backward pass recomputes."""
        return recomputed_passes(self.recompute)[1]


def recomputed_passes(recompute: Recompute) -> tuple[float, float]:
    """(recomputed forward passes of whole blocks, of the products that give hidden states), per backward pass."""
    return (1.0 if recompute == "full" else 0.0), (0.0 if recompute == "none" else 1.0)


class Passes(NamedTuple):
    """Passes over a unit that one micro-batch takes."""

    of_reference: int
    """Forward passes of the model without its adapter, as the reference of preference learning."""
    forward: float
    """Forward passes of the trained model, with those that the backward pass recomputes."""
    backward: int

    @property
    def forwards(self) -> float:
        return self.of_reference + self.forward

    @property
    def over_activations(self) -> float:
        """Passes over activations, counted as forward ones, where all is trained."""
        return self.forwards + BACKWARD * self.backward

    def total(self, products: Products) -> float:
        """Matrix products of all of them."""
        backward = products.backward + products.again
        return self.of_reference + self.forward * products.forward + self.backward * backward
