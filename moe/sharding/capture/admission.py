"""Checks before a module is captured: modules and samples that no program can be made of are refused."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from moe.sharding import torch_private
from moe.sharding.parameters import APPLIED
from moe.spec import Problem, SpecError


def admit(module: nn.Module, sample: Any) -> None:
    """Raises SpecError for an object that is no module; for a module that is applied, wrapped, compiled, scripted,
    sharded, uninitialised or has hooks on gradients; and for a sample with other values than dense tensors and plain
    values."""
    if not isinstance(module, nn.Module):
        kind = module.__name__ if isinstance(module, type) else type(module).__name__
        raise SpecError(
            Problem(
                "wrong_type",
                "model",
                kind,
                "must be an nn.Module",
                "call its class, or put the function into one's forward",
            )
        )
    if not isinstance(sample, tuple | list):
        rule = "must be a tuple or list of the module's arguments, in order, or a dict of them by name"
        raise SpecError(Problem("wrong_type", "sample", type(sample).__name__, rule, "give (x,) for model(x)"))
    if problems := [*_of_modules(module), *_of_tensors(module), *_of_sample(sample)]:
        raise SpecError(problems)


def _of_modules(module: nn.Module) -> Iterator[Problem]:
    for path, submodule in module.named_modules():
        if submodule in APPLIED:
            rule, remedy = "is applied already", "give the module that it was made of"
        elif isinstance(submodule, DataParallel | DistributedDataParallel):
            rule, remedy = "shares its batch out by itself", "give the module within it, its `.module`"
        elif isinstance(submodule, torch.jit.ScriptModule):
            rule, remedy = "is scripted, which hides its operators", "give the module that it was made of"
        elif torch_private.is_compiled(submodule):
            rule = "is compiled already"
            remedy = "give the module that it was made of, and compile what sharding.apply gives"
        else:
            continue
        yield Problem("unsupported", path or "model", type(submodule).__name__, rule, remedy)
        return


def _of_tensors(module: nn.Module) -> Iterator[Problem]:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            yield Problem(
                "uninitialized",
                name,
                None,
                "has no shape yet",
                "run the module once on the sample before it is planned",
            )
        elif isinstance(tensor, DTensor):
            yield Problem(
                "unsupported",
                name,
                "DTensor",
                "is sharded already",
                "give the module with whole tensors, or on the meta device",
            )
        elif tensor.layout is not torch.strided:
            yield Problem(
                "unsupported", name, str(tensor.layout), "must be a dense tensor", "make it dense with `to_dense()`"
            )
        elif torch_private.has_hooks(tensor):
            yield Problem("unsupported", name, None, "has a hook on its gradient, which a program would not run",
                          "register it on applied.get_parameter(...), where it is given this rank's part")  # fmt: skip


def _of_sample(sample: Any) -> Iterator[Problem]:
    for number, leaf in enumerate(pytree.tree_leaves(list(sample))):
        name = f"inputs.{number}"
        if not isinstance(leaf, Tensor):
            if not torch_private.can_be_argument(leaf):
                rule = "is of a type that a captured graph does not take"
                remedy = "give tensors, numbers and text, or tuples, lists and dicts of them"
                yield Problem("wrong_type", name, type(leaf).__name__, rule, remedy)
            continue
        if leaf.layout is not torch.strided or leaf.is_nested:
            yield Problem("unsupported", name, str(leaf.layout), "must be a dense tensor", "pad it, or make it dense")
        elif leaf.requires_grad:
            yield Problem(
                "unsupported",
                name,
                "requires_grad",
                "asks for its gradient, which programs give of parameters alone",
                "detach it, or make it a parameter",
            )
        elif not leaf.numel():
            yield Problem("empty", name, list(leaf.shape), "has no elements", "give a sample with some")
