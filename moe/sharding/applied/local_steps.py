"""Optimizer steps on this rank's shards as plain tensors. DTensor's dispatch takes longer than the update of a small
parameter, and elementwise updates do not need it."""

import functools
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from moe.sharding import torch_private

ELEMENTWISE = (SGD, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Rprop, Adagrad, Adadelta, ASGD)
_SINGLE = frozenset({"step", "mu_product", "eta", "mu"})
"""States that are one number per parameter, whatever its shape."""
AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def local_steps(optimizer: AnyOptimizer) -> AnyOptimizer:
    """Make each step of an optimizer update this rank's shards as plain tensors. Returns the same optimizer. Between
    steps its parameters, gradients and states are DTensors as before, so that checkpoints, clipping and schedulers
    work unchanged. Hooks of its steps see plain tensors.

    Raises TypeError unless it is one of torch's elementwise optimizers: others, such as those that use the norm of a
    parameter, need all of its shards.
    """
    if type(optimizer) not in ELEMENTWISE:
        names = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise TypeError(
            f"{type(optimizer).__name__} is not one of torch's elementwise optimizers ({names}), so the update of one "
            "shard may depend on others; use it without local_steps"
        )
    step, shards = optimizer.step, _PlainShards()

    @functools.wraps(step)
    def on_shards(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with shards.in_place_of_dtensors(self):
            step()
        return loss

    optimizer.step = types.MethodType(on_shards, optimizer)  # type: ignore[method-assign]
    return optimizer


class _PlainShards:
    """Plain parameters and states that share the memory of the DTensors' shards."""

    def __init__(self) -> None:
        self._parameters: dict[DTensor, nn.Parameter] = {}
        self._states: dict[DTensor, _PlainState] = {}

    @contextmanager
    def in_place_of_dtensors(self, optimizer: Optimizer) -> Iterator[None]:
        """Context in which the optimizer has plain parameters, gradients and states."""
        groups, state = optimizer.param_groups, optimizer.state
        originals = [group["params"] for group in groups]
        plain: defaultdict[Any, Any] = defaultdict(dict)
        with torch.no_grad():
            shards = [[self._shard_of(parameter) for parameter in parameters] for parameters in originals]
            pairs = list(zip(chain(*originals), chain(*shards), strict=True))
            for parameter, shard in pairs:
                if (parameter_state := state.get(parameter)) is not None:
                    plain[shard] = self._plain_state(parameter, parameter_state)
        try:
            for group, plain_parameters in zip(groups, shards, strict=True):
                group["params"] = plain_parameters
            optimizer.state = plain
            yield
        finally:
            for group, parameters in zip(groups, originals, strict=True):
                group["params"] = parameters
            optimizer.state = state
            with torch.no_grad():
                for parameter, shard in pairs:
                    if shard is not parameter:
                        shard.grad = None
                    if (shard_state := plain.get(shard)) is not None:
                        self._write_back(state, parameter, shard_state)

    def _shard_of(self, parameter: Tensor) -> Tensor:
        if not isinstance(parameter, DTensor):
            return parameter
        local = parameter.to_local()
        shard = self._parameters.get(parameter)
        if shard is None or shard.data_ptr() != local.data_ptr() or shard.shape != local.shape:
            shard = self._parameters[parameter] = nn.Parameter(local, requires_grad=parameter.requires_grad)
        gradient: Any = parameter.grad
        if gradient is not None:
            if gradient.placements != parameter.placements:
                gradient = gradient.redistribute(placements=parameter.placements)
            shard.grad = gradient.to_local()
        return shard

    def _plain_state(self, parameter: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(parameter, DTensor):
            return state
        cache_entry = self._states.get(parameter)
        if cache_entry is None or not cache_entry.is_of(state):
            plain = {name: value.to_local() if isinstance(value, DTensor) else value for name, value in state.items()}
            cache_entry = self._states[parameter] = _PlainState(plain, tuple(plain.values()), tuple(state.values()))
        return cache_entry.plain

    def _write_back(self, states: dict[Any, Any], parameter: Tensor, plain: dict[str, Any]) -> None:
        """Store new states: those of the parameter's shape become DTensors with its placements."""
        if not isinstance(parameter, DTensor):
            states[parameter] = plain
            return
        cache_entry = self._states.get(parameter)
        if cache_entry is not None and cache_entry.plain is plain and cache_entry.is_unchanged():
            return
        state, shape = states[parameter], parameter.to_local().shape
        for name, value in plain.items():
            state_value = state.get(name)
            if isinstance(state_value, DTensor) and state_value.to_local() is value:
                continue
            is_shard = isinstance(value, Tensor) and value.shape == shape and name not in _SINGLE
            state[name] = torch_private.dtensor_like(parameter, value) if is_shard else value
        self._states[parameter] = _PlainState(plain, tuple(plain.values()), tuple(state.values()))


@dataclass(frozen=True)
class _PlainState:
    """Optimizer state of a parameter as plain tensors, and the state with DTensors that it was made from."""

    plain: dict[str, Any]
    values: tuple[Any, ...]
    """Values of `plain` when it was made."""
    originals: tuple[Any, ...]
    """Values of the state with DTensors."""

    def is_of(self, state: dict[str, Any]) -> bool:
        """Whether this was made from that state with DTensors."""
        return len(state) == len(self.originals) and all(map(is_, state.values(), self.originals))

    def is_unchanged(self) -> bool:
        return len(self.plain) == len(self.values) and all(map(is_, self.plain.values(), self.values))
