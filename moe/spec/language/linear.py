"""Layers that mix tokens at a cost per token that does not depend on the sequence's length."""

from abc import ABC, abstractmethod

from moe.spec.base import Spec
from moe.spec.block import AttentionDims
from moe.spec.parameter import Parameter


class LinearAttentionSpec(Spec, ABC):
    """Layer with a state of fixed size instead of keys and values."""

    @abstractmethod
    def heads(self, model_dim: int) -> dict[str, int]:
        """Numbers that the tensor degree must divide, by path in the model."""

    @abstractmethod
    def parameters(self, model_dim: int) -> tuple[Parameter, ...]:
        """Parameters of a layer, ordered such that tensor ranks have whole heads."""

    @abstractmethod
    def dims(self, model_dim: int) -> AttentionDims:
        """Dimensions of a layer."""
