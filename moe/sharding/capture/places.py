"""Mutable places that a forward pass can change (attributes, globals, variables, defaults): access to them, and
snapshots of their state."""

import dis
import functools
import gc
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import unwrap
from types import (
    BuiltinMethodType,
    CodeType,
    FrameType,
    FunctionType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moe.sharding.capture.constants import array_key
from moe.sharding.capture.faked import WEIGHT_LISTS
from moe.sharding.lines import is_library

CONTAINERS = (list, dict, set, deque)
_FILLED = {*CONTAINERS, OrderedDict, defaultdict}
_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device)
_METHODS = (MethodType, BuiltinMethodType, MethodWrapperType)
_DEPTH = 3
_LONGEST = 10_000
"""Length above which only the length of a container is compared."""

NOTHING = object()


@dataclass(frozen=True)
class MutablePlace:
    """An attribute, global, variable or default that a forward pass can change."""

    name: str
    last: str
    """The name as it appears in the code."""
    read: Callable[[], Any]
    write: Callable[[Any], None]
    owner_id: int = 0
    """Id of the object that has the attribute, since several objects may have one of this name."""

    @property
    def key(self) -> tuple[str, int]:
        return self.name, self.owner_id


class Snapshot:
    """Digests of values at one time: plain values themselves, others by identity; containers and objects of the user's
    classes also by their contents."""

    def __init__(self) -> None:
        self._digests: dict[tuple[int, int], Any] = {}
        self._alive: list[Any] = []
        """Values that are compared by identity: they are kept alive so that no id is reused."""

    def digest(self, value: Any, depth: int = _DEPTH) -> Any:
        if isinstance(value, _PLAIN):
            return type(value), value
        key = id(value), depth
        if key not in self._digests:
            self._alive.append(value)
            self._digests[key] = id(value)  # in case it contains itself
            self._digests[key] = self._digest(value, depth)
        return self._digests[key]

    def _digest(self, value: Any, depth: int) -> Any:
        if isinstance(value, _METHODS):  # each access creates a new bound method
            return id(value.__self__), value.__name__
        if depth and isinstance(value, (*CONTAINERS, tuple)):
            if len(value) > _LONGEST:
                return id(value), len(value)
            identity = None if isinstance(value, tuple) else id(value)
            if isinstance(value, dict):
                return identity, tuple(
                    (self.digest(key, 0), self.digest(element, depth - 1)) for key, element in value.items()
                )
            return identity, tuple(self.digest(element, depth - 1) for element in value)
        if depth and _is_users(value):
            kinds = (_PLAIN, CONTAINERS) if isinstance(value, type) else (object,)
            return id(value), tuple(
                (name, self.digest(attribute, depth - 1))
                for name, attribute in _held_by(value)
                if isinstance(attribute, kinds)
            )
        return (id(value), array_key(value)) if isinstance(value, np.ndarray) else id(value)


def _is_users(value: Any) -> bool:
    """Whether a value is a class of the user's, or an object of one that has attributes."""
    if isinstance(value, ModuleType | nn.Module | Tensor | FunctionType):
        return False
    kind = value if isinstance(value, type) else type(value)
    if not hasattr(value, "__dict__") and not hasattr(kind, "__slots__"):
        return False
    return kind is SimpleNamespace or not is_library(getattr(sys.modules.get(kind.__module__), "__file__", None) or "<")


def _held_by(value: Any) -> list[tuple[str, Any]]:
    """An object's own attributes, in its dict or in slots."""
    items = list(getattr(value, "__dict__", {}).items())
    for kind in () if isinstance(value, type) else type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            if not name.startswith("__"):
                items.append((name, getattr(value, name, NOTHING)))
    return items


@dataclass(frozen=True)
class PlaceState:
    """State of a place at one time."""

    value: Any
    deep: Any
    flat: Any
    """Digest without the contents of objects."""
    items: Any
    """Copy of a container's contents."""


def state(place: MutablePlace, snapshot: Snapshot) -> PlaceState:
    value = place.read()
    is_short = (type(value) in _FILLED or isinstance(value, np.ndarray)) and _size(value) <= _LONGEST
    return PlaceState(
        value, snapshot.digest(value), snapshot.digest(value, 1 if is_short else 0), value.copy() if is_short else None
    )


def is_same(first: Any, second: Any) -> bool:
    """Whether two values of a place are the same object, or the same bound method."""
    return first is second or (isinstance(first, _METHODS) and isinstance(second, _METHODS) and first == second)


def _size(value: Any) -> int:
    return value.size if isinstance(value, np.ndarray) else len(value)


def is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(is_plain, value)))


_UNWATCHED_ATTRIBUTES = {*vars(nn.Module()), "forward", *WEIGHT_LISTS} - {"training"}


def attributes(module: nn.Module) -> Iterator[MutablePlace]:
    for path, submodule in module.named_modules():
        for name in list(vars(submodule)):
            if name not in _UNWATCHED_ATTRIBUTES:
                yield MutablePlace(f"{path}.{name}" if path else name, name, *entry(vars(submodule), name))


def stored_by(code: CodeType) -> set[str]:
    """Globals and variables of enclosing functions that the code sets."""
    if not {dis.opmap["STORE_GLOBAL"], dis.opmap["STORE_DEREF"]} & set(code.co_code[::2]):
        return set()
    return {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname == "STORE_GLOBAL"
        or (instruction.opname == "STORE_DEREF" and instruction.argval in code.co_freevars)
    }


@functools.cache
def _attributes_stored(code: CodeType) -> set[str]:
    return {instruction.argval for instruction in dis.get_instructions(code) if instruction.opname == "STORE_ATTR"}


def inside(value: Any, code: CodeType) -> Iterator[MutablePlace]:
    """Attributes of a class, object or function of the user's: existing ones, and those that `code` may set."""
    is_function = isinstance(value, FunctionType) and not is_library(value.__code__.co_filename)
    if not is_function and not _is_users(value):
        return
    is_kind = isinstance(value, type)
    label = value.__qualname__ if is_kind or is_function else type(value).__qualname__
    kinds = (*_PLAIN, *CONTAINERS, np.ndarray) if is_kind else (object,)
    names = [name for name, attribute in _held_by(value) if isinstance(attribute, kinds) and not name.startswith("__")]
    for name in dict.fromkeys((*names, *_attributes_stored(code))):
        access = entry(vars(value), name) if hasattr(value, "__dict__") and not is_kind else None
        if access is None or (name not in vars(value) and hasattr(type(value), name)):
            access = _attribute(value, name)
        yield MutablePlace(f"{label}.{name}", name, *access, owner_id=id(value))


def defaults_of(frame: FrameType) -> Iterator[MutablePlace]:
    """Containers among a function's default values, which persist from call to call."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    arguments = {name: frame.f_locals.get(name) for name in names}
    arguments = {name: value for name, value in arguments.items() if isinstance(value, CONTAINERS)}
    holder = type(frame.f_locals[names[0]]) if names and names[0] in frame.f_locals else None
    candidates = (frame.f_globals.get(code.co_name), getattr(holder, code.co_name, None)) if arguments else ()
    for function in map(unwrap, filter(callable, candidates)):
        if isinstance(function, FunctionType) and function.__code__ is code:
            defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
            for name, value in arguments.items():
                if any(value is default for default in defaults):
                    yield MutablePlace(f"{name} of {code.co_qualname}", name, *read_only(value), owner_id=id(value))


def cells(code: CodeType, name: str) -> Iterator[Any]:
    for function in gc.get_referrers(code):
        if isinstance(function, FunctionType) and function.__closure__ is not None:
            yield function.__closure__[code.co_freevars.index(name)]


Access = tuple[Callable[[], Any], Callable[[Any], None]]
"""(read, write)"""


def entry(namespace: dict[str, Any], name: str) -> Access:
    def write(value: Any) -> None:
        if value is NOTHING:
            namespace.pop(name, None)
        else:
            namespace[name] = value

    return lambda: namespace.get(name, NOTHING), write


def _attribute(value: Any, name: str) -> Access:
    """Access to an attribute of a class, or in a slot."""

    def read() -> Any:
        return vars(value).get(name, NOTHING) if isinstance(value, type) else getattr(value, name, NOTHING)

    def write(new_value: Any) -> None:
        if new_value is NOTHING:
            delattr(value, name)
        else:
            setattr(value, name, new_value)

    return read, write


def content(cell: Any) -> Access:
    def read() -> Any:
        try:
            return cell.cell_contents
        except ValueError:
            return NOTHING

    def write(value: Any) -> None:
        if value is not NOTHING:
            cell.cell_contents = value

    return read, write


def read_only(value: Any) -> Access:
    return lambda: value, lambda new_value: None
