"""What a user does with an applied module: it has the plan's effect, or is refused in words."""

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from moe import sharding
from moe.sharding.applied.batch import check_batch, leaves_of
from tests.refusals import refused
from tests.sharding.on_ranks import cores


def applied_to(module: nn.Module, *sample: Any, **options: Any) -> sharding.Applied:
    plan = sharding.plan(module, sample, cores(1), mesh={"devices": 1})
    return sharding.apply(module, plan, sample=sample, **options)


class Difference(nn.Module):
    """Of what a function takes out of the batch, so that its order counts."""

    def __init__(self, both: Callable[[Any], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.both, self.scale = both, nn.Parameter(torch.tensor(3.0))

    def forward(self, batch: Any) -> Tensor:
        x, y = self.both(batch)
        return ((x - 2 * y) * self.scale).sum()


X, Y = torch.arange(6.0).reshape(2, 3), torch.ones(2, 3)


def test_a_dict_is_taken_by_its_keys():
    module = Difference(lambda batch: (batch["x"], batch["y"]["only"]))
    applied = applied_to(module, {"x": X, "y": {"only": Y}})
    assert applied({"y": {"only": Y}, "x": X}).item() == module({"x": X, "y": {"only": Y}}).item() == 9.0


def test_a_conjugated_batch_is_given_as_its_values():
    """Exchanges move memory, in which a conjugated tensor has the values that it had before."""
    batch = [torch.randn(4, 3, dtype=torch.complex128).conj()]
    (given,) = check_batch(batch, leaves_of(batch), pytree.tree_structure(batch))
    assert not given.is_conj()
    assert torch.equal(given, batch[0])


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ((X, Y), r"is nested otherwise: \(_, _\); the plan is for 2: \(\[_, _\],\)"),
        (((X, Y),), r"is nested otherwise: \(\(_, _\),\); the plan is for 2: \(\[_, _\],\)"),
        (([X, Y, Y],), r"has 3 values: \(\[_, _, _\],\); the plan is for 2: \(\[_, _\],\)"),
        (({"x": X, "y": Y},), r"\(\{'x': _, 'y': _\},\); the plan is for 2"),
        ((X,), r"has 1 values: \(_,\); the plan is for 2"),
    ],
    ids=["flat", "tuple", "longer", "dict", "tensor"],
)
def test_a_batch_nested_otherwise(batch: tuple[Any, ...], words: str):
    applied = applied_to(Difference(lambda batch: (batch[0], batch[1])), [X, Y])
    with pytest.raises(ValueError, match=words):
        applied(*batch)
    assert applied([X, Y]).item() == 9.0


class Settings(dict[str, Any]):
    """A dict whose keys are attributes, and which therefore has no `__deepcopy__` that could be asked for."""

    __getattr__ = dict.__getitem__


class Uncopied(nn.Module):
    """A module with what Python cannot copy, beside what a copy must have of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.lock, self.np, self.settings = threading.Lock(), np, Settings(width=3)
        self.file = open(__file__)  # noqa: SIM115
        self.first = nn.Linear(3, 3)
        self.drop = nn.Dropout(0.5)
        self.steps = [self.first, self.drop, self.lock]
        self.finish = self.finished
        self.norm = nn.BatchNorm1d(self.settings.width)

    def finished(self, x: Tensor) -> Tensor:
        return self.norm(x).square().sum()

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps[:2]:
            x = step(x)
        return self.finish(x)


def test_a_module_that_cannot_be_copied_has_both_modes():
    torch.manual_seed(0)
    module = Uncopied()
    applied = applied_to(module, X)
    for _ in range(2):
        applied(X).backward()
    assert applied.get_parameter("first.weight").grad is not None
    module.norm.load_state_dict(applied.get_submodule("norm").state_dict())
    assert torch.allclose(applied.eval()(X), module.eval()(X))
    assert module.steps[0] is module.first
    assert not module.first.weight.is_meta
    assert applied.train().training
    module.file.close()


def test_parts_of_one_object_that_cannot_be_copied():
    class Shared:
        def __init__(self) -> None:
            self.factor, self.lock = 2.0, threading.Lock()

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(3.0))
            self.one = Shared()
            self.other = [self.one]

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.scale * self.one.factor * self.other[0].factor).sum()

    assert applied_to(Twice(), Y).eval()(Y).item() == 72.0


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 2.0
        self.first, self.bn = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.first.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.bn(self.first(x)) * self.factor).square().sum()


def test_a_submodule_keeps_the_mode_that_was_planned():
    module = Normed()
    module.bn.eval()
    applied = applied_to(module, X)
    expected = module(X).item()
    for _ in range(2):
        applied.train()
        assert (applied.training, applied.get_submodule("bn").training) == (True, False)
        assert applied(X).item() == pytest.approx(expected)
        applied.eval()
        assert applied(X).item() == pytest.approx(expected)
    assert applied.get_buffer("bn.running_mean").equal(torch.zeros(3))


def test_modes_of_submodules_do_not_change_alone():
    applied = applied_to(Normed(), X)
    applied.get_submodule("bn").train()  # as it is
    with pytest.raises(RuntimeError, match=r"eval\(\) of a submodule .* would change nothing"):
        applied.get_submodule("bn").eval()
    applied.eval()
    with pytest.raises(RuntimeError, match=r"train\(\) of a submodule .* would change nothing"):
        applied.get_submodule("bn").train()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook", "backward_hook"]
)
def test_a_hook_on_a_submodule_would_not_run(kind: str):
    applied = applied_to(Normed(), X)
    with pytest.raises(RuntimeError, match="hook on a submodule of an applied module would never run"):
        getattr(applied.get_submodule("bn"), f"register_{kind}")(print)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["first", "first.bias", ""], ids=["module", "parameter", "all"])
def test_what_was_frozen_cannot_be_trained(name: str):
    applied = applied_to(Normed(), X)
    thawed: Any = applied.get_parameter(name) if "." in name else applied.get_submodule(name)
    thawed.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"first\.bias asks for a gradient, which was not planned"):
        applied(X)
    with torch.no_grad():
        applied(X)
    applied.get_parameter("first.bias").requires_grad_(False)
    applied(X).backward()


def test_what_was_trained_can_be_frozen():
    applied = applied_to(Normed(), X)
    applied.get_parameter("first.weight").requires_grad_(False)
    applied(X).backward()
    assert applied.get_parameter("first.weight").grad is None
    assert applied.get_parameter("bn.weight").grad is not None


def test_values_that_the_program_has_cannot_be_set():
    applied = applied_to(Normed(), X)
    with pytest.raises(AttributeError, match=r"factor \(=0.5\) cannot be set on an applied module"):
        applied.factor = 0.5
    with pytest.raises(AttributeError, match=r"eps \(=1\) cannot be set on an applied module"):
        applied.get_submodule("bn").eps = 1
    applied.note = "a user's own"


def test_autocast_around_a_call():
    applied = applied_to(Normed(), X)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(RuntimeError, match=r"torch\.autocast"):
        applied(X)
    loss = applied(X)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(RuntimeError, match=r"torch\.autocast"):
        loss.backward()


def test_copies():
    applied = applied_to(Normed(), X)
    for copied in (copy.deepcopy, torch.optim.swa_utils.AveragedModel):
        with pytest.raises(TypeError, match="an applied module cannot be copied"):
            copied(applied)


def test_a_module_that_is_pickled():
    with pytest.raises(TypeError, match=r"an applied module cannot be pickled: .* write it with sharding\.save"):
        pickle.dumps(applied_to(Normed(), X))


def test_a_call_with_other_tensors_in_the_place_of_parameters():
    module = Normed()
    module.bn.eval()
    applied = applied_to(module, X)
    others = {name: each.detach() * 2 for name, each in module.named_parameters()}
    others["first.weight"].requires_grad_()
    found, expected = (torch.func.functional_call(each, others, (X,)) for each in (applied, module))
    assert torch.allclose(found, expected)
    gradients = [torch.autograd.grad(each, others["first.weight"])[0] for each in (found, expected)]
    assert torch.allclose(*gradients)


def test_an_applied_module_is_not_planned_again():
    module = Normed()
    plan = sharding.plan(module, (X,), cores(1), mesh={"devices": 1})
    applied = sharding.apply(module, plan)
    with refused("unsupported", "model", "Applied"):
        sharding.plan(applied, (X,), cores(1), mesh={"devices": 1})
    with refused("unsupported", "0", "Applied"):
        sharding.plan(nn.Sequential(applied), (X,), cores(1), mesh={"devices": 1})
    with refused("unsupported", "model", "Applied"):
        sharding.apply(applied, plan)


@pytest.mark.parametrize("options", [{1: 2.0, "t": (1, 2)}, {1: 2.0, "t": [1, 2]}], ids=["both", "key"])
def test_a_sample_that_a_plan_cannot_keep(options: dict[Any, Any]):
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(3.0))

        def forward(self, x: Tensor, options: dict[Any, Any]) -> Tensor:
            return (x * self.scale * options.get(1, 1.0) * sum(options["t"])).sum() if "t" in options else x.sum()

    module = Optional()
    plan = sharding.plan(module, (X, options), cores(1), mesh={"devices": 1})
    with refused("wrong_type", "sample", "dict"):
        sharding.apply(module, plan)
    applied = sharding.apply(module, plan, sample=(X, options))
    assert applied(X, options).item() == module(X, options).item()


def test_a_call_after_close():
    applied = applied_to(Normed(), X)
    loss = applied(X)
    sharding.close(applied)
    with pytest.raises(RuntimeError, match=r"was closed by sharding.close; apply the plan again"):
        applied(X)
    with pytest.raises(RuntimeError, match=r"was closed by sharding.close; apply the plan again"):
        loss.backward()
