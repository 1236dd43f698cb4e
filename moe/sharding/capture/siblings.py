"""Repeated modules: siblings in a list of modules that differ only in the values of their parameters."""

import types
from collections.abc import Hashable
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from moe.spec.parameter import Parameter

_PLAIN = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device, Enum)
_MODULE_DICTS = {"_parameters", "_buffers", "_modules"}
_NUMBER = "layer"


class _PlainObject:
    """An object without slots: its state is its `vars`."""


def number_of(module: nn.Module) -> int | None:
    """Number of a layer, if its class uses it only as a key of random numbers (`draws_by_key`)."""
    return vars(module).get(_NUMBER) if getattr(type(module), "draws_by_key", False) else None


def map_layer_numbers(first: nn.Module, second: nn.Module) -> dict[int, int]:
    """Numbers of layers within the second of two identical siblings, by those within the first."""
    numbers = (map(number_of, module.modules()) for module in (first, second))
    return {number: other_number for number, other_number in zip(*numbers, strict=True) if number is not None}


def find_repeats(module: nn.Module) -> list[list[nn.Module]]:
    """Lists of two or more identical siblings. No sibling is within another one."""
    sibling_groups: list[list[nn.Module]] = []
    inside: set[int] = set()
    for _, owner in module.named_modules():
        if not isinstance(owner, nn.ModuleList | nn.Sequential) or id(owner) in inside:
            continue
        kinds: dict[Hashable, list[nn.Module]] = {}
        for child in owner:
            if (sign := _sign(child)) is not None:
                kinds.setdefault(sign, []).append(child)
        for alike in kinds.values():
            if len(alike) > 1 and len({id(sibling) for sibling in alike}) == len(alike):
                sibling_groups.append(alike)
                inside.update(id(part) for sibling in alike for part in sibling.modules())
    return sibling_groups


def _sign(module: nn.Module) -> Hashable | None:
    """Key that is equal for modules that differ only in the values of their parameters; None if that is unknown."""
    parts: list[Hashable] = []
    numbers: dict[int, int] = {}
    for path, submodule in module.named_modules():
        attributes = vars(submodule)
        if any(attributes.get(name) for name in attributes if name.endswith("_hooks")) or "forward" in attributes:
            return None
        parts.append((path, type(submodule)))
        if (number := number_of(submodule)) is not None:
            parts.append(numbers.setdefault(number, len(numbers)))
            attributes = {name: value for name, value in attributes.items() if name != _NUMBER}
        for name in sorted(attributes.keys() - _MODULE_DICTS):
            if (sign := sign_of_value(attributes[name])) is None:
                return None
            parts.append((name, sign))
        for name, tensor in (*submodule._parameters.items(), *submodule._buffers.items()):
            facts = None if tensor is None else (tuple(tensor.shape), tensor.dtype, tensor.requires_grad, type(tensor))
            parts.append((name, facts))
    return tuple(parts)


def sign_of_value(value: Any, container_ids: tuple[int, ...] = ()) -> Hashable | None:
    """Key that is equal for equal values; None if equality is unknown. `container_ids` are the ids of the objects that
    contain the value."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return "function", id(value)
    if isinstance(value, list | tuple | set | frozenset | torch.Size):
        element_signs = [
            sign_of_value(element, container_ids)
            for element in (sorted(value, key=str) if isinstance(value, set | frozenset) else value)
        ]
        return None if None in element_signs else (type(value), *element_signs)
    if isinstance(value, dict):
        signs = [sign_of_value(element, container_ids) for element in value.values()]
        return None if None in signs else (type(value), *zip(value, signs, strict=True))
    if isinstance(value, Tensor):
        return None
    if isinstance(value, Parameter):  # a declaration; its name differs by layer
        return type(value), sign_of_value((value.shape, value.dims, value.std))
    is_plain = type(value).__basicsize__ == _PlainObject.__basicsize__ and id(value) not in container_ids
    state = sign_of_value(vars(value), (*container_ids, id(value))) if is_plain else None
    return ("object", id(value)) if state is None else (type(value), state)
