"""Side effects of a module's forward pass that a captured graph would lose: found by running it twice, on fake tensors,
and looking at what its code can reach before, between and after."""

import dis
import gc
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import unwrap
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from moe.sharding.faked import HELD_AGAIN
from moe.sharding.lines import is_library, line_named, line_of, line_of_forward
from moe.spec import Problem, SpecError

_CONTAINERS = (list, dict, set, deque)
_FILLED = {*_CONTAINERS, OrderedDict, defaultdict}
_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device)
_DEPTH = 3
_LONGEST = 10_000
"""Containers that are longer are looked at by their length alone."""

_NOTHING = object()
_SEEDING = {unwrap(each).__code__ for each in (torch.manual_seed, torch.seed, torch.set_rng_state)}


@dataclass(frozen=True)
class _Place:
    """Something that a forward pass could change."""

    name: str
    last: str
    """The name that stands in the code."""
    read: Callable[[], Any]
    write: Callable[[Any], None]


class _Look:
    """Summaries of values at one time: plain ones as they are, others by identity, containers and the user's objects
    by what they hold as well."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], Any] = {}
        self._held: list[Any] = []
        """Values of which only the identity counts, so that none is used again."""

    def of(self, value: Any, depth: int = _DEPTH) -> Any:
        if isinstance(value, _PLAIN):
            return type(value), value
        key = id(value), depth
        if key not in self._known:
            self._held.append(value)
            self._known[key] = id(value)  # where it holds itself
            self._known[key] = self._of(value, depth)
        return self._known[key]

    def _of(self, value: Any, depth: int) -> Any:
        if depth and isinstance(value, (*_CONTAINERS, tuple)):
            if len(value) > _LONGEST:
                return id(value), len(value)
            own = None if isinstance(value, tuple) else id(value)
            if isinstance(value, dict):
                return own, tuple((self.of(key, 0), self.of(each, depth - 1)) for key, each in value.items())
            return own, tuple(self.of(each, depth - 1) for each in value)
        if depth and _is_users(value):
            held = (_PLAIN, _CONTAINERS) if isinstance(value, type) else (object,)
            return id(value), tuple(
                (name, self.of(each, depth - 1))
                for name, each in list(vars(value).items())
                if isinstance(each, held)
            )
        return id(value)


def _is_users(value: Any) -> bool:
    """Whether it is an object with attributes, or a class, of code that is neither torch's nor Python's own."""
    if isinstance(value, ModuleType | nn.Module | Tensor | FunctionType) or not hasattr(value, "__dict__"):
        return False
    kind = value if isinstance(value, type) else type(value)
    return not is_library(getattr(sys.modules.get(kind.__module__), "__file__", None) or "<")


@dataclass(frozen=True)
class _State:
    """Of a place at one time."""

    value: Any
    deep: Any
    flat: Any
    """Without what objects hold."""
    items: Any
    """A copy of what a container holds."""


def _state(place: _Place, look: _Look) -> _State:
    value = place.read()
    is_short = type(value) in _FILLED and len(value) <= _LONGEST
    return _State(
        value, look.of(value), look.of(value, 1 if is_short else 0), value.copy() if is_short else None
    )


class Effects:
    """What runs of a module change."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        look = _Look()
        self._attributes = {place.name: (place, _state(place, look)) for place in _attributes(module)}
        self._reached: dict[str, tuple[_Place, _State]] = {}
        """Globals, variables of enclosing functions and objects that the code that ran names, as they were before."""
        self._codes: dict[CodeType, None] = {}
        """The user's functions that ran."""
        self._seen: set[tuple[CodeType, int]] = set()
        self._library: set[CodeType] = set()
        self._held: list[Any] = [look]
        self._problems: dict[Problem, None] = {}

    def check(self, run: Callable[[], Any]) -> None:
        """Raise SpecError for all that a run changes and would change again. It is run twice; what has changed is put
        back."""
        draws = random.getstate(), np.random.get_state()
        try:
            with self._watched():
                run()
                look = _Look()
                between = {name: _state(place, look) for name, (place, _) in self._every()}
                run()
            self._compare(between)
            self._compare_draws(draws)
        finally:
            self._put_back()
            random.setstate(draws[0])
            np.random.set_state(draws[1])
        if self._problems:
            raise SpecError(self._problems)

    def line_of(self, name: str) -> str:
        """Where the code that ran sets, or else names, something."""
        names = ("eval", "train") if name == "training" else (name,)
        return next(
            filter(None, (line_named(self._codes, each) for each in names)), line_of_forward(self._module)
        )

    def _every(self) -> list[tuple[str, tuple[_Place, _State]]]:
        return [*self._attributes.items(), *self._reached.items()]

    @contextmanager
    def _watched(self) -> Iterator[None]:
        before, collects = sys.gettrace(), gc.isenabled()
        gc.disable()  # it calls back code of others in the middle of whatever runs
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(before)
            if collects:
                gc.enable()

    def _called(self, frame: FrameType, event: str, argument: Any) -> None:
        """Asked by Python of every function that is called."""
        code = frame.f_code
        if code in self._library:
            return
        if is_library(code.co_filename):
            if code in _SEEDING:
                self._seeded(frame)
            else:
                self._library.add(code)
            return
        self._codes[code] = None
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if (code, id(first)) in self._seen:
            return
        self._seen.add((code, id(first)))
        self._held.append(first)
        look = _Look()
        self._held.append(look)
        for place in self._reached_from(frame, first):
            if place.name not in self._reached:
                self._reached[place.name] = place, _state(place, look)

    def _seeded(self, frame: FrameType) -> None:
        self._problems[Problem(
            line_of(frame), f"torch.{frame.f_code.co_name}",
            "seeds torch's random numbers, which programs do not draw: theirs are keyed by seed, step and position",
            "leave it out, and give sharding.apply(..., seed=...)",
        )] = None  # fmt: skip

    def _reached_from(self, frame: FrameType, first: Any) -> Iterator[_Place]:
        code, scope = frame.f_code, frame.f_globals
        stored = _stored(code)
        for name in code.co_names:
            value = scope.get(name, _NOTHING)
            if (
                name in stored
                or isinstance(value, _CONTAINERS)
                or (value is not _NOTHING and _is_users(value))
            ):
                yield _Place(f"{scope.get('__name__')}.{name}", name, *_entry(scope, name))
        for name in code.co_freevars:
            value = frame.f_locals.get(name)
            if name in stored and not any(code in each.co_consts for each in self._codes):
                for cell in _cells(code, name):
                    yield _Place(f"{name} of {code.co_qualname}", name, *_content(cell))
            elif isinstance(value, _CONTAINERS) or _is_users(value):
                yield _Place(f"{name} of {code.co_qualname}", name, *_itself(value))
        if first is not None and _is_users(first):
            yield _Place(f"{type(first).__qualname__} at {id(first):#x}", code.co_name, *_itself(first))

    def _compare(self, between: dict[str, _State]) -> None:
        after = _Look()
        changed = [place for place in _attributes(self._module) if place.name not in self._attributes]
        for name, (place, before) in self._every():
            if name not in between:  # an object that is made in forward
                continue
            now, first = _state(place, after), between[name]
            is_again = now.deep != first.deep
            is_kept = now.deep != before.deep and _holds_tensor(now) and not _holds_tensor(before)
            if is_again or is_kept or (name in self._attributes and now.flat != before.flat):
                changed.append(place)
        for place in changed:
            remedy = "return it, or keep it in a registered buffer"
            if isinstance(place.read(), Tensor) and not line_named(self._codes, place.last):
                remedy = "use torch.nn.utils.parametrizations in place of a hook that sets it"
            self._problems[Problem(self.line_of(place.last), place.name,
                                   "is changed in forward, which a captured program would not do again",
                                   remedy)] = None  # fmt: skip

    def _compare_draws(self, before: tuple[Any, Any]) -> None:
        now = np.random.get_state()
        is_numpy = any(not np.array_equal(one, other) for one, other in zip(now, before[1], strict=True))
        if (is_numpy or random.getstate() != before[0]) and line_named(self._codes, "random"):
            self._problems[Problem(self.line_of("random"), "numpy.random" if is_numpy else "random",
                                   "gives random numbers that a captured program would have once and for all",
                                   "draw them with torch.rand, or give them to the module")] = None  # fmt: skip

    def _put_back(self) -> None:
        """What has changed as it was, as far as it can be."""
        for place in _attributes(self._module):
            if place.name not in self._attributes:
                place.write(_NOTHING)
        for _, (place, before) in self._every():
            if place.read() is not before.value:
                place.write(before.value)
            value, items = before.value, before.items
            if items is not None and _Look().of(value, 1)[1] != _Look().of(items, 1)[1]:
                value.clear()
                (value.update if isinstance(value, dict | set) else value.extend)(items)


def _holds_tensor(state: _State) -> bool:
    value = state.value if state.items is None else state.items
    return any(isinstance(each, Tensor) for each in pytree.tree_leaves(value))


_OWN = {*vars(nn.Module()), "forward", *HELD_AGAIN} - {"training"}


def _attributes(module: nn.Module) -> Iterator[_Place]:
    for path, each in module.named_modules():
        for name in list(vars(each)):
            if name not in _OWN:
                yield _Place(f"{path}.{name}" if path else name, name, *_entry(vars(each), name))


def _stored(code: CodeType) -> set[str]:
    """Globals and variables of enclosing functions that it sets."""
    if not {dis.opmap["STORE_GLOBAL"], dis.opmap["STORE_DEREF"]} & set(code.co_code[::2]):
        return set()
    return {
        each.argval
        for each in dis.get_instructions(code)
        if each.opname == "STORE_GLOBAL" or (each.opname == "STORE_DEREF" and each.argval in code.co_freevars)
    }


def _cells(code: CodeType, name: str) -> Iterator[Any]:
    for function in gc.get_referrers(code):
        if isinstance(function, FunctionType) and function.__closure__ is not None:
            yield function.__closure__[code.co_freevars.index(name)]


Access = tuple[Callable[[], Any], Callable[[Any], None]]
"""(read, write)"""


def _entry(held: dict[str, Any], name: str) -> Access:
    def write(value: Any) -> None:
        if value is _NOTHING:
            held.pop(name, None)
        else:
            held[name] = value

    return lambda: held.get(name, _NOTHING), write


def _content(cell: Any) -> Access:
    def read() -> Any:
        try:
            return cell.cell_contents
        except ValueError:
            return _NOTHING

    def write(value: Any) -> None:
        if value is not _NOTHING:
            cell.cell_contents = value

    return read, write


def _itself(value: Any) -> Access:
    return lambda: value, lambda other: None
