"""Plain descriptions of batches, which plans keep: shapes and dtypes of tensors, and other values."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe.sharding.arguments import Keywords
from moe.spec import spec_error


def describe(sample: Sequence[Any]) -> list[Any]:
    """Description of a batch as plain data. Of values that are not plain only the type is kept; such a batch has to be
    given again to apply the plan."""
    return [_describe(argument) for argument in sample]


def _describe(value: Any) -> Any:
    if isinstance(value, Tensor):
        return {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return {"items": [_describe(element) for element in value], "is_list": isinstance(value, list)}
    if isinstance(value, Keywords):
        return {"keywords": {name: _describe(entry) for name, entry in value.items()}}
    if _is_plain(value):
        return {"value": value}
    if type(value) is dict and all(type(name) is str for name in value):
        return {"dict": {name: _describe(entry) for name, entry in value.items()}}
    return {"type": type(value).__name__}


def _is_plain(value: Any) -> bool:
    """Whether a value is unchanged by conversion to JSON and back, where keys are strings and there are no tuples."""
    if type(value) is dict:
        return all(type(key) is str for key in value) and all(map(_is_plain, value.values()))
    if type(value) is list:
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def sample_from_description(descriptions: Sequence[Any]) -> tuple[Any, ...]:
    """A batch of meta tensors from its description. Raises SpecError if a value was not plain."""
    return tuple(_decode(description) for description in descriptions)


def _decode(description: Any) -> Any:
    match description:
        case {"shape": shape, "dtype": dtype}:
            return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        case {"items": items, "is_list": is_list}:
            elements = [_decode(element) for element in items]
            return elements if is_list else tuple(elements)
        case {"keywords": entries}:
            return Keywords({name: _decode(entry) for name, entry in entries.items()})
        case {"dict": entries}:
            return {name: _decode(entry) for name, entry in entries.items()}
        case {"value": value}:
            return value
        case {"type": kind}:
            raise spec_error(
                "wrong_type", "sample", kind, "cannot be stored in a plan", "pass apply(..., sample=batch)"
            )
    raise spec_error("wrong_type", "plan.sample", description, "is not a batch", "plan again")
