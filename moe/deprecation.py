"""Old names of public functions, kept for one release."""

import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def warn_renamed(old: str, new: str) -> None:
    """Warn the caller's caller that `old` is now `new`."""
    warnings.warn(f"{old} is deprecated; use {new}", DeprecationWarning, stacklevel=3)


def resolve_alias(module: str, name: str, aliases: Mapping[str, str], names: Mapping[str, Any]) -> Any:
    """Value of a deprecated `name` of `module`, for its `__getattr__`. `aliases` maps old names to new ones, and
    `names` has the new ones' values. Raises AttributeError for any other name."""
    if name not in aliases:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    warn_renamed(f"{module}.{name}", aliases[name])
    return names[aliases[name]]


def renamed_arguments(**aliases: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator of a function whose keyword arguments were renamed, from old names to new ones."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for old in aliases.keys() & kwargs.keys():
                warn_renamed(f"{function.__name__}({old}=)", f"{aliases[old]}=")
                kwargs[aliases[old]] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call

    return decorate
