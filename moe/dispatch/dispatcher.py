"""Base classes of dispatchers, which send tokens to their experts and combine the weighted outputs."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from moe.dispatch.rows import Traffic
from moe.experts import LocalExperts
from moe.routing import Assignments, Choices


class Dispatcher(ABC):
    """Dispatches tokens to experts and combines the outputs."""

    @abstractmethod
    def __call__(self, x: Tensor, choices: Choices, experts: LocalExperts) -> Tensor:
        """Return `[T, M]`: each token's weighted sum of its kept experts' outputs, zero without any. Differentiable in
        `x` `[T, M]`, the weights of `choices` and the experts."""

    def take_traffic(self) -> Traffic:
        """Return and reset the traffic with other ranks."""
        return Traffic()


class DirectDispatcher(Dispatcher):
    """Dispatcher that sends rows directly to the ranks of their experts, with one device synchronization, between
    `counts` and `carry`."""

    def __call__(self, x: Tensor, choices: Choices, experts: LocalExperts) -> Tensor:
        host_counts, counts = on_host(choices.device_counts, self.counts(choices.load))
        return self.carry(x, choices.to_rows(host_counts.tolist()), counts, experts)

    @abstractmethod
    def counts(self, load: Tensor) -> Tensor:
        """int64, of any shape: counts the host needs, given `load` `[E]`, the rows leaving for each expert."""

    @abstractmethod
    def carry(self, x: Tensor, assignments: Assignments, counts: Tensor, experts: LocalExperts) -> Tensor:
        """Return the tokens' sums `[T, M]`; `counts` is on the host."""


def on_host(*asked: Tensor) -> list[Tensor]:
    """Copy int64 tensors to the host in one synchronization."""
    host_parts = (
        torch.cat([tensor.reshape(-1) for tensor in asked]).cpu().split([tensor.numel() for tensor in asked])
    )
    return [part.view(tensor.shape) for part, tensor in zip(host_parts, asked, strict=True)]
