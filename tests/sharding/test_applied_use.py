"""Uses of an applied module: they have the plan's effect or are refused."""

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
from tests.refusals import expect_problem
from tests.sharding.modules import Function
from tests.sharding.on_ranks import apply_on_one_device, cores

X, Y = torch.arange(6.0).reshape(2, 3), torch.ones(2, 3)
BOTH = ([X, Y],)


def difference(take: Callable[[Any], tuple[Tensor, Tensor]]) -> Function:
    """Scaled difference of two tensors of a batch, whose order counts."""
    return Function(lambda scale, batch: ((take(batch)[0] - 2 * take(batch)[1]) * scale).sum(), torch.tensor(3.0))


def test_dicts_are_matched_by_their_keys():
    module = difference(lambda batch: (batch["x"], batch["y"]["only"]))
    applied = apply_on_one_device(module, {"x": X, "y": {"only": Y}})
    assert applied({"y": {"only": Y}, "x": X}).item() == module({"x": X, "y": {"only": Y}}).item() == 9.0


def test_a_conjugated_batch_is_passed_as_its_values():
    """Exchanges move memory, which has the unconjugated values of a conjugated tensor."""
    batch = [torch.randn(4, 3, dtype=torch.complex128).conj()]
    (tensor,) = check_batch(batch, leaves_of(batch), pytree.tree_structure(batch))
    assert not tensor.is_conj()
    assert torch.equal(tensor, batch[0])


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("batch", "nesting"),
    [
        ((X, Y), r"\(_, _\)"),
        (((X, Y),), r"\(\(_, _\),\)"),
        (([X, Y, Y],), r"3 values: \(\[_, _, _\],\)"),
        (({"x": X, "y": Y},), r"\(\{'x': _, 'y': _\},\)"),
        ((X,), r"1 values: \(_,\)"),
    ],
    ids=["flat", "tuple", "longer", "dict", "tensor"],
)
def test_batches_of_another_nesting_are_refused(batch: tuple[Any, ...], nesting: str):
    applied = apply_on_one_device(difference(lambda batch: (batch[0], batch[1])), *BOTH)
    with pytest.raises(ValueError, match=nesting + r"; the plan has 2: \(\[_, _\],\)"):
        applied(*batch)
    assert applied(*BOTH).item() == 9.0


class Settings(dict[str, Any]):
    """A dict with its keys as attributes, so that looking up `__deepcopy__` raises KeyError."""

    __getattr__ = dict.__getitem__


class UncopyableModule(nn.Module):
    """A module with attributes that Python cannot copy next to those that a copy must own."""

    def __init__(self) -> None:
        super().__init__()
        self.lock, self.np, self.settings = threading.Lock(), np, Settings(width=3)
        self.file = open(__file__)  # noqa: SIM115
        self.first, self.drop = nn.Linear(3, 3), nn.Dropout(0.5)
        self.steps = [self.first, self.drop, self.lock]
        self.finish = self.loss
        self.norm = nn.BatchNorm1d(self.settings.width)

    def loss(self, x: Tensor) -> Tensor:
        return self.norm(x).square().sum()

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps[:2]:
            x = step(x)
        return self.finish(x)


@pytest.mark.slow
def test_a_module_that_cannot_be_copied_has_both_modes():
    torch.manual_seed(0)
    module = UncopyableModule()
    applied = apply_on_one_device(module, X)
    for _ in range(2):
        applied(X).backward()
    assert applied.get_parameter("first.weight").grad is not None
    module.norm.load_state_dict(applied.get_submodule("norm").state_dict())
    assert torch.allclose(applied.eval()(X), module.eval()(X))
    assert module.steps[0] is module.first
    assert not module.first.weight.is_meta
    assert applied.train().training
    module.file.close()


@pytest.mark.slow
def test_an_object_that_cannot_be_copied_may_be_shared():
    class Resource:
        def __init__(self) -> None:
            self.factor, self.lock = 2.0, threading.Lock()

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.resource = nn.Parameter(torch.tensor(3.0)), Resource()
            self.resources = [self.resource]

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.scale * self.resource.factor * self.resources[0].factor).sum()

    assert apply_on_one_device(Twice(), Y).eval()(Y).item() == 72.0


class LinearNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 2.0
        self.first, self.bn = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.first.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.bn(self.first(x)) * self.factor).square().sum()


def test_a_submodule_keeps_its_planned_mode():
    module = LinearNorm()
    module.bn.eval()
    applied = apply_on_one_device(module, X)
    expected = module(X).item()
    for _ in range(2):
        applied.train()
        assert (applied.training, applied.get_submodule("bn").training) == (True, False)
        assert applied(X).item() == pytest.approx(expected)
        applied.eval()
        assert applied(X).item() == pytest.approx(expected)
    assert applied.get_buffer("bn.running_mean").equal(torch.zeros(3))


@pytest.mark.slow
def test_modes_of_submodules_cannot_be_set():
    applied = apply_on_one_device(LinearNorm(), X)
    applied.get_submodule("bn").train()  # no change
    with pytest.raises(RuntimeError, match=r"^eval\(\) has no effect"):
        applied.get_submodule("bn").eval()
    applied.eval()
    with pytest.raises(RuntimeError, match=r"^train\(\) has no effect"):
        applied.get_submodule("bn").train()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook", "backward_hook"]
)
def test_hooks_on_submodules_are_refused(kind: str):
    applied = apply_on_one_device(LinearNorm(), X)
    with pytest.raises(RuntimeError, match="hook on a submodule"):
        getattr(applied.get_submodule("bn"), f"register_{kind}")(print)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["first", "first.bias", ""], ids=["module", "parameter", "all"])
def test_frozen_parameters_cannot_be_trained(name: str):
    applied = apply_on_one_device(LinearNorm(), X)
    target: Any = applied.get_parameter(name) if "." in name else applied.get_submodule(name)
    target.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"^first\.bias requires a gradient"):
        applied(X)
    with torch.no_grad():
        applied(X)
    applied.get_parameter("first.bias").requires_grad_(False)
    applied(X).backward()


def test_trained_parameters_can_be_frozen():
    applied = apply_on_one_device(LinearNorm(), X)
    applied.get_parameter("first.weight").requires_grad_(False)
    applied(X).backward()
    assert applied.get_parameter("first.weight").grad is None
    assert applied.get_parameter("bn.weight").grad is not None


@pytest.mark.slow
def test_captured_attributes_cannot_be_set():
    applied = apply_on_one_device(LinearNorm(), X)
    with pytest.raises(AttributeError, match=r"^factor \(=0.5\)"):
        applied.factor = 0.5
    with pytest.raises(AttributeError, match=r"^eps \(=1\)"):
        applied.get_submodule("bn").eps = 1
    applied.note = "a user's own"


@pytest.mark.slow
def test_calls_under_autocast_are_refused():
    applied = apply_on_one_device(LinearNorm(), X)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(RuntimeError, match=r"torch\.autocast"):
        applied(X)
    loss = applied(X)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(RuntimeError, match=r"torch\.autocast"):
        loss.backward()


@pytest.mark.slow
def test_copies_and_pickles_are_refused():
    applied = apply_on_one_device(LinearNorm(), X)
    for make_copy in (copy.deepcopy, torch.optim.swa_utils.AveragedModel):
        with pytest.raises(TypeError, match="an applied module cannot be copied"):
            make_copy(applied)
    with pytest.raises(TypeError, match=r"an applied module cannot be pickled: .* sharding\.save"):
        pickle.dumps(applied)


@pytest.mark.slow
def test_functional_calls_take_other_parameters():
    module = LinearNorm()
    module.bn.eval()
    applied = apply_on_one_device(module, X)
    parameters = {name: parameter.detach() * 2 for name, parameter in module.named_parameters()}
    parameters["first.weight"].requires_grad_()
    outputs = [torch.func.functional_call(model, parameters, (X,)) for model in (applied, module)]
    assert torch.allclose(*outputs)
    assert torch.allclose(*(torch.autograd.grad(output, parameters["first.weight"])[0] for output in outputs))


def test_an_applied_module_is_not_planned_again():
    module = LinearNorm()
    plan = sharding.plan(module, (X,), cores(1), mesh={"devices": 1})
    applied = sharding.apply(module, plan)
    with expect_problem("unsupported", "model", "Applied"):
        sharding.plan(applied, (X,), cores(1), mesh={"devices": 1})
    with expect_problem("unsupported", "0", "Applied"):
        sharding.plan(nn.Sequential(applied), (X,), cores(1), mesh={"devices": 1})
    with expect_problem("unsupported", "model", "Applied"):
        sharding.apply(applied, plan)


@pytest.mark.parametrize("options", [{1: 2.0, "t": (1, 2)}, {1: 2.0, "t": [1, 2]}], ids=["both", "key"])
def test_a_sample_that_a_plan_cannot_store_is_passed_to_apply(options: dict[Any, Any]):
    def scaled_sum(scale: Tensor, x: Tensor, options: dict[Any, Any]) -> Tensor:
        return (x * scale * options.get(1, 1.0) * sum(options["t"])).sum() if "t" in options else x.sum()

    module = Function(scaled_sum, torch.tensor(3.0))
    plan = sharding.plan(module, (X, options), cores(1), mesh={"devices": 1})
    with expect_problem("wrong_type", "sample", "dict"):
        sharding.apply(module, plan)
    applied = sharding.apply(module, plan, sample=(X, options))
    assert applied(X, options).item() == module(X, options).item()


def test_a_closed_module_cannot_be_called():
    applied = apply_on_one_device(LinearNorm(), X)
    loss = applied(X)
    sharding.close(applied)
    with pytest.raises(RuntimeError, match=r"was closed by sharding\.close"):
        applied(X)
    with pytest.raises(RuntimeError, match=r"was closed by sharding\.close"):
        loss.backward()
