"""Arguments of a module's call in canonical form: positional arguments in order, then `Keywords` with the others."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from inspect import Parameter, Signature, signature
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree


class Keywords(dict[str, Any]):
    """Keyword arguments, sorted by name, so that their order in a call does not matter."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        super().__init__((name, entries[name]) for name in sorted(entries))


pytree.register_pytree_node(
    Keywords,
    lambda keywords: (list(keywords.values()), tuple(keywords)),
    lambda values, names: Keywords(dict(zip(names, values, strict=True))),
)


def call(module: nn.Module, arguments: Sequence[Any]) -> Any:
    """Call a module with arguments in canonical form."""
    positional, keywords = _parts(arguments)
    return module(*positional, **keywords)


def signature_of(module: nn.Module) -> Signature | None:
    """Signature of a module's `forward`; None where Python has none, or `module` is not a module."""
    try:
        return signature(module.forward)
    except (AttributeError, TypeError, ValueError):
        return None


def arguments_of_sample(module: nn.Module, sample: Any) -> tuple[Any, ...] | list[Any] | Any:
    """Canonical arguments of a sample for a module."""
    return arguments_of(signature_of(module), sample)


def arguments_of(forward_signature: Signature | None, sample: Any) -> tuple[Any, ...] | list[Any] | Any:
    """Canonical arguments of a sample: a tuple or list of arguments in order, a mapping of arguments by name, or the
    only argument of `forward` (a data class, or a mapping or named tuple whose fields are not its arguments). Anything
    else is returned unchanged."""
    register_data_classes(sample)
    if isinstance(sample, Mapping):
        names = all(isinstance(name, str) for name in sample)
        if names and _bind(forward_signature, (), sample) is not None:
            return canonical(forward_signature, (), sample)
        return (sample,) if _bind(forward_signature, (sample,), {}) is not None else sample
    if isinstance(sample, tuple) and hasattr(sample, "_fields") and _bind(forward_signature, sample, {}) is None:
        return (sample,) if _bind(forward_signature, (sample,), {}) is not None else sample
    if is_dataclass(sample) and not isinstance(sample, type):
        return (sample,)
    return canonical(forward_signature, *_parts(sample)) if isinstance(sample, tuple | list) else sample


def canonical(
    forward_signature: Signature | None, positional: Sequence[Any], keywords: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Canonical arguments of a call: by position as far as the signature allows it, then `Keywords` with the others.
    Raises TypeError for keyword arguments that the signature does not take."""
    if forward_signature is not None and keywords:
        binding = forward_signature.bind(*positional, **keywords)
        positional, keywords = binding.args, binding.kwargs
    return (*positional, Keywords(keywords)) if keywords else tuple(positional)


def names_of_inputs(forward_signature: Signature | None, arguments: Sequence[Any]) -> dict[str, str]:
    """Names of inputs in the graph (`inputs.1`) by their names in `forward` (`inputs.labels`). Arguments of several
    tensors are left out."""
    positional, keywords = _parts(arguments)
    in_order = [
        name
        for name, parameter in (forward_signature.parameters.items() if forward_signature is not None else ())
        if parameter.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    ]
    names, number = dict[str, str](), 0
    blank_names = [""] * (len(positional) - len(in_order))
    for name, value in (*zip([*in_order, *blank_names], positional, strict=False), *keywords.items()):
        num_leaves = len(pytree.tree_leaves(value))
        if name and num_leaves == 1:
            names[f"inputs.{name}"] = f"inputs.{number}"
        number += num_leaves
    return names


def register_data_classes(value: Any) -> None:
    """Register the data classes in a batch or a result as pytree nodes."""
    for data_class in _unregistered_types(value):
        if data_class not in pytree.SUPPORTED_NODES:
            pytree.register_dataclass(data_class)


def _unregistered_types(value: Any) -> Iterator[type]:
    for leaf in pytree.tree_leaves(value):
        if is_dataclass(leaf) and not isinstance(leaf, type):
            yield type(leaf)
            for field in fields(leaf):
                yield from _unregistered_types(getattr(leaf, field.name))


def _parts(arguments: Sequence[Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """(positional arguments, keyword arguments)."""
    if arguments and isinstance(arguments[-1], Keywords):
        return arguments[:-1], arguments[-1]
    return arguments, {}


def _bind(forward_signature: Signature | None, positional: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    if forward_signature is None:
        return None
    try:
        return forward_signature.bind(*positional, **keywords)
    except TypeError:
        return None
