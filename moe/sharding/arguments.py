"""Arguments of a module's call, in the one form that a plan has of them: those given by position, in order, then
`Keywords` with those given by name."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from inspect import Parameter, Signature, signature
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree


class Keywords(dict[str, Any]):
    """Arguments by name, sorted: calls that name the same arguments in another order are the same."""

    def __init__(self, named: Mapping[str, Any]) -> None:
        super().__init__((name, named[name]) for name in sorted(named))


pytree.register_pytree_node(
    Keywords,
    lambda keywords: (list(keywords.values()), tuple(keywords)),
    lambda values, names: Keywords(dict(zip(names, values, strict=True))),
)


def call(module: nn.Module, arguments: Sequence[Any]) -> Any:
    """Call a module with arguments in the form that this file is about."""
    positional, named = _parts(arguments)
    return module(*positional, **named)


def signature_of(module: nn.Module) -> Signature | None:
    """The signature of a module's `forward`; None where Python cannot tell it, and for what is no module."""
    try:
        return signature(module.forward)
    except (AttributeError, TypeError, ValueError):
        return None


def arguments_of_sample(module: nn.Module, sample: Any) -> tuple[Any, ...] | list[Any] | Any:
    """Arguments of a module's call with a sample: a tuple or list of them in order, a mapping of them by name, or
    forward's only argument, as a data class, or a dict or named tuple that forward takes whole. What none of these
    fits comes back as it is."""
    register_data_classes(sample)
    takes = signature_of(module)
    if isinstance(sample, Mapping):
        names = all(isinstance(name, str) for name in sample)
        if names and _bound(takes, (), sample) is not None:
            return canonical(takes, (), sample)
        return (sample,) if _bound(takes, (sample,), {}) is not None else sample
    if isinstance(sample, tuple) and hasattr(sample, "_fields") and _bound(takes, sample, {}) is None:
        return (sample,) if _bound(takes, (sample,), {}) is not None else sample
    if is_dataclass(sample) and not isinstance(sample, type):
        return (sample,)
    return canonical(takes, *_parts(sample)) if isinstance(sample, tuple | list) else sample


def canonical(
    takes: Signature | None, positional: Sequence[Any], named: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Arguments by position as far as a signature takes them so, whether they were given by position or by name, and
    `Keywords` with the others. Raises TypeError for arguments by name that the signature does not take."""
    if takes is not None and named:
        bound = takes.bind(*positional, **named)
        positional, named = bound.args, bound.kwargs
    return (*positional, Keywords(named)) if named else tuple(positional)


def names_of_inputs(takes: Signature | None, arguments: Sequence[Any]) -> dict[str, str]:
    """Names of inputs by the names that forward has for them: `inputs.labels`, with the `inputs.1` that a graph calls
    it. An argument of several values has none."""
    positional, named = _parts(arguments)
    in_order = [
        name
        for name, parameter in (takes.parameters.items() if takes is not None else ())
        if parameter.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    ]
    names, number = dict[str, str](), 0
    unnamed = [""] * (len(positional) - len(in_order))
    for name, value in (*zip([*in_order, *unnamed], positional, strict=False), *named.items()):
        num_leaves = len(pytree.tree_leaves(value))
        if name and num_leaves == 1:
            names[f"inputs.{name}"] = f"inputs.{number}"
        number += num_leaves
    return names


def register_data_classes(value: Any) -> None:
    """Have torch look into the data classes in a batch or a result, as it looks into tuples and dicts."""
    for data_class in _unregistered(value):
        if data_class not in pytree.SUPPORTED_NODES:
            pytree.register_dataclass(data_class)


def _unregistered(value: Any) -> Iterator[type]:
    for leaf in pytree.tree_leaves(value):
        if is_dataclass(leaf) and not isinstance(leaf, type):
            yield type(leaf)
            for field in fields(leaf):
                yield from _unregistered(getattr(leaf, field.name))


def _parts(arguments: Sequence[Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """(arguments by position, arguments by name)."""
    if arguments and isinstance(arguments[-1], Keywords):
        return arguments[:-1], arguments[-1]
    return arguments, {}


def _bound(takes: Signature | None, positional: Sequence[Any], named: Mapping[str, Any]) -> Any:
    if takes is None:
        return None
    try:
        return takes.bind(*positional, **named)
    except TypeError:
        return None
