"""Numbers and arrays that a forward pass passes to torch. A captured graph contains them as constants, so they are
recorded in two runs, and refused if they differ."""

import itertools
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from moe.sharding import torch_private
from moe.sharding.lines import line_of
from moe.spec import Problem

_MISTRACED = {"multilabel_margin_loss": "includes classes after the first -1 when traced, but not when run"}
"""Functions whose trace computes something else than the function."""
_LARGEST = 10_000_000
"""Bytes above which the values of an array are not compared."""


class Constants(TorchFunctionMode):
    """Recorder of one run: arguments of torch functions that return tensors, by the user's line and the function."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[tuple[str, str], list[Any]] = defaultdict(list)
        self.problems: dict[Problem, None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(result)):
            leaves = pytree.tree_leaves((args, kwargs))
            line = line_of(sys._getframe(1))
            name = getattr(func, "__name__", "")
            self.values[line, name].append([_value_key(leaf) for leaf in leaves])
            if name in _MISTRACED:
                rule, remedy = _MISTRACED[name], "write out its computation"
                self.problems[Problem("not_capturable", line, name, rule, remedy)] = None
            if torch.is_grad_enabled() and any(_is_unregistered(leaf) for leaf in leaves):
                rule = "computes with an unregistered tensor that requires a gradient"
                remedy = "register it as an nn.Parameter, in an nn.ParameterList or in a submodule"
                self.problems[Problem("not_capturable", line, "requires_grad", rule, remedy)] = None
        return result

    def is_as(self, rerun: "Constants") -> bool:
        return self.values == rerun.values

    def changes(self, rerun: "Constants") -> Iterator[Problem]:
        """Problems of values that differ in another run which calls the function as often at the same line."""
        for (line, function), values in self.values.items():
            other_values = rerun.values.get((line, function), [])
            if len(values) == len(other_values) and values != other_values:
                name = "from_numpy" if function.startswith("lift_fresh") else function
                rule = f"is passed to {name} and differs between calls; a program would repeat the first value"
                remedy = "pass it to the module as a tensor, keep it in a buffer, or draw it with torch.rand"
                yield Problem("not_capturable", line or "forward", _difference(values, other_values), rule, remedy)


def _difference(values: list[list[Any]], other_values: list[list[Any]]) -> str:
    """The first value that differs, in both runs; "an array" if it is one."""
    for call, other_call in zip(values, other_values, strict=True):
        for before, after in itertools.zip_longest(call, other_call):
            if before != after:
                is_number = isinstance(before, str) and isinstance(after, str)
                return f"{before}, then {after}" if is_number else "an array"
    raise AssertionError(values)


def _is_real(value: Any) -> bool:
    if not isinstance(value, Tensor) or torch_private.is_traced(value) or value.layout is not torch.strided:
        return False
    try:
        return value.untyped_storage().device.type == "cpu"  # that of a fake tensor is meta
    except NotImplementedError:
        return False  # wrappers of torch.func's transforms have no storage


def _is_unregistered(value: Any) -> bool:
    return _is_real(value) and value.requires_grad


def _value_key(value: Any) -> Any:
    if _is_real(value):
        is_array = not value.requires_grad and value.dtype in _NUMPY
        with warnings.catch_warnings():
            # torch warns of tensors that were fake before, though these are real
            warnings.simplefilter("ignore")
            return array_key(value.numpy()) if is_array else None
    if isinstance(value, np.ndarray):
        return array_key(value)
    return repr(value) if isinstance(value, int | float | complex | np.generic) else None


_NUMPY = {torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
          torch.uint8, torch.bool, torch.complex64, torch.complex128}  # fmt: skip


def array_key(value: np.ndarray) -> Any:
    """Key of an array's contents. It covers only shape and dtype of large arrays and of arrays of objects."""
    is_read = not value.dtype.hasobject and value.nbytes <= _LARGEST
    return value.shape, value.dtype.str, hash(value.tobytes()) if is_read else None
