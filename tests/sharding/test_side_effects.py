"""Side effects of a forward pass: refused with their line where they would be lost, put back, and not seen where there
are none."""

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
from tests.sharding.on_ranks import cores
from tests.sharding.partitioned import check_at_random
from tests.sharding.refused import BATCH, ONE_AXIS, Plain, lines_of, refused

STEPS = 0
SEEN: list[Tensor] = []
OPTIONS = {"losses": []}
line_of = lines_of(__file__)


def counts(module: Plain, h: Tensor) -> Tensor:
    module.count += 1  # an attribute
    return h


def keeps(module: Plain, h: Tensor) -> Tensor:
    module.log.append(h.detach())  # a list
    return h


def makes(module: Plain, h: Tensor) -> Tensor:
    module.last = h  # a new attribute
    return h


def sets_global(module: Plain, h: Tensor) -> Tensor:
    global STEPS
    STEPS += 1  # a global
    return h


def note(h: Tensor) -> None:
    SEEN.append(h)  # a global list


def notes(module: Plain, h: Tensor) -> Tensor:
    note(h)
    return h


def keeps_deep(module: Plain, h: Tensor) -> Tensor:
    OPTIONS["losses"].append(h.shape)  # deep in a global
    return h


def table(module: Plain, h: Tensor) -> Tensor:
    module.table.add_(1)  # a table
    return h + module.table


def counter() -> Callable[[Plain, Tensor], Tensor]:
    calls = 0

    def between(module: Plain, h: Tensor) -> Tensor:
        nonlocal calls
        calls += 1  # a variable
        return h

    return between


def clamps(module: Plain, h: Tensor) -> Tensor:
    with torch.no_grad():
        module.second.weight.clamp_(-1, 1)  # a parameter
    return h


def clamps_data(module: Plain, h: Tensor) -> Tensor:
    module.second.weight.data.clamp_(-1, 1)  # a parameter's data
    return h


def replaces(module: Plain, h: Tensor) -> Tensor:
    module.second.weight = nn.Parameter(module.second.weight * 2)  # a new parameter
    return h


def grows(module: Plain, h: Tensor) -> Tensor:
    module.mean = h.detach()  # a buffer of another shape
    return h


def changes_array(module: Plain, h: Tensor) -> Tensor:
    module.array[0] += 1  # an array
    return h


def counts_in_a_space(module: Plain, h: Tensor) -> Tensor:
    module.space.calls += 1  # a namespace
    return h


def counts_in_a_slot(module: Plain, h: Tensor) -> Tensor:
    module.slotted.calls += 1  # a slot
    return h


def counts_in_its_class(module: Plain, h: Tensor) -> Tensor:
    type(module).calls += 1  # a class
    return h


def counts_in_itself(module: Plain, h: Tensor) -> Tensor:
    counts_in_itself.calls += 1  # a function
    return h


counts_in_itself.calls = 0


def by_default(module: Plain, h: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006
    seen.append(1)  # a default
    return h


def keeps_in_its_class(module: Plain, h: Tensor) -> Tensor:
    if h.shape not in module.kept:
        module.kept[h.shape] = torch.arange(8.0)
    return h * module.kept[h.shape]


LOST = "is changed in forward, which a captured program would not do again; return it"
EFFECTS: dict[str, tuple[Callable[[Plain, Tensor], Tensor], str, str]] = {
    "an attribute": (counts, "an attribute", f"(='count') {LOST}"),
    "a list": (keeps, "a list", f"(='log') {LOST}"),
    "a new attribute": (makes, "a new attribute", f"(='last') {LOST}"),
    "a global": (sets_global, "a global", f"(='{__name__}.STEPS') {LOST}"),
    "a global list in a function": (notes, "a global list", f"(='{__name__}.SEEN') {LOST}"),
    "deep in a global": (keeps_deep, "deep in a global", f"(='{__name__}.OPTIONS') {LOST}"),
    "a variable of an enclosing function": (counter(), "a variable", LOST),
    "an array": (changes_array, "an array", f"(='array') {LOST}"),
    "a namespace": (counts_in_a_space, "a namespace", f"(='space') {LOST}"),
    "a slot": (counts_in_a_slot, "a slot", f"(='slotted') {LOST}"),
    "an attribute of its class": (counts_in_its_class, "a class", f"(='Plain.calls') {LOST}"),
    "an attribute of a function": (counts_in_itself, "a function", f"(='counts_in_itself.calls') {LOST}"),
    "a default": (by_default, "a default", f"(='seen of by_default') {LOST}"),
    "a plain tensor in place": (table, "a table", "is not registered nor made in forward; register it as a buffer"),
    "a parameter in place": (clamps, "a parameter", "(='second.weight') is a parameter that is changed in place"),
    "a parameter's data": (clamps_data, "a parameter's data",
                           "(='second.weight') is a parameter that is changed in place"),
    "a parameter set anew": (replaces, "a new parameter", "(='second.weight') is a parameter that forward sets anew"),
    "a buffer of another shape": (
        grows, "a buffer of another shape",
        "(='mean') is a buffer that forward sets anew (=[8, 8] torch.float32), and must stay as it was (=[8] ",
    ),
}  # fmt: skip


@pytest.mark.sample(8)
@pytest.mark.parametrize("which", EFFECTS)
def test_a_side_effect_that_would_be_lost_is_told_with_its_line(which: str) -> None:
    between, mark, told = EFFECTS[which]
    module = Plain(between)
    message = refused(module)
    assert f"{line_of(mark)} " in message
    assert told in message


def test_a_refused_module_is_as_it_was() -> None:
    SEEN.clear()
    before = STEPS
    for between in (counts, keeps, makes, sets_global, notes, grows):
        module = Plain(between)
        refused(module)
        assert (module.count, module.log, hasattr(module, "last")) == (0, [], False)
        assert type(module.mean) is Tensor
        assert module.mean.shape == (8,)
    assert before == STEPS
    assert SEEN == []


def test_a_hook_that_keeps_what_it_sees_is_told() -> None:
    module = Plain()
    module.first.register_forward_hook(lambda *called: SEEN.append(called[-1]))  # a hook
    assert refused(module).startswith(f"{line_of('a hook')} (='{__name__}.SEEN') {LOST}")


def test_what_is_only_kept_from_the_first_call_on_is_no_effect() -> None:
    known: dict[int, int] = {}

    def between(module: Plain, h: Tensor) -> Tensor:
        return h * known.setdefault(h.shape[0], h.shape[0])

    sharding.plan(Plain(between), BATCH, cores(2), mesh=ONE_AXIS)


def keeps_a_number(module: Plain, h: Tensor) -> Tensor:
    if module.scale is None:
        module.scale = h.shape[-1] ** 0.5
    return h / module.scale


def keeps_a_shape(module: Plain, h: Tensor) -> Tensor:
    module.last = h.shape
    return h


@pytest.mark.parametrize("between", [keeps_a_number, keeps_a_shape, lambda module, h: h * module.half])
def test_an_attribute_that_is_the_same_after_every_call_is_no_effect(between: Any) -> None:
    module = Plain(between)
    sharding.plan(module, BATCH, cores(2), mesh=ONE_AXIS)
    assert module.scale is None
    assert not {"last", "half"} & set(vars(module))


@functools.lru_cache
def triangle(size: int) -> Tensor:
    return torch.tril(torch.ones(size, 8))


def test_a_cached_function_gives_tensors_that_are_not_fake_afterwards() -> None:
    module = Plain(lambda module, h: h * triangle(h.shape[0]))
    for _ in range(2):  # with nothing kept, and with what a call has left
        applied = sharding.apply(module, sharding.plan(module, BATCH, cores(1)))
        assert type(triangle(8)) is Tensor
        assert torch.allclose(applied(*BATCH), module(*BATCH))


class Sets:
    def run(self) -> int:
        return 2

    def __call__(self, other: Any) -> None:
        other.run = 3


def test_a_method_of_which_another_object_gets_one_of_that_name_is_no_effect() -> None:
    def between(module: Plain, h: Tensor) -> Tensor:
        sets(made := SimpleNamespace())
        return h * made.run * sets.run()

    sets = Sets()
    sharding.plan(Plain(between), BATCH, cores(2), mesh=ONE_AXIS)
    assert vars(sets) == {}


@pytest.fixture
def late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that can be imported as `late`."""
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "late.py"
    sys.modules.pop("late", None)


def test_what_a_first_import_in_forward_does_is_no_effect(late: Path) -> None:
    late.write_text("KNOWN = []\ndef note(name):\n    KNOWN.append(name)\n    return 2\nSCALE = note('scale')\n")

    def between(module: Plain, h: Tensor) -> Tensor:
        from late import SCALE  # type: ignore[import-not-found]

        return h * SCALE

    sharding.plan(Plain(between), BATCH, cores(2), mesh=ONE_AXIS)
    assert sys.modules["late"].KNOWN == ["scale"]


def test_tensors_of_a_file_that_is_imported_in_forward_are_not_fake_afterwards(late: Path) -> None:
    late.write_text("import torch\nTABLE = torch.ones(8)\n")

    def between(module: Plain, h: Tensor) -> Tensor:
        from late import TABLE  # late

        return h * TABLE

    module = Plain(between)
    assert refused(module) == (
        f"{line_of('late')} (='late') is imported in forward, and makes tensors (TABLE); "
        "import it at the head of the file"
    )
    module(*BATCH)
    sharding.plan(module, BATCH, cores(2), mesh=ONE_AXIS)


class Running:
    """An object of a user's own, with an attribute from the start."""

    def __init__(self, h: Tensor | None = None) -> None:
        self.h = h

    def update(self, h: Tensor) -> None:
        self.h = h


def constructs(module: Plain, h: Tensor) -> Tensor:
    running = Running(h)
    running.update(h + 1)
    return running.h


def constructs_empty(module: Plain, h: Tensor) -> Tensor:
    running = Running()
    running.update(h + 1)
    return running.h


@pytest.mark.parametrize("between", [constructs, constructs_empty])
def test_what_is_set_on_an_object_that_forward_constructs_is_no_effect(between: Any) -> None:
    sharding.plan(Plain(between), BATCH, cores(2), mesh=ONE_AXIS)


def test_what_is_set_on_an_object_that_was_there_before_is_refused() -> None:
    def between(module: Plain, h: Tensor) -> Tensor:
        RUNNING.update(h)  # an object of before
        return h

    assert "(='Running.h') is changed in forward" in refused(Plain(between))
    assert RUNNING.h is None


def test_an_object_that_is_initialised_again_is_refused() -> None:
    def between(module: Plain, h: Tensor) -> Tensor:
        RUNNING.__init__(h)  # type: ignore[misc]
        return h

    assert "(='Running.h') is changed in forward" in refused(Plain(between))
    assert RUNNING.h is None


RUNNING = Running()


CALLED: list[int] = []


@functools.cache
def once(size: int) -> int:
    CALLED.append(size)
    return size


def test_a_cached_function_that_keeps_no_tensor_runs_once() -> None:
    CALLED.clear()
    once(8)
    sharding.plan(Plain(lambda module, h: h * once(h.shape[0])), BATCH, cores(2), mesh=ONE_AXIS)
    assert CALLED == [8]


def test_tensors_that_a_class_keeps_are_refused_and_taken_out_again() -> None:
    message = refused(Plain(keeps_in_its_class))
    assert "(='Plain.kept') is changed in forward" in message
    assert message.endswith("compute it in __init__, and register it as a buffer if it is a tensor")
    assert Plain.kept == {}


class Hooked(nn.Module):
    """Layers whose results are recorded by hooks that the first call registers, as models of the transformers library
    record what their routers say."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self._is_hooked = False

    def forward(self, x: Tensor) -> Tensor:
        recorded: list[Tensor] = []
        RECORDERS.append(recorded)
        try:
            if not self._is_hooked:
                for layer in self.layers:
                    layer[0].register_forward_hook(lambda module, given, result: RECORDERS[-1].append(result))
                self._is_hooked = True
            for layer in self.layers:
                x = layer(x)
            return x.sum() + torch.stack(recorded).square().sum()
        finally:
            RECORDERS.pop()


RECORDERS: list[list[Tensor]] = []


def test_hooks_that_the_first_call_registers_run_once_a_layer_and_are_taken_off() -> None:
    torch.manual_seed(0)
    module, x = Hooked().double(), torch.randn(8, 6, dtype=torch.float64)
    check_at_random(module, (x,), cases=2)
    fresh = Hooked().double()
    fresh.load_state_dict(module.state_dict())
    plans = [sharding.plan(fresh, (x,), cores(2), mesh=ONE_AXIS) for _ in range(2)]
    assert plans[0].digest == plans[1].digest
    assert not any(layer[0]._forward_hooks for layer in fresh.layers)
    assert not fresh._is_hooked
    applied = sharding.apply(fresh, sharding.plan(fresh, (x,), cores(1), mesh={"a": 1}))
    assert torch.allclose(applied(x), module(x), rtol=1e-12)
