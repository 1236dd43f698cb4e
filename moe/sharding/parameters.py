"""Parts of parameters as plain tensors, for torch's optimizers: what these may and may not do with them."""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from moe.sharding import torch_private
from moe.spec import Problem, SpecError

ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD",
)  # fmt: skip
"""Optimizers of torch that do the same for every element, whatever other elements are."""

_CLIPPING = "torch.nn.utils.clip_grad"
_BY_ELEMENT = {"clip_grad_value_"}
_GRAD = torch_private.GRADIENT


class PartOfParameter(nn.Parameter):
    """This rank's part of a parameter, a plain tensor in all that it does.

    Torch's own clipping by norm, which would take the norm of this rank's parts for that of all, is refused where it
    asks for the gradient.
    """

    applied: Any = None
    """The module that it belongs to."""
    is_first: bool = True
    """Whether this rank is the first of those that have this part."""
    is_cut: bool = False
    """Whether other ranks have other parts."""

    @property
    def grad(self) -> Tensor | None:
        frame = sys._getframe(1)
        if frame.f_globals.get("__name__") == _CLIPPING:
            names = {frame.f_code.co_name, frame.f_back.f_code.co_name if frame.f_back else ""}
            if not names & _BY_ELEMENT:
                raise RuntimeError(
                    "torch.nn.utils.clip_grad_norm_ knows this rank's parts only; use moe.sharding.clip_grad_norm_"
                )
        return _GRAD.__get__(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        _GRAD.__delete__(self)


torch_private.allow_foreach(PartOfParameter)


def _check_optimizer(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    kind = type(optimizer)
    if kind.__name__ in ELEMENTWISE and kind.__module__.startswith("torch.optim"):
        return
    if any(getattr(each, "is_cut", False) for group in optimizer.param_groups for each in group["params"]):
        raise SpecError(Problem("optimizer", kind.__name__, "may use more than one element at a time, and has parts of "
                                "parameters here", f"use one of {', '.join(ELEMENTWISE)}, or plan with parameters "
                                'replicated: hints={"*": sharding.Replicate()}'))  # fmt: skip


register_optimizer_step_pre_hook(_check_optimizer)
