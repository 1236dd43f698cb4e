"""Side effects of forward: refused with the user's line, undone, and distinguished from harmless code."""

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe import sharding
from moe.spec import ProblemCode
from tests.refusals import check
from tests.sharding.on_ranks import cores
from tests.sharding.partitioned import check_at_random
from tests.sharding.refused import BATCH, ONE_AXIS, Plain, lines_of, planning_problems

STEPS = 0
SEEN: list[Tensor] = []
OPTIONS = {"losses": []}
line_of = lines_of(__file__)


def counts(module: Plain, h: Tensor) -> None:
    module.count += 1  # an attribute


def creates(module: Plain, h: Tensor) -> None:
    module.last = h  # a new attribute


def sets_global(module: Plain, h: Tensor) -> None:
    global STEPS
    STEPS += 1  # a global


def note(h: Tensor) -> None:
    SEEN.append(h)  # a global list in a function


def counter() -> Callable[[Plain, Tensor], None]:
    calls = 0

    def between(module: Plain, h: Tensor) -> None:
        nonlocal calls
        calls += 1  # a variable

    return between


def clamps(module: Plain, h: Tensor) -> None:
    with torch.no_grad():
        module.second.weight.clamp_(-1, 1)  # a parameter


def replaces(module: Plain, h: Tensor) -> None:
    module.second.weight = nn.Parameter(module.second.weight * 2)  # a new parameter


def grows(module: Plain, h: Tensor) -> None:
    module.mean = h.detach()  # a buffer of another shape


def changes_array(module: Plain, h: Tensor) -> None:
    module.array[0] += 1  # an array


def counts_in_namespace(module: Plain, h: Tensor) -> None:
    module.space.calls += 1  # a namespace


def counts_in_slot(module: Plain, h: Tensor) -> None:
    module.slotted.calls += 1  # a slot


def counts_in_class(module: Plain, h: Tensor) -> None:
    type(module).calls += 1  # a class


def counts_in_itself(module: Plain, h: Tensor) -> None:
    counts_in_itself.calls += 1  # a function


counts_in_itself.calls = 0


def appends_to_default(module: Plain, h: Tensor, seen: list[int] = []) -> None:  # noqa: B006
    seen.append(1)  # a default


EFFECTS: dict[str, tuple[Callable[[Plain, Tensor], Any], ProblemCode, str]] = {
    "an attribute": (counts, "side_effect", "count"),
    "a list": (lambda module, h: module.log.append(h.detach()), "side_effect", "log"),  # a list
    "a new attribute": (creates, "side_effect", "last"),
    "a global": (sets_global, "side_effect", f"{__name__}.STEPS"),
    "a global list in a function": (lambda module, h: note(h), "side_effect", f"{__name__}.SEEN"),
    "a global's item": (
        lambda module, h: OPTIONS["losses"].append(h.shape),  # a global's item
        "side_effect", f"{__name__}.OPTIONS",
    ),
    "a variable": (counter(), "side_effect", "calls of counter.<locals>.between"),
    "an array": (changes_array, "side_effect", "array"),
    "a namespace": (counts_in_namespace, "side_effect", "space"),
    "a slot": (counts_in_slot, "side_effect", "slotted"),
    "a class": (counts_in_class, "side_effect", "Plain.calls"),
    "a function": (counts_in_itself, "side_effect", "counts_in_itself.calls"),
    "a default": (appends_to_default, "side_effect", "seen of appends_to_default"),
    "a table": (lambda module, h: h + module.table.add_(1), "not_capturable", "Plain"),  # a table
    "a parameter": (clamps, "side_effect", "second.weight"),
    "a parameter's data": (
        lambda module, h: h + 0 * module.second.weight.data.clamp_(-1, 1).sum(),  # a parameter's data
        "side_effect", "second.weight",
    ),
    "a new parameter": (replaces, "side_effect", "second.weight"),
    "a buffer of another shape": (grows, "side_effect", "mean"),
}  # fmt: skip


@pytest.mark.sample(4)
@pytest.mark.parametrize("mark", EFFECTS)
def test_side_effects_are_refused_with_their_line(mark: str) -> None:
    middle, code, value = EFFECTS[mark]
    check(planning_problems(Plain(middle)), [(code, line_of(mark), value)])


@pytest.mark.slow
def test_a_refused_module_is_unchanged() -> None:
    SEEN.clear()
    before = STEPS
    for mark in ("an attribute", "a list", "a new attribute", "a global", "a global list in a function"):
        module = Plain(EFFECTS[mark][0])
        planning_problems(module)
        assert (module.count, module.log, hasattr(module, "last")) == (0, [], False)
    assert before == STEPS
    assert SEEN == []
    module = Plain(grows)
    planning_problems(module)
    assert type(module.mean) is Tensor
    assert module.mean.shape == (8,)


def test_hooks_that_store_tensors_are_refused() -> None:
    module = Plain()
    module.first.register_forward_hook(lambda *arguments: SEEN.append(arguments[-1]))  # a hook
    check(planning_problems(module), [("side_effect", line_of("a hook"), f"{__name__}.SEEN")])


def stores_scale(module: Plain, h: Tensor) -> Tensor:
    if module.scale is None:
        module.scale = h.shape[-1] ** 0.5
    return h / module.scale


def stores_shape(module: Plain, h: Tensor) -> None:
    module.last = h.shape


class Running:
    """A user's object with an attribute from the start."""

    def __init__(self, h: Tensor | None = None) -> None:
        self.h = h

    def update(self, h: Tensor) -> Tensor:
        self.h = h
        return h


class Sets:
    def run(self) -> int:
        return 2

    def __call__(self, target: Any) -> Any:
        target.run = 3
        return target


def caches() -> Callable[[Plain, Tensor], Tensor]:
    cache: dict[int, int] = {}
    return lambda module, h: h * cache.setdefault(h.shape[0], h.shape[0])


def sets_another(sets: Sets) -> Callable[[Plain, Tensor], Tensor]:
    return lambda module, h: h * sets(SimpleNamespace()).run * sets.run()


RUNNING, SETS = Running(), Sets()
HARMLESS: dict[str, Callable[[Plain, Tensor], Any]] = {
    "values cached by the first call": caches(),
    "a number set once": stores_scale,
    "the same shape set by every call": stores_shape,
    "a cached property": lambda module, h: h * module.half,
    "a new object": lambda module, h: Running(h).update(h + 1),
    "an empty new object": lambda module, h: Running().update(h + 1),
    "another object's attribute with a method's name": sets_another(SETS),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", HARMLESS)
def test_code_without_a_lasting_effect_is_accepted(case: str) -> None:
    module = Plain(HARMLESS[case])
    sharding.plan(module, BATCH, cores(2), mesh=ONE_AXIS)
    assert module.scale is None
    assert not {"last", "half"} & set(vars(module))
    assert vars(SETS) == {}


@functools.lru_cache
def triangle(size: int) -> Tensor:
    return torch.tril(torch.ones(size, 8))


@pytest.mark.slow
def test_a_cached_function_returns_real_tensors_afterwards() -> None:
    module = Plain(lambda module, h: h * triangle(h.shape[0]))
    for _ in range(2):  # with an empty cache and with that of a call
        applied = sharding.apply(module, sharding.plan(module, BATCH, cores(1)))
        assert type(triangle(8)) is Tensor
        assert torch.allclose(applied(*BATCH), module(*BATCH))


CALLED: list[int] = []


@functools.cache
def once(size: int) -> int:
    CALLED.append(size)
    return size


def test_a_cached_function_without_tensors_keeps_its_cache() -> None:
    CALLED.clear()
    once(8)
    sharding.plan(Plain(lambda module, h: h * once(h.shape[0])), BATCH, cores(2), mesh=ONE_AXIS)
    assert CALLED == [8]


@pytest.fixture
def late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that can be imported as `late`."""
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "late.py"
    sys.modules.pop("late", None)


def imports_late(module: Plain, h: Tensor) -> Tensor:
    from late import SCALE  # late

    return h * SCALE


def test_effects_of_a_first_import_in_forward_are_accepted(late: Path) -> None:
    late.write_text("KNOWN = []\ndef note(name):\n    KNOWN.append(name)\n    return 2\nSCALE = note('scale')\n")
    sharding.plan(Plain(imports_late), BATCH, cores(2), mesh=ONE_AXIS)
    assert sys.modules["late"].KNOWN == ["scale"]


def test_tensors_of_a_file_imported_in_forward_are_refused_and_real_afterwards(late: Path) -> None:
    late.write_text("import torch\nSCALE = torch.ones(8)\n")
    module = Plain(imports_late)
    check(planning_problems(module), [("not_capturable", line_of("late"), "late")])
    module(*BATCH)
    sharding.plan(module, BATCH, cores(2), mesh=ONE_AXIS)


@pytest.mark.parametrize("name", ["update", "__init__"])
def test_attributes_set_on_an_existing_object_are_refused(name: str) -> None:
    def middle(module: Plain, h: Tensor) -> None:
        getattr(RUNNING, name)(h)

    (problem,) = planning_problems(Plain(middle))
    assert (problem.code, problem.value) == ("side_effect", "Running.h")
    assert RUNNING.h is None


def stores_in_class(module: Plain, h: Tensor) -> Tensor:
    if h.shape not in module.kept:  # stored
        module.kept[h.shape] = torch.arange(8.0)
    return h * module.kept[h.shape]


def test_tensors_stored_in_a_class_are_refused_and_removed() -> None:
    check(planning_problems(Plain(stores_in_class)), [("side_effect", line_of("stored"), "Plain.kept")])
    assert Plain.kept == {}


class RecordingModel(nn.Module):
    """Layers whose results are recorded by hooks that the first call registers, as transformers records router
    logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self._is_hooked = False

    def forward(self, x: Tensor) -> Tensor:
        outputs: list[Tensor] = []
        RECORDERS.append(outputs)
        try:
            if not self._is_hooked:
                for layer in self.layers:
                    layer[0].register_forward_hook(lambda module, inputs, result: RECORDERS[-1].append(result))
                self._is_hooked = True
            for layer in self.layers:
                x = layer(x)
            return x.sum() + torch.stack(outputs).square().sum()
        finally:
            RECORDERS.pop()


RECORDERS: list[list[Tensor]] = []


@pytest.mark.slow
def test_hooks_registered_by_the_first_call_run_once_per_layer_and_are_removed() -> None:
    torch.manual_seed(0)
    module, x = RecordingModel().double(), torch.randn(8, 6, dtype=torch.float64)
    check_at_random(module, (x,), cases=2)
    fresh = RecordingModel().double()
    fresh.load_state_dict(module.state_dict())
    plans = [sharding.plan(fresh, (x,), cores(2), mesh=ONE_AXIS) for _ in range(2)]
    assert plans[0].digest == plans[1].digest
    assert not any(layer[0]._forward_hooks for layer in fresh.layers)
    assert not fresh._is_hooked
    applied = sharding.apply(fresh, sharding.plan(fresh, (x,), cores(1), mesh={"a": 1}))
    assert torch.allclose(applied(x), module(x), rtol=1e-12)
