"""Parameter counts of a model by its blocks: the base class of every kind of model."""

from abc import ABC, abstractmethod
from collections import Counter
from typing import TYPE_CHECKING

from moe.spec.base import Spec
from moe.spec.block import Blocks
from moe.spec.parameter import Parameter, within

if TYPE_CHECKING:
    from moe.spec.moe import MoESpec


class Counted(Spec, ABC):
    """Dimensions of a model, with the table of its parameters."""

    if TYPE_CHECKING:  # not a field here, so that each model keeps its own field order
        moe: MoESpec | None

    @property
    @abstractmethod
    def sides(self) -> int:
        """Number of stacks that share the batch's positions: 2 in an encoder-decoder, where each position passes
        through one."""

    @property
    @abstractmethod
    def heads(self) -> dict[str, int]:
        """Numbers of heads that tensor ranks split, by spec path."""

    @abstractmethod
    def ffn_dims(self) -> set[int]:
        """Hidden dimensions of the dense feed-forward layers."""

    @property
    @abstractmethod
    def moe_layers(self) -> tuple[int, ...]:
        """Layers with experts, from 0."""

    @abstractmethod
    def blocks(self) -> Blocks:
        """Yield (path, block) pairs in execution order; the path is empty for parameters outside the layers."""

    @property
    def keeps_frozen(self) -> bool:
        """Whether frozen parameters can be reloaded from the model's folder, so that checkpoints omit them."""
        return False

    def parameters(self) -> tuple[Parameter, ...]:
        """Return all parameters by path, block by block."""
        return tuple(
            parameter for path, block in self.blocks() for parameter in within(path, block.parameters)
        )

    def num_experts_total(self) -> int:
        return len(self.moe_layers) * self.moe.num_experts if self.moe else 0

    def num_parameters(self) -> int:
        """All weights: embeddings, attention, norms, feed-forward layers, routers, shared and routed experts."""
        blocks = Counter(block for _, block in self.blocks())
        return sum(
            parameter.numel * count for block, count in blocks.items() for parameter in block.parameters
        )

    def num_expert_parameters(self) -> int:
        """Weights of routed experts: two matrices of M x H each, three if gated, and biases."""
        return self.num_experts_total() * self.moe.parameters_per_expert if self.moe else 0

    def num_active_parameters(self) -> int:
        """All weights except those of the experts that a token does not choose. Includes both stacks of an
        encoder-decoder, and whole embedding tables, as in most published figures (GPT-OSS excludes the input
        embedding)."""
        active_expert_parameters = 0
        if self.moe is not None:
            active_expert_parameters = (
                len(self.moe_layers) * self.moe.experts_per_token * self.moe.parameters_per_expert
            )
        return self.num_parameters() - self.num_expert_parameters() + active_expert_parameters
