"""Hints: placements of tensors that a user requests (GShard's annotations, arXiv 2006.16668, section 3.2)."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, get_args

from moe.sharding.hints.device_arrays import pin_of_array
from moe.sharding.placement import WHOLE, AxisPlacement, Combine, split
from moe.spec import Problem, SpecError, spec_error

Pin = tuple[AxisPlacement | None, ...]
"""Requested placement along each mesh axis; None for an axis along which any placement is allowed."""


@dataclass(frozen=True)
class Split:
    """Split one dimension over all devices, or over one named mesh axis; any placement is allowed along the others."""

    dim: int
    axis: str | None = None

    def __post_init__(self) -> None:
        _check_dim("Split.dim", self.dim)
        if self.axis is not None and not isinstance(self.axis, str):
            rule, remedy = "must be the name of a mesh axis", "use a string, or omit it"
            raise spec_error("wrong_type", "Split.axis", self.axis, rule, remedy)

    def __str__(self) -> str:
        return f"Split({self.dim})" if self.axis is None else f"Split({self.dim}, axis={self.axis!r})"


@dataclass(frozen=True)
class Replicate:
    """Replicate the tensor on every device."""

    def __str__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True)
class Shard:
    """Split dimensions over named mesh axes; replicate the tensor along the others."""

    dims: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_dims("Shard.dims", self.dims)

    def __str__(self) -> str:
        return f"Shard({dict(self.dims)})"


@dataclass(frozen=True)
class Devices:
    """Device assignment of the paper: an array with as many dimensions as the tensor. Its shape is the number of parts
    of each dimension, and its entries are the devices that have the slices, in any order that is the same for all
    arrays of a plan."""

    ids: tuple[Any, ...]
    """Nested tuples, as deep as the tensor has dimensions."""

    def __str__(self) -> str:
        return f"Devices({list(self.ids)})"


Hint = Split | Replicate | Shard | Devices


@dataclass(frozen=True)
class Partial:
    """Partial results of a manual part, which are summed (or combined otherwise) over one mesh axis. Along other axes
    they are split as `dims` say, or whole."""

    axis: str
    combine: Combine = "sum"
    dims: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_dims("Partial.dims", self.dims)
        if self.combine not in get_args(Combine):
            remedy = f"use one of {', '.join(get_args(Combine))}"
            rule = "is not a way to combine partial results"
            raise spec_error("not_a_choice", "Partial.combine", self.combine, rule, remedy)


def _check_dims(path: str, dims: Any) -> None:
    """Raises SpecError if `dims` are not dimensions by mesh axis."""
    if not isinstance(dims, Mapping) or not all(isinstance(axis, str) for axis in dims):
        raise spec_error("wrong_type", path, dims, "must be a dict of dimensions by mesh axis", 'use {"data": 0}')
    for dim in dims.values():
        _check_dim(path, dim)


def _check_dim(path: str, dim: Any) -> None:
    if type(dim) is not int:
        raise spec_error("wrong_type", path, dim, "must be a whole number", "use the number of a dimension")


def axes_named(hints: Iterable[Hint]) -> tuple[str, ...]:
    """Mesh axes that hints name, in the order in which they do."""
    axes: dict[str, None] = {}
    for hint in hints:
        match hint:
            case Split(axis=str(axis)):
                axes[axis] = None
            case Shard(dims=dims):
                axes.update(dict.fromkeys(dims))
    return tuple(axes)


def hint_to_plain(hint: Hint) -> dict[str, Any]:
    """The hint as plain data, for JSON."""
    match hint:
        case Split(dim=dim, axis=axis):
            return {"split": dim, "axis": axis}
        case Shard(dims=dims):
            return {"shard": dict(dims)}
        case Replicate():
            return {"replicate": True}
        case Devices(ids=ids):
            return {"devices": ids}
    raise AssertionError(hint)


def hint_from_plain(data: Any, path: str = "hints") -> Hint:
    """The hint that plain data describes. Raises SpecError."""
    match data:
        case {"split": dim, "axis": str(axis)} if type(dim) is int and len(data) == 2:
            return Split(dim, axis)
        case {"split": dim, **rest} if type(dim) is int and rest in ({}, {"axis": None}):
            return Split(dim)
        case {"shard": dict(dims)} if all(type(dim) is int for dim in dims.values()) and len(data) == 1:
            return Shard(dims)
        case {"replicate": True} if len(data) == 1:
            return Replicate()
        case {"devices": list() | tuple() as ids} if len(data) == 1:
            return Devices(_freeze(ids))
    forms = "{split: 0}, {split: 0, axis: expert}, {shard: {data: 0}}, {devices: [[0, 1]]} or {replicate: true}"
    raise spec_error("wrong_type", path, data, "is not a hint", f"use {forms}")


def pin_of(
    hint: Hint, num_dims: int, mesh: Mapping[str, int], path: str, line: str | None = None, devices: Sequence[int] = ()
) -> Pin:
    """Placements along the axes of a mesh. `devices` gives the device number at each place of the mesh, last axis
    fastest; by default 0, 1, 2 and so on. Raises SpecError for a dimension or an axis that does not exist."""
    hint_path, axes = f"{path} ({line})" if line else path, tuple(mesh)

    def check_dim(dim: int) -> int:
        if not -num_dims <= dim < num_dims:
            remedy = f"use a dimension from 0 to {num_dims - 1}" if num_dims else "use Replicate()"
            rule = f"must split a dimension of a {num_dims}-dimensional tensor"
            raise spec_error("out_of_range", hint_path, str(hint), rule, remedy)
        return dim % num_dims

    def check_axis(axis: str) -> str:
        if axis not in axes:
            rule = f"must name an axis of the mesh (={', '.join(axes)})"
            remedy = "use one of these, or pass plan(mesh={name: size})"
            raise spec_error("not_a_choice", hint_path, str(hint), rule, remedy)
        return axis

    match hint:
        case Replicate():
            return (WHOLE,) * len(axes)
        case Split(dim=dim, axis=None):
            return (split(check_dim(dim)),) * len(axes)
        case Split(dim=dim, axis=str(axis)):
            split_placement = split(check_dim(dim))
            return tuple(split_placement if name == check_axis(axis) else None for name in axes)
        case Shard(dims=dims):
            cuts = {check_axis(axis): split(check_dim(dim)) for axis, dim in dims.items()}
            return tuple(cuts.get(name, WHOLE) for name in axes)
        case Devices(ids=ids):
            return pin_of_array(ids, num_dims, mesh, hint_path, devices)
    raise AssertionError(hint)


def _freeze(ids: Any) -> Any:
    return tuple(map(_freeze, ids)) if isinstance(ids, list | tuple) else ids


def match_hints(
    hints: Mapping[str, Hint], names: Sequence[str], first_names: Mapping[str, str] | None = None
) -> dict[str, tuple[str, Hint]]:
    """(pattern, hint) by name, for each name that a pattern matches; a full name precedes patterns. The name of a
    tensor with several names is the one that `first_names` gives.

    Raises SpecError for a pattern that matches nothing, and for a name that two patterns give different hints.
    """
    problems: list[Problem] = []
    matches: dict[str, tuple[str, Hint]] = {}

    def first_of(name: str) -> str:
        return (first_names or {}).get(name, name)

    for pattern, hint in hints.items():
        tensor_names = dict.fromkeys(first_of(name) for name in names if name == pattern or fnmatchcase(name, pattern))
        if not tensor_names:
            similar_names = difflib.get_close_matches(pattern.replace("*", ""), names, 3, 0.3)
            remedy = f"did you mean {' or '.join(similar_names)}?" if similar_names else "name a parameter or inputs"
            problems.append(Problem("not_found", f"hints[{pattern!r}]", str(hint), "matches no tensor", remedy))
        for name in tensor_names:
            earlier = matches.get(name)
            is_full = first_of(pattern) == name
            was_full = earlier is not None and first_of(earlier[0]) == name
            if earlier is None or (is_full and not was_full):
                matches[name] = (pattern, hint)
            elif earlier[1] != hint and not (was_full and not is_full):
                aliases = [alias for alias in names if first_of(alias) == name != alias]
                alternatives = " or ".join((name, *aliases))
                reason = "both name one tensor" if is_full else f"both match {alternatives}"
                remedy = "drop one of the two" + ("" if is_full else f", or use the full name {name}")
                rule = f"contradicts hints[{earlier[0]!r}] (={earlier[1]}): {reason}"
                problems.append(Problem("conflict", f"hints[{pattern!r}]", str(hint), rule, remedy))
    if problems:
        raise SpecError(problems)
    return matches
