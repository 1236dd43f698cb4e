"""Parameter counts of a model; the base class of model specs."""

from abc import ABC, abstractmethod
from collections import Counter
from typing import TYPE_CHECKING

from moe.spec.base import Spec
from moe.spec.block import Blocks
from moe.spec.parameter import Parameter, with_prefix

if TYPE_CHECKING:
    from moe.spec.moe import MoESpec


class ParameterCounts(Spec, ABC):
    """Dimensions of a model, with the table of its parameters."""

    if TYPE_CHECKING:  # not a field here, so that each model keeps its own field order
        moe: MoESpec | None

    @property
    @abstractmethod
    def sides(self) -> int:
        """Number of stacks that share the batch's positions: 2 in an encoder-decoder."""

    @property
    @abstractmethod
    def heads(self) -> dict[str, int]:
        """Numbers of heads split over tensor ranks, by spec path."""

    @abstractmethod
    def ffn_dims(self) -> set[int]:
        """Hidden dimensions of the dense feed-forward layers."""

    @property
    @abstractmethod
    def moe_layers(self) -> tuple[int, ...]:
        """Layers with experts, from 0."""

    @abstractmethod
    def blocks(self) -> Blocks:
        """(path, block) pairs in execution order; the path is empty outside layers."""

    @property
    def keeps_frozen(self) -> bool:
        """Whether checkpoints omit frozen parameters, which can be loaded from the model's folder."""
        return False

    def parameters(self) -> tuple[Parameter, ...]:
        """All parameters by path."""
        return tuple(parameter for path, block in self.blocks() for parameter in with_prefix(path, block.parameters))

    def num_experts_total(self) -> int:
        return len(self.moe_layers) * self.moe.num_experts if self.moe else 0

    def num_parameters(self) -> int:
        """Number of all parameters."""
        blocks = Counter(block for _, block in self.blocks())
        return sum(parameter.numel * count for block, count in blocks.items() for parameter in block.parameters)

    def num_expert_parameters(self) -> int:
        """Number of parameters of routed experts."""
        return self.num_experts_total() * self.moe.parameters_per_expert if self.moe else 0

    def num_active_parameters(self) -> int:
        """Number of parameters without those of experts that a token does not use. Includes both stacks and all
        embedding tables, as in most published figures (GPT-OSS excludes the input embedding)."""
        active_expert_parameters = 0
        if self.moe is not None:
            active_expert_parameters = (
                len(self.moe_layers) * self.moe.experts_per_token * self.moe.parameters_per_expert
            )
        return self.num_parameters() - self.num_expert_parameters() + active_expert_parameters
