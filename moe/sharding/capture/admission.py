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
from moe.spec import Problem, SpecError, spec_error


def admit(module: nn.Module, sample: Any) -> None:
    """Raises SpecError for an object that is not a module; for a module that is applied, wrapped, compiled, scripted,
    sharded, uninitialised or has hooks on gradients; and for a sample with other values than dense tensors and plain
    values."""
    if not isinstance(module, nn.Module):
        kind = module.__name__ if isinstance(module, type) else type(module).__name__
        rule, remedy = "must be an nn.Module", "instantiate the class, or call the function from a module's forward"
        raise spec_error("wrong_type", "model", kind, rule, remedy)
    if not isinstance(sample, tuple | list):
        rule = "must be a tuple or list of arguments, or a dict of arguments by name"
        raise spec_error("wrong_type", "sample", type(sample).__name__, rule, "pass (x,) for model(x)")
    if problems := [*_module_problems(module), *_tensor_problems(module), *_sample_problems(sample)]:
        raise SpecError(problems)


def _module_problems(module: nn.Module) -> Iterator[Problem]:
    for path, submodule in module.named_modules():
        if submodule in APPLIED:
            rule, remedy = "is already applied", "pass the original module"
        elif isinstance(submodule, DataParallel | DistributedDataParallel):
            rule, remedy = "splits its batch itself", "pass its `.module`"
        elif isinstance(submodule, torch.jit.ScriptModule):
            rule, remedy = "is scripted, which hides its operators", "pass the original module"
        elif torch_private.is_compiled(submodule):
            rule, remedy = "is already compiled", "pass the original module, and compile the applied one"
        else:
            continue
        yield Problem("unsupported", path or "model", type(submodule).__name__, rule, remedy)
        return


def _tensor_problems(module: nn.Module) -> Iterator[Problem]:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            yield Problem(
                "uninitialized", name, None, "has no shape yet", "run the module once on the sample before planning"
            )
        elif isinstance(tensor, DTensor):
            rule, remedy = "is already sharded", "pass the module with whole tensors or on the meta device"
            yield Problem("unsupported", name, "DTensor", rule, remedy)
        elif tensor.layout is not torch.strided:
            yield Problem(
                "unsupported", name, str(tensor.layout), "must be a dense tensor", "convert it with `to_dense()`"
            )
        elif torch_private.has_hooks(tensor):
            rule = "has a gradient hook, which a program would not run"
            remedy = "register it on applied.get_parameter(...), where it receives this rank's shard"
            yield Problem("unsupported", name, None, rule, remedy)


def _sample_problems(sample: Any) -> Iterator[Problem]:
    for number, leaf in enumerate(pytree.tree_leaves(list(sample))):
        name = f"inputs.{number}"
        if not isinstance(leaf, Tensor):
            if not torch_private.can_be_argument(leaf):
                rule = "has a type that a captured graph does not accept"
                remedy = "use tensors, numbers and strings, or tuples, lists and dicts of them"
                yield Problem("wrong_type", name, type(leaf).__name__, rule, remedy)
            continue
        if leaf.layout is not torch.strided or leaf.is_nested:
            rule, remedy = "must be a dense tensor", "pad it, or convert it to a dense tensor"
            yield Problem("unsupported", name, str(leaf.layout), rule, remedy)
        elif leaf.requires_grad:
            rule = "requires a gradient, which is supported for parameters only"
            remedy = "detach it, or make it a parameter"
            yield Problem("unsupported", name, "requires_grad", rule, remedy)
        elif not leaf.numel():
            yield Problem("empty", name, list(leaf.shape), "has no elements", "use a non-empty sample")
