"""Forms of a module's call: by position, by name, with one batch of any type. Samples, plans and calls accept all of
them and compute what one device computes."""

import json
import random
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.nn.functional import mse_loss

from moe import sharding
from moe.sharding.arguments import Keywords, arguments_of_sample, call, canonical
from moe.spec import ProblemCode
from tests.parity.gloo_ranks import Pools
from tests.refusals import expect_problem
from tests.sharding.modules import mean_square
from tests.sharding.on_ranks import apply_on_one_device, cores, is_close, unlike

D = torch.float64


@dataclass
class Inner:
    y: Tensor


@dataclass
class Pair:
    x: Tensor
    inner: Inner


@dataclass
class Result:
    loss: Tensor
    prediction: Tensor | None = None


class Row(NamedTuple):
    x: Tensor
    y: Tensor


class Regression(nn.Module):
    """Base of modules that are called differently."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return mse_loss(self.linear(x).tanh(), y)


class PositionalLoss(Regression):
    def forward(self, x: Tensor, y: Tensor, weight: float = 1.0) -> Tensor:
        return self.loss(x, y) * weight


class KeywordLoss(Regression):
    def forward(self, *, y: Tensor, x: Tensor) -> Tensor:
        return self.loss(x, y)


class Hub(Regression):
    """Arguments and results as in the transformers library."""

    def forward(
        self, input_ids: Tensor | None = None, mask: Tensor | None = None, *, labels: Tensor, **options: Any
    ) -> dict[str, Any]:
        assert input_ids is not None
        return {"loss": self.loss(input_ids, labels) * options.get("scale", 1.0), "extra": None}


class OfPair(Regression):
    def forward(self, pair: Pair) -> Result:
        return Result(self.loss(pair.x, pair.inner.y))


class OfRow(Regression):
    def forward(self, row: Row) -> Tensor:
        return self.loss(row.x, row.y)


class OfDict(Regression):
    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self.loss(batch["x"], batch["y"])


def tensors(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 3, dtype=D, generator=generator), torch.randn(8, 2, dtype=D, generator=generator)


X, Y = tensors()
Form = tuple[type[Regression], Any, str, list[Callable[[nn.Module, Tensor, Tensor], Any]]]
FORMS: dict[str, Form] = {
    "by position": (PositionalLoss, (X, Y), "inputs.x",
                    [lambda m, x, y: m(x, y), lambda m, x, y: m(y=y, x=x), lambda m, x, y: m(x, y=y)]),
    "by position, planned by name": (PositionalLoss, {"y": Y, "x": X}, "inputs.0", [lambda m, x, y: m(x, y)]),
    "with a number": (PositionalLoss, {"y": Y, "x": X, "weight": 2.0}, "inputs.y", [lambda m, x, y: m(x, y, 2.0)]),
    "by name": (KeywordLoss, OrderedDict(x=X, y=Y), "inputs.y",
                [lambda m, x, y: m(x=x, y=y), lambda m, x, y: m(y=y, x=x)]),
    "as in the hub": (Hub, {"input_ids": X, "labels": Y, "scale": 0.5}, "inputs.labels",
                      [lambda m, x, y: m(x, labels=y, scale=0.5), lambda m, x, y: m(scale=0.5, labels=y, input_ids=x)]),
    "a data class": (OfPair, Pair(X, Inner(Y)), "inputs.0", [lambda m, x, y: m(Pair(x, Inner(y)))]),
    "a data class in a tuple": (OfPair, (Pair(X, Inner(Y)),), "inputs", [lambda m, x, y: m(Pair(x, Inner(y)))]),
    "a named tuple": (OfRow, Row(X, Y), "inputs.0", [lambda m, x, y: m(Row(x, y))]),
    "a named tuple of arguments": (PositionalLoss, Row(X, Y), "inputs.x", [lambda m, x, y: m(x, y)]),
    "a dict": (OfDict, {"x": X, "y": Y}, "inputs.0", [lambda m, x, y: m({"y": y, "x": x})]),
}  # fmt: skip


def loss_of(result: Any) -> Tensor:
    if isinstance(result, Result):
        return result.loss
    return result["loss"] if isinstance(result, dict) else result


def round_trip(plan: sharding.ShardingPlan) -> sharding.ShardingPlan:
    return sharding.ShardingPlan.from_json(json.loads(json.dumps(plan.to_json())))


def wrong_calls(form: str) -> list[str]:
    """Differences from one device on this rank."""
    kind, sample, hint_name, calls = FORMS[form]
    torch.manual_seed(1)
    module, loss, wrong = kind().to(D), loss_of if kind in (Hub, OfPair) else None, []
    plan = sharding.plan(module, sample, cores(2), {hint_name: sharding.Split(0)}, mesh={"a": 2}, loss=loss)
    applied = sharding.apply(module, round_trip(plan), sample=sample, loss=loss)
    for seed, one_call in enumerate(calls):
        module.zero_grad()
        applied.zero_grad()
        losses = [loss_of(one_call(model, *tensors(seed))) for model in (applied, module)]
        for call_loss in losses:
            call_loss.backward()
        wrong += [] if is_close(*losses) else [f"loss of call {seed}: {losses}"]
        wrong += unlike(applied, module, ("gradient",))
    sharding.close(applied)
    return wrong


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_call_equals_one_device(ranks: Pools, form: str) -> None:
    assert ranks[2].run(wrong_calls, form) == [[], []]


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", ["by position", "by position, planned by name", "as in the hub", "a dict"])
def test_a_plan_stores_samples_by_name(form: str) -> None:
    kind, sample, _, calls = FORMS[form]
    module, loss = kind().to(D), loss_of if kind is Hub else None
    plan = round_trip(sharding.plan(module, sample, cores(1), mesh={"a": 1}, loss=loss))
    applied = sharding.apply(module, plan, loss=loss)
    assert torch.allclose(calls[0](applied, X, Y), loss_of(calls[0](module, X, Y)))


def test_random_calls_have_one_form() -> None:
    """For any mix of positional and keyword arguments the module gets the same values."""

    class Echo(nn.Module):
        def forward(self, a: Any, b: Any, c: Any = 0, *, d: Any, e: Any = 0, **rest: Any) -> Any:
            return a, b, c, d, e, sorted(rest.items())

    echo, parameters = Echo(), signature(Echo().forward)
    for seed in range(200):
        draw = random.Random(seed)
        values = {name: draw.random() for name in ("a", "b", "d")}
        values |= {name: draw.random() for name in ("c", "e", "f", "g") if draw.random() < 0.5}
        num_positional = draw.randint(0, 3 if "c" in values else 2)
        positional = [values[name] for name in "abc"[:num_positional]]
        names = [name for name in values if name not in "abc"[:num_positional]]
        draw.shuffle(names)
        form = canonical(parameters, positional, {name: values[name] for name in names})
        assert call(echo, form) == echo(**values)
        assert arguments_of_sample(echo, dict(draw.sample(sorted(values.items()), len(values)))) == form
        assert isinstance(form[-1], Keywords)


def test_unknown_arguments_are_refused() -> None:
    applied = apply_on_one_device(PositionalLoss().to(D), X, Y)
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        applied(X, Y, z=1)


def test_plan_and_apply_need_the_same_loss() -> None:
    module = nn.Linear(3, 2).to(D)
    with_loss, without_loss = (
        sharding.plan(module, (X,), cores(1), mesh={"a": 1}, loss=f) for f in (mean_square, None)
    )
    with expect_problem("missing", "loss", None):
        sharding.apply(module, with_loss)
    with expect_problem("conflict", "loss", "mean_square"):
        sharding.apply(module, without_loss, loss=mean_square)
    sharding.apply(module, with_loss, loss=mean_square)


def test_dtensor_placements_are_hints() -> None:
    hints = {"linear.weight": Shard(0), "linear.bias": Replicate(), "inputs.x": [Shard(0), Replicate()]}
    module, mesh = PositionalLoss().to(D), {"a": 2, "b": 2}
    plan = sharding.plan(module, (X, Y), cores(4), hints, mesh=mesh)
    expected = {"linear.weight": sharding.Split(0), "linear.bias": sharding.Replicate(),
                "inputs.x": sharding.Shard({"a": 0})}  # fmt: skip
    assert plan.hints == expected
    assert plan.to_json() == sharding.plan(module, (X, Y), cores(4), expected, mesh=mesh).to_json()


@pytest.mark.parametrize(
    ("hint", "mesh", "code"),
    [(Partial(), {"a": 2}, "unsupported"), ([Shard(0)], None, "mismatch"), ([Shard(0), Shard(1)], {"a": 2}, "mismatch"),
     ([Shard(0), 1], {"a": 2}, "wrong_type")],
    ids=["a partial sum", "no axes", "too many axes", "no placement"],
)  # fmt: skip
def test_other_dtensor_placements_are_refused(hint: Any, mesh: dict[str, int] | None, code: ProblemCode) -> None:
    with expect_problem(code, "hints['linear.weight']"):
        sharding.plan(PositionalLoss().to(D), (X, Y), cores(2), {"linear.weight": hint}, mesh=mesh)


def on_torch_mesh() -> list[Any]:
    """Results on a DeviceMesh with another order of ranks."""
    torch.manual_seed(1)
    module, mesh = PositionalLoss().to(D), DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("data", "model"))
    hints = {"inputs": sharding.Split(0, axis="data"), "linear.weight": Shard(0)}
    plan = sharding.plan(module, (X, Y), cores(4), hints, mesh=mesh)
    applied = sharding.apply(module, plan, mesh=mesh)
    is_equal, indices = torch.allclose(applied(X, Y), module(X, Y), rtol=1e-12), applied.mesh.indices
    sharding.close(applied)
    second_module = sharding.apply(module, plan, mesh=mesh)  # whose process groups still exist
    for wrong_mesh in (init_device_mesh("cpu", (4,)), DeviceMesh("cpu", [[2, 0], [3, 1]])):
        with expect_problem("mismatch", "mesh"):
            sharding.apply(module, plan, mesh=wrong_mesh)
    return [dict(plan.mesh), is_equal and torch.allclose(second_module(X, Y), module(X, Y)), indices]


@pytest.mark.slow
def test_a_torch_mesh_gives_the_ranks(ranks: Pools) -> None:
    mesh = {"data": 2, "model": 2}
    assert ranks[4].run(on_torch_mesh) == [[mesh, True, indices] for indices in ((0, 0), (1, 0), (0, 1), (1, 1))]
