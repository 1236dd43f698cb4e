"""Exponential moving average of the trained weights, sharded like their optimizer state."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from moe.parallel import OptimizerShards, values_changed
from moe.train.optimizer.found_inf import select


class WeightAverage:
    """Moving average A of weights W: A = W after the first step, then decay · A + (1 - decay) · W, as in torch's
    `AveragedModel`. Frozen parameters and routers' selection biases are not averaged."""

    def __init__(self, decay: float, model: nn.Module, shards: OptimizerShards) -> None:
        self._decay, self._model, self._shards = decay, model, shards
        self.parameters = [parameter for parameter in shards.parameters if parameter.local.requires_grad]
        self.tensors = [parameter.local.detach().clone() for parameter in self.parameters]
        """Averages, in the order of `parameters`."""

    @torch.no_grad()
    def update(self, step: int, found_inf: Tensor | None = None) -> None:
        """Add the weights after `step` + 1 updates, unless `found_inf` (scalar on their device) is 1."""
        weight = 1 - self._decay if step else 1.0
        if found_inf is None:
            torch._foreach_lerp_(self.tensors, self._weights(), weight)
            return
        for average, current in zip(self.tensors, self._weights(), strict=True):
            average.lerp_(select(found_inf, average, current), weight)

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Context in which the model has the averages as its weights. Collective."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        with self._shards.changing():
            for average, weight in zip(self.tensors, self._weights(), strict=True):
                weights = weight.clone()
                weight.copy_(average)
                average.copy_(weights)
        values_changed(self.parameters)
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # free what it has gathered of the other weights

    def _weights(self) -> list[Tensor]:
        return [parameter.local for parameter in self.parameters]
