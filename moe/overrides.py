"""Functions that a context can replace by others, as `torch.overrides` does for torch's own functions.

torch's modes are suspended inside their handlers, so they could not replace a function that a replaced one calls.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

Overrides = Mapping[Callable[..., Any], Callable[..., Any]]
"""Replacements with the same signatures, by function; that of a method takes `self`."""

_OVERRIDES: ContextVar[Overrides | None] = ContextVar("overrides", default=None)


def overridable(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator of a function or method that `overriding` can replace."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        overrides = _OVERRIDES.get()
        if overrides is None:
            return function(*args, **kwargs)
        result: R = overrides.get(call, function)(*args, **kwargs)
        return result

    return call


@contextmanager
def overriding(overrides: Overrides) -> Iterator[None]:
    """Context in which calls of overridable functions call their replacements. Other threads are not affected."""
    token = _OVERRIDES.set(overrides)
    try:
        yield
    finally:
        _OVERRIDES.reset(token)
