"""Side effects of a module's forward pass that a captured graph would lose: found by looking before and after."""

import dis
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch import Tensor, nn

from moe.spec import Problem, SpecError

_CONTAINERS = (list, dict, set)


@dataclass(frozen=True)
class _Place:
    """Something that a forward pass could change."""

    name: str
    read: Callable[[], Any]
    where: str


def _summary(value: Any) -> Any:
    """What tells whether a value is another one: identities, and those of what a container holds."""
    if isinstance(value, dict):
        return id(value), tuple((key, id(each)) for key, each in value.items())
    if isinstance(value, _CONTAINERS):
        return id(value), tuple(id(each) for each in value)
    if isinstance(value, int | float | str | bool | None):
        return value
    return id(value)


@dataclass(frozen=True)
class Effects:
    """State of all that a module's code can reach: attributes of modules, globals that it names, cells it closes
    over."""

    before: tuple[tuple[_Place, Any, Any], ...]
    """Places, summaries, and the values themselves, so that no identity is used again."""

    @classmethod
    def of(cls, module: nn.Module) -> "Effects":
        return cls(tuple((place, _summary(value := place.read()), value) for place in _places(module)))

    def check(self, module: nn.Module) -> None:
        """Raise SpecError for all that has changed."""
        problems = [
            Problem(place.name, place.where,
                    "is changed in forward, which a captured program would not do again",
                    "return it, or keep it in a registered buffer")
            for place, before, _ in self.before
            if _summary(place.read()) != before
        ]  # fmt: skip
        known = {place.name for place, _, _ in self.before}
        problems += [
            Problem(place.name, place.where, "is made in forward, which a captured program would not do again",
                    "return it, or keep it in a registered buffer")
            for place in _places(module) if place.name not in known
        ]  # fmt: skip
        if problems:
            raise SpecError(problems)


_OWN = {"_parameters", "_buffers", "_modules", "training"}


def _places(module: nn.Module) -> Iterator[_Place]:
    seen: set[int] = set()
    for path, each in module.named_modules():
        where = f"{path or 'model'} ({type(each).__name__})"
        for name, value in list(vars(each).items()):
            if name in _OWN or (isinstance(value, Tensor) and not name):
                continue
            yield _Place(f"{path}.{name}" if path else name, _attribute(each, name), where)
        for function in (type(each).forward, *_methods(type(each))):
            code = getattr(function, "__code__", None)
            if code is None or id(code) in seen or function.__module__.startswith("torch."):
                continue
            seen.add(id(code))
            yield from _of_code(code, function)


def _methods(kind: type) -> Iterator[Any]:
    for name, value in vars(kind).items():
        if callable(value) and not name.startswith("__"):
            yield value


def _of_code(code: CodeType, function: Any) -> Iterator[_Place]:
    place = f"{code.co_filename}:{code.co_firstlineno}"
    stored = {each.argval for each in dis.get_instructions(code) if each.opname == "STORE_GLOBAL"}
    scope = function.__globals__
    for name in code.co_names:
        if name in stored or isinstance(scope.get(name), _CONTAINERS):
            yield _Place(f"global {name}", _global(scope, name), place)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if name != "__class__":
            yield _Place(f"nonlocal {name}", _cell(cell), place)


def _attribute(owner: Any, name: str) -> Callable[[], Any]:
    return lambda: vars(owner).get(name)


def _global(scope: dict[str, Any], name: str) -> Callable[[], Any]:
    return lambda: scope.get(name)


def _cell(cell: Any) -> Callable[[], Any]:
    def read() -> Any:
        try:
            return cell.cell_contents
        except ValueError:
            return None

    return read
