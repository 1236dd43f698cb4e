"""Which optimizers may work on parts of parameters: those that do the same for every element, whatever the others are;
and whether a `GradScaler` lets them.

All of torch's are known by name; one that is none of these is refused at its step where a parameter is cut, since it
would take this rank's part for the whole. Where none is cut, any optimizer sees what it would see on one device.
"""

import inspect
from typing import TypeVar
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from moe.sharding import torch_private
from moe.sharding.parameters import is_cut, noted_part
from moe.spec import Problem, SpecError

ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD",
)  # fmt: skip
"""Optimizers of torch that do the same for every element."""

_Kind = TypeVar("_Kind", bound=type[Optimizer])
_KNOWN: WeakSet[type[Optimizer]] = WeakSet(getattr(torch.optim, name) for name in ELEMENTWISE)


def elementwise(kind: _Kind) -> _Kind:
    """The optimizer's class, which says with this that it does the same for every element of a parameter, whatever
    other elements are, and that its state is of the parameter's shape or one number: then it may work on parts."""
    _KNOWN.add(kind)
    return kind


def is_elementwise(kind: type[Optimizer]) -> bool:
    """Whether a class is known to be. A subclass is where it computes by the same methods: one that has a step of its
    own, or prepares its state otherwise, may do anything there."""
    return kind in _KNOWN or any(
        issubclass(kind, known)
        and all(_method(kind, name) is _method(known, name) for name in ("step", "_init_group"))
        for known in _KNOWN
    )


def _method(kind: type[Optimizer], name: str) -> object:
    """As it was written: torch wraps the step of a class when the first optimizer of it is made."""
    found = getattr(kind, name, None)
    return None if found is None else inspect.unwrap(found)


def _check(optimizer: Optimizer, *_: object) -> None:
    kind = type(optimizer)
    parameters = (each for group in optimizer.param_groups for each in group["params"])
    if kind in _KNOWN or not any(map(is_cut, parameters)) or is_elementwise(kind):
        return
    remedy = (
        f"use one of {', '.join(ELEMENTWISE)}; mark a class of your own that does the same for every element with "
        '@sharding.elementwise; or plan with parameters whole: hints={"*": sharding.Replicate()}'
    )
    raise SpecError(Problem("optimizer", kind.__name__, "may use more than one element at a time, and has parts of "
                            "parameters here", remedy))  # fmt: skip


register_optimizer_step_pre_hook(_check)


def _share_found(optimizer: Optimizer, by_device: dict[torch.device, Tensor]) -> None:
    """Have all ranks leave out a step, and change the scale of the loss, where one's part is not finite. All ranks call
    it."""
    parameters = (each for group in optimizer.param_groups for each in group["params"] if is_cut(each))
    meshes = {id(part.applied): part.applied.mesh for each in parameters if (part := noted_part(each))}
    for mesh in meshes.values():
        for found in by_device.values():
            for axis in range(len(mesh.degrees)):
                found.copy_(mesh.all_reduce(found, axis, "max"))


torch_private.after_unscaling(_share_found)
