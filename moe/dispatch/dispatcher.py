"""Contract of dispatchers: they carry tokens to their experts, and bring the weighted results back."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from moe.dispatch.rows import Traffic
from moe.experts import LocalExperts
from moe.routing import Assignments, Choices


class Dispatcher(ABC):
    """Tokens to experts to tokens."""

    @abstractmethod
    def __call__(self, x: Tensor, choices: Choices, experts: LocalExperts) -> Tensor:
        """`[T, M]`: for each token of `x` `[T, M]` the weighted sum of its kept experts' outputs, zero where
        none was kept. Differentiable in `x`, the weights of `choices` and the experts."""

    def take_traffic(self) -> Traffic:
        """Traffic with other ranks since the last call."""
        return Traffic()


class DirectDispatcher(Dispatcher):
    """One that carries rows straight to the ranks of their experts, in two halves: the host waits for the device in
    between, once."""

    def __call__(self, x: Tensor, choices: Choices, experts: LocalExperts) -> Tensor:
        host_counts, counts = on_host(choices.device_counts, self.counts(choices.load))
        return self.carry(x, choices.to_rows(host_counts.tolist()), counts, experts)

    @abstractmethod
    def counts(self, load: Tensor) -> Tensor:
        """int64, of any shape: all else that the host has to know where `load` `[E]` rows leave for each expert."""

    @abstractmethod
    def carry(self, x: Tensor, assignments: Assignments, counts: Tensor, experts: LocalExperts) -> Tensor:
        """The tokens' sums, once the host knows `counts`."""


def on_host(*asked: Tensor) -> list[Tensor]:
    """Each of these int64 tensors on the host, which waits for the device once for all."""
    host_parts = (
        torch.cat([tensor.reshape(-1) for tensor in asked]).cpu().split([tensor.numel() for tensor in asked])
    )
    return [part.view(tensor.shape) for part, tensor in zip(host_parts, asked, strict=True)]
