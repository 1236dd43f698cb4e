"""Cache key of a unit's time for one micro-batch, and its passes."""

from typing import NamedTuple

from moe.plan.candidate import Candidate, Recompute
from moe.plan.cost.units import BACKWARD, Products
from moe.plan.degrees import WorkSplit
from moe.spec.parallel import ContextExchange


class MicroBatch(NamedTuple):
    """Choices of a candidate that affect a unit's time for one micro-batch."""

    groups: int
    recompute: Recompute
    split: WorkSplit
    num_chunks: int = 1
    ranks_per_node: int | None = None
    overlap: bool = False
    fsdp: int = 1
    expert_fsdp: int = 1
    """Ranks that expert parameters (`fsdp`: others) are gathered from; 1 if not gathered."""
    prefetches: bool = True
    """Whether parameter gathers overlap with computation."""
    adds_gradients: bool = False
    """Whether gradients are accumulated over micro-batches."""
    context_exchange: ContextExchange = "gather"

    @classmethod
    def from_candidate(cls, candidate: Candidate) -> "MicroBatch":
        degrees, options, gathers = candidate.degrees, candidate.options, candidate.gathers
        return cls(
            options.micro_batch_groups, options.recompute, degrees.split, options.num_chunks,
            options.ranks_per_node, options.overlap, degrees.fsdp if gathers else 1,
            degrees.expert_fsdp if gathers else 1, degrees.pipeline == 1 or not gathers,
            options.num_micro_batches > 1, options.context_exchange,
        )  # fmt: skip

    @property
    def full_recompute(self) -> float:
        return recomputed_passes(self.recompute)[0]

    @property
    def hidden_recompute(self) -> float:
        """Recomputed forward passes of the products that give hidden states."""
        return recomputed_passes(self.recompute)[1]


def recomputed_passes(recompute: Recompute) -> tuple[float, float]:
    """Forward passes in the backward pass: (of whole blocks, of the products that give hidden states)."""
    return (1.0 if recompute == "full" else 0.0), (0.0 if recompute == "none" else 1.0)


class Passes(NamedTuple):
    """Passes over a unit for one micro-batch."""

    reference: int
    """Forward passes of the DPO reference model."""
    forward: float
    """Forward passes of the trained model, recomputation included."""
    backward: int

    @property
    def forwards(self) -> float:
        return self.reference + self.forward

    @property
    def over_activations(self) -> float:
        """Passes over activations, in forward passes, if all is trained."""
        return self.forwards + BACKWARD * self.backward

    def total(self, products: Products) -> float:
        """Matrix products, in forward passes without adapters."""
        backward = products.backward + products.recomputed
        return self.reference + self.forward * products.forward + self.backward * backward
