"""What every dispatcher does: carry tokens to their experts, and bring the weighted results back."""

from abc import ABC, abstractmethod

from torch import Tensor

from moe.dispatch.rows import Traffic
from moe.experts import Experts
from moe.routing import Assignments


class Dispatcher(ABC):
    """Tokens to experts to tokens."""

    @abstractmethod
    def __call__(self, x: Tensor, assignments: Assignments, experts: Experts) -> Tensor:
        """`[T, M]`: for each token of `x` `[T, M]` the weighted sum of its kept experts' outputs, zero where
        none was kept. Differentiable in `x`, the weights of `assignments` and the experts."""

    def take_traffic(self) -> Traffic:
        """What was exchanged with other ranks since this was last asked for."""
        return Traffic()
