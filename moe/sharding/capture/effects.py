"""Side effects of a module's forward pass, which a captured graph would not have. They are found by running it twice on
fake tensors, and comparing the state that its code can reach before, between and after the runs."""

import functools
import gc
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import unwrap
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from moe.sharding import torch_private
from moe.sharding.capture.constants import Constants
from moe.sharding.capture.hooks import Hooks
from moe.sharding.capture.places import (
    CONTAINERS,
    NOTHING,
    MutablePlace,
    PlaceState,
    Snapshot,
    attributes,
    cells,
    content,
    defaults_of,
    entry,
    inside,
    is_plain,
    is_same,
    read_only,
    state,
    stored_by,
)
from moe.sharding.lines import is_importing, is_library, line_of, line_of_forward, line_of_name
from moe.spec import Problem, SpecError

_CACHED = functools._lru_cache_wrapper
_SEEDING = {unwrap(function).__code__ for function in (torch.manual_seed, torch.seed, torch.set_rng_state)}


class Effects:
    """Finds the state that runs of a module change, and restores it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        look = Snapshot()
        self._attributes = {place.key: (place, state(place, look)) for place in attributes(module)}
        self._states_by_place: dict[tuple[str, int], tuple[MutablePlace, PlaceState]] = {}
        """State before the runs of globals, variables of enclosing functions and objects that the executed code
        names."""
        self._codes: dict[CodeType, None] = {}
        """The user's functions that ran."""
        self._calls: set[tuple[CodeType, int]] = set()
        self._new_objects: set[int] = set()
        """Ids of objects that forward constructs: attributes set on them are not side effects."""
        self._library: set[CodeType] = set()
        self._caches: list[Any] | None = None
        self._tensor_caches: list[Any] = []
        self._alive: list[Any] = [look]
        self._problems: dict[Problem, None] = {}
        self._hooks = Hooks(module)

    def check(self, run: Callable[[], Any]) -> None:
        """Raise SpecError for all state that a run changes. `run` is called twice or more; changed state is
        restored."""
        draws = random.getstate(), np.random.get_state()
        first, second = Constants(), Constants()
        modules_before = set(sys.modules)
        gc.unfreeze()  # `gc` does not list frozen objects, among which there may be caches and closures
        try:
            with self._watching(), first:
                run()
            self._find_caches()
            if (
                self._tensor_caches or self._hooks.were_added()
            ):  # later runs differ from the first one: caches are empty, hooks are there
                first = Constants()
                with self._watching(), first:
                    run()
                self._find_caches()
            snapshot = Snapshot()
            places = [*attributes(self._module), *(place for place, _ in self._states())]
            middle_states = {place.key: state(place, snapshot) for place in places}
            with self._watching(), second:
                run()
            self._compare(middle_states, first.is_as(second))
            self._compare_draws(draws)
            self._problems |= first.problems
            if not self._problems:
                self._problems |= dict.fromkeys(first.changes(second))
        finally:
            self._find_caches()
            self._check_imported(set(sys.modules) - modules_before)
            self.put_back()
            random.setstate(draws[0])
            np.random.set_state(draws[1])
        if self._problems:
            raise SpecError(self._problems)

    def clear_caches(self) -> None:
        """Clear caches of `functools.lru_cache` that hold tensors: after a run on fake tensors these are fake."""
        for cache in self._tensor_caches:
            cache.cache_clear()

    def _find_caches(self) -> None:
        """Find and clear the caches that hold a tensor, of functions that were run or that the executed code names.
        Others are not cleared: functions that they let run only once, such as a registration, would run again."""
        names = {name for code in self._codes for name in (*code.co_names, *code.co_freevars)}
        if self._caches is None:  # searched once: there are some hundred thousand objects
            self._caches = [candidate for candidate in gc.get_objects() if type(candidate) is _CACHED]
        for cache in self._caches:
            code = getattr(unwrap(cache), "__code__", None)
            is_named = code is not None and code.co_name in names and not is_library(code.co_filename)
            if (is_named or code in self._codes) and _keeps_tensor(cache):
                self._tensor_caches.append(cache)
        self.clear_caches()

    def line_of(self, name: str) -> str:
        """The line where the executed code sets a name, or else the first that reads it."""
        names = ("eval", "train") if name == "training" else (name,)
        return next(
            filter(None, (line_of_name(self._codes, candidate) for candidate in names)), line_of_forward(self._module)
        )

    def _states(self) -> list[tuple[MutablePlace, PlaceState]]:
        return [*self._attributes.values(), *self._states_by_place.values()]

    @contextmanager
    def _watching(self) -> Iterator[None]:
        trace_function, collects = sys.gettrace(), gc.isenabled()
        gc.disable()  # finalizers of other code would be called in the middle of the run
        sys.settrace(self._on_call)
        try:
            yield
        finally:
            sys.settrace(trace_function)
            if collects:
                gc.enable()

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> None:
        """Python's trace function: called for each function call."""
        code = frame.f_code
        if code.co_name == "__init__":
            self._note_constructed(frame)
        if code in self._library:
            return
        if is_library(code.co_filename):
            if code in _SEEDING:
                self._refuse_seeding(frame)
            else:
                self._library.add(code)
            return
        if is_importing(frame):  # imports happen only once
            return
        self._codes[code] = None
        first_argument = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if (code, id(first_argument)) in self._calls:
            return
        self._calls.add((code, id(first_argument)))
        self._alive.append(first_argument)
        snapshot = Snapshot()
        self._alive.append(snapshot)
        for place in self._reached_from(frame, first_argument):
            if place.key not in self._states_by_place and place.owner_id not in self._new_objects:
                self._states_by_place[place.key] = place, state(place, snapshot)

    def _note_constructed(self, frame: FrameType) -> None:
        """Note an object that `__init__` is called on; one that has attributes already existed before."""
        code = frame.f_code
        value = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if getattr(value, "__dict__", None) == {} and not isinstance(value, nn.Module):
            self._new_objects.add(id(value))
            self._alive.append(value)

    def _refuse_seeding(self, frame: FrameType) -> None:
        rule = "seeds torch's random numbers; a program's are keyed by seed, step and position"
        remedy = "omit it, and pass sharding.apply(..., seed=...)"
        self._problems[Problem("not_capturable", line_of(frame), f"torch.{frame.f_code.co_name}", rule, remedy)] = None

    def _reached_from(self, frame: FrameType, first: Any) -> Iterator[MutablePlace]:
        code, scope = frame.f_code, frame.f_globals
        stored_names = stored_by(code)
        for name in code.co_names:
            value = scope.get(name, NOTHING)
            if name in stored_names or isinstance(value, (*CONTAINERS, np.ndarray)):
                yield MutablePlace(f"{scope.get('__name__')}.{name}", name, *entry(scope, name))
            elif value is not NOTHING:
                yield from inside(value, code)
        for name in code.co_freevars:
            value = frame.f_locals.get(name)
            if name in stored_names and not any(code in outer_code.co_consts for outer_code in self._codes):
                for cell in cells(code, name):
                    yield MutablePlace(f"{name} of {code.co_qualname}", name, *content(cell))
            elif isinstance(value, (*CONTAINERS, np.ndarray)):
                yield MutablePlace(f"{name} of {code.co_qualname}", name, *read_only(value), owner_id=id(value))
            else:
                yield from inside(value, code)
        yield from inside(first, code)
        for kind in type(first).__mro__ if isinstance(first, nn.Module) else ():
            yield from inside(kind, code)
        yield from defaults_of(frame)

    def _compare(self, middle_states: dict[tuple[str, int], PlaceState], is_same_way: bool) -> None:
        """Note problems of places whose state differs before the runs, between them (`middle_states`) or after them.
        `is_same_way` is whether both runs passed the same values to torch."""
        snapshot = Snapshot()
        changes: list[tuple[MutablePlace, bool]] = []
        new_attributes = [(place, None) for place in attributes(self._module) if place.key not in self._attributes]
        for place, initial in (*new_attributes, *self._states()):
            middle = middle_states.get(place.key)
            if middle is None and initial is not None:  # an object created in forward
                continue
            final = state(place, snapshot)
            is_repeated = middle is None or final.deep != middle.deep
            if initial is None or place.key in self._attributes:
                is_known = is_same_way and not is_repeated and place.last != "training" and is_plain(final.value)
                is_changed = not is_known and (initial is None or final.flat != initial.flat)
            else:
                is_changed = False
            keeps_tensor = (
                initial is not None
                and final.deep != initial.deep
                and _holds_tensor(final)
                and not _holds_tensor(initial)
            )
            if is_repeated or is_changed or keeps_tensor:
                changes.append((place, is_repeated))
        for place, is_repeated in changes:
            remedy = "return it, or keep it in a registered buffer"
            if not is_repeated:
                remedy = "compute it in __init__, and register it as a buffer if it is a tensor"
            elif isinstance(place.read(), Tensor) and not line_of_name(self._codes, place.last):
                remedy = "use torch.nn.utils.parametrizations instead of a hook that sets it"
            rule = "is modified in forward; a captured program would not repeat it"
            self._problems[Problem("side_effect", self.line_of(place.last), place.name, rule, remedy)] = None

    def _compare_draws(self, initial_states: tuple[Any, Any]) -> None:
        numpy_state = np.random.get_state()
        is_numpy = any(
            not np.array_equal(part, old_part) for part, old_part in zip(numpy_state, initial_states[1], strict=True)
        )
        if (is_numpy or random.getstate() != initial_states[0]) and line_of_name(self._codes, "random"):
            rule = "draws random numbers that a captured program would repeat"
            remedy = "use torch.rand, or pass them to the module"
            name = "numpy.random" if is_numpy else "random"
            self._problems[Problem("not_capturable", self.line_of("random"), name, rule, remedy)] = None

    def _check_imported(self, names: set[str]) -> None:
        """Note problems of modules that forward has imported and that contain fake tensors, and unload these
        modules."""
        for name in sorted(names):
            traced_names = [
                attribute for attribute, value in vars(sys.modules[name]).items() if torch_private.is_traced(value)
            ]
            if traced_names:
                parent, _, attribute_name = name.rpartition(".")
                vars(sys.modules.get(parent, sys)).pop(attribute_name, None)
                del sys.modules[name]
                lines = (line_of_name(self._codes, attribute) for attribute in (*traced_names, attribute_name))
                line = next(filter(None, lines), line_of_forward(self._module))
                rule = f"is imported in forward and creates tensors ({traced_names[0]})"
                remedy = "import it at the top of the file"
                self._problems[Problem("not_capturable", line, name, rule, remedy)] = None

    def put_back(self) -> None:
        """Restore changed state as far as possible."""
        self.clear_caches()
        self._hooks.put_back()
        for place in attributes(self._module):
            if place.key not in self._attributes:
                place.write(NOTHING)
        for place, original in self._states():
            if not is_same(place.read(), original.value):
                place.write(original.value)
            value, items = original.value, original.items
            if isinstance(value, np.ndarray) and items is not None:
                np.copyto(value, items)
            elif items is not None and Snapshot().digest(value, 1)[1] != Snapshot().digest(items, 1)[1]:
                value.clear()
                (value.update if isinstance(value, dict | set) else value.extend)(items)


def _keeps_tensor(cache: Any) -> bool:
    referents, seen_ids = gc.get_referents(cache), set[int]()
    while referents:
        referent = referents.pop()
        if isinstance(referent, Tensor):
            return True
        is_passed = isinstance(referent, dict | list | tuple) or type(referent).__name__ == "_lru_list_elem"
        if is_passed and id(referent) not in seen_ids:
            seen_ids.add(id(referent))
            referents += gc.get_referents(referent)
    return False


def _holds_tensor(state: PlaceState) -> bool:
    value = state.value if state.items is None else state.items
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))
