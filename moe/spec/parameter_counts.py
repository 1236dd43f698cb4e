"""Counts of a model's parameters, by its blocks: the contract of every kind of model."""

from abc import ABC, abstractmethod
from collections import Counter
from typing import TYPE_CHECKING

from moe.spec.base import Spec
from moe.spec.block import Blocks
from moe.spec.parameter import Parameter, within

if TYPE_CHECKING:
    from moe.spec.moe import MoESpec


class Counted(Spec, ABC):
    """The dimensions of a model, with the table of its parameters."""

    if TYPE_CHECKING:  # fields keep the order in which each model declares them
        moe: MoESpec | None

    @property
    @abstractmethod
    def sides(self) -> int:
        """Runs of positions that the batch's positions are shared among: in an encoder-decoder each passes through one
        of two stacks."""

    @property
    @abstractmethod
    def heads(self) -> dict[str, int]:
        """Numbers of heads that tensor ranks share out, by their places in the spec."""

    @abstractmethod
    def ffn_dims(self) -> set[int]:
        """Hidden widths of the feed-forward layers without experts."""

    @property
    @abstractmethod
    def moe_layers(self) -> tuple[int, ...]:
        """The layers with experts, counted from 0."""

    @abstractmethod
    def blocks(self) -> Blocks:
        """Every block with its path, in the order of use; the path of what lies in none of the modules is empty."""

    @property
    def keeps_frozen(self) -> bool:
        """Whether what the table says is frozen lies where the model came from, so that checkpoints do without."""
        return False

    def parameters(self) -> tuple[Parameter, ...]:
        """All of them by their paths in the model, block by block."""
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
        """Weights inside routed experts: two matrices of M x H each, three where they have a gate, and biases."""
        return self.num_experts_total() * self.moe.parameters_per_expert if self.moe else 0

    def num_active_parameters(self) -> int:
        """All weights but those of the experts that a token does not choose. Of both stacks, where there are two;
        embedding tables count whole, as in most published figures (GPT-OSS leaves the first out)."""
        active_expert_parameters = 0
        if self.moe is not None:
            active_expert_parameters = (
                len(self.moe_layers) * self.moe.experts_per_token * self.moe.parameters_per_expert
            )
        return self.num_parameters() - self.num_expert_parameters() + active_expert_parameters
