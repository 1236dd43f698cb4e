"""Forms in which modules are called: by position, by name, with one batch of any kind. Samples, plans and calls take
them all, and compute what one device computes."""

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
from moe.spec import SpecError
from tests.parity.gloo_ranks import Pools
from tests.sharding.on_ranks import cores

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
    """A base for modules that differ in how they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return mse_loss(self.linear(x).tanh(), y)


class Ordered(Regression):
    def forward(self, x: Tensor, y: Tensor, weight: float = 1.0) -> Tensor:
        return self.loss(x, y) * weight


class Named(Regression):
    def forward(self, *, y: Tensor, x: Tensor) -> Tensor:
        return self.loss(x, y)


class Hub(Regression):
    """As models of the transformers library are called, and what they return."""

    def forward(
        self, input_ids: Tensor | None = None, mask: Tensor | None = None, *, labels: Tensor, **options: Any
    ) -> dict[str, Any]:
        assert input_ids is not None
        scale = options.get("scale", 1.0)
        return {"loss": self.loss(input_ids, labels) * scale, "extra": None}


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
Form = tuple[type[Regression], Any, list[Callable[[nn.Module, Tensor, Tensor], Any]], str]
FORMS: dict[str, Form] = {
    "in order": (
        Ordered,
        (X, Y),
        [lambda m, x, y: m(x, y), lambda m, x, y: m(y=y, x=x), lambda m, x, y: m(x, y=y)],
        "inputs.x",
    ),
    "in order, by name": (Ordered, {"y": Y, "x": X}, [lambda m, x, y: m(x, y)], "inputs.0"),
    "with a number": (Ordered, {"y": Y, "x": X, "weight": 2.0}, [lambda m, x, y: m(x, y, 2.0)], "inputs.y"),
    "by name alone": (
        Named,
        OrderedDict(x=X, y=Y),
        [lambda m, x, y: m(x=x, y=y), lambda m, x, y: m(y=y, x=x)],
        "inputs.y",
    ),
    "as of the hub": (
        Hub,
        {"input_ids": X, "labels": Y, "scale": 0.5},
        [lambda m, x, y: m(x, labels=y, scale=0.5), lambda m, x, y: m(scale=0.5, labels=y, input_ids=x)],
        "inputs.labels",
    ),
    "a data class": (OfPair, Pair(X, Inner(Y)), [lambda m, x, y: m(Pair(x, Inner(y)))], "inputs.0"),
    "a data class in a tuple": (OfPair, (Pair(X, Inner(Y)),), [lambda m, x, y: m(Pair(x, Inner(y)))], "inputs"),
    "a named tuple": (OfRow, Row(X, Y), [lambda m, x, y: m(Row(x, y))], "inputs.0"),
    "a named tuple in order": (Ordered, Row(X, Y), [lambda m, x, y: m(x, y)], "inputs.x"),
    "a dict": (OfDict, {"x": X, "y": Y}, [lambda m, x, y: m({"y": y, "x": x})], "inputs.0"),
}


def loss_of(returned: Any) -> Tensor:
    if isinstance(returned, Result):
        return returned.loss
    return returned["loss"] if isinstance(returned, dict) else returned


def wrong_calls(form: str) -> list[str]:
    """What is not as on one device, on this rank."""
    kind, sample, calls, hinted = FORMS[form]
    torch.manual_seed(1)
    module = kind().to(D)
    loss = loss_of if kind in (Hub, OfPair) else None
    plan = sharding.plan(
        module, sample, cores(2), {hinted: sharding.Split(0)}, mesh={"a": 2}, loss=None if loss is None else loss
    )
    plan = sharding.ShardingPlan.from_json(json.loads(json.dumps(plan.to_json())))
    applied = sharding.apply(module, plan, sample=sample, loss=loss)
    wrong = []
    for seed, one_call in enumerate(calls):
        x, y = tensors(seed)
        module.zero_grad()
        applied.zero_grad()
        ours, theirs = one_call(applied, x, y), loss_of(one_call(module, x, y))
        ours.backward()
        theirs.backward()
        if not torch.allclose(ours, theirs, rtol=1e-12):
            wrong.append(f"loss of call {seed}: {ours} for {theirs}")
        for name, parameter in applied.named_parameters():
            gradient, shard = module.get_parameter(name).grad, applied.shard_of(name, parameter)
            assert gradient is not None
            part = gradient[tuple(slice(at, at + n) for at, n in zip(shard.offsets, shard.part.shape, strict=True))]
            if not torch.allclose(shard.part.new_tensor(applied.shard_of(name, parameter.grad).part), part):
                wrong.append(f"gradient of {name}")
    sharding.close(applied)
    return wrong


@pytest.mark.sample(3)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_call_is_that_of_one_device(ranks: Pools, form: str) -> None:
    assert ranks[2].run(wrong_calls, form) == [[], []]


@pytest.mark.sample(2)
@pytest.mark.parametrize("form", ["in order", "in order, by name", "as of the hub", "a dict"])
def test_a_plan_keeps_samples_by_name(form: str) -> None:
    kind, sample, calls, _ = FORMS[form]
    module = kind().to(D)
    loss = loss_of if kind is Hub else None
    plan = sharding.plan(module, sample, cores(1), mesh={"a": 1}, loss=loss)
    plan = sharding.ShardingPlan.from_json(json.loads(json.dumps(plan.to_json())))
    applied = sharding.apply(module, plan, loss=loss)
    assert torch.allclose(calls[0](applied, X, Y), loss_of(calls[0](module, X, Y)))


def test_random_calls_have_one_form() -> None:
    """However arguments are shared out between positions and names, the module is called with the same ones."""

    class Echo(nn.Module):
        def forward(self, a: Any, b: Any, c: Any = 0, *, d: Any, e: Any = 0, **rest: Any) -> Any:
            return a, b, c, d, e, sorted(rest.items())

    echo, takes = Echo(), signature(Echo().forward)
    for seed in range(200):
        draw = random.Random(seed)
        values = {name: draw.random() for name in ("a", "b", "d")}
        for name in ("c", "e", "f", "g"):
            if draw.random() < 0.5:
                values[name] = draw.random()
        in_order = [values[name] for name in ("a", "b", "c")[: draw.randint(0, 3 if "c" in values else 2)]]
        others = [name for name in values if name not in ("a", "b", "c")[: len(in_order)]]
        draw.shuffle(others)
        named = {name: values[name] for name in others}
        form = canonical(takes, in_order, named)
        assert call(echo, form) == echo(**values)
        shuffled = dict(draw.sample(sorted(values.items()), len(values)))
        assert arguments_of_sample(echo, shuffled) == form
        assert isinstance(form[-1], Keywords)


def test_an_argument_that_forward_does_not_take() -> None:
    module = Ordered().to(D)
    applied = sharding.apply(module, sharding.plan(module, (X, Y), cores(1), mesh={"a": 1}))
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        applied(X, Y, z=1)


def test_a_loss_that_is_forgotten() -> None:
    def squared(out: Tensor) -> Tensor:
        return out.square().mean()

    module = nn.Linear(3, 2).to(D)
    planned = {loss: sharding.plan(module, (X,), cores(1), mesh={"a": 1}, loss=loss) for loss in (squared, None)}
    for given, expected in ((squared, None), (None, squared)):
        with pytest.raises(SpecError) as caught:
            sharding.apply(module, planned[given], loss=expected)
        assert [problem.path for problem in caught.value.problems] == ["loss"]
    sharding.apply(module, planned[squared], loss=squared)


def test_placements_of_dtensor_are_hints() -> None:
    hints = {"linear.weight": Shard(0), "linear.bias": Replicate(), "inputs.x": [Shard(0), Replicate()]}
    module, mesh = Ordered().to(D), {"a": 2, "b": 2}
    plan = sharding.plan(module, (X, Y), cores(4), hints, mesh=mesh)
    ours = {
        "linear.weight": sharding.Split(0),
        "linear.bias": sharding.Replicate(),
        "inputs.x": sharding.Shard({"a": 0}),
    }
    assert plan.hints == ours
    assert plan.to_json() == sharding.plan(module, (X, Y), cores(4), ours, mesh=mesh).to_json()


@pytest.mark.parametrize(
    ("hint", "mesh"),
    [(Partial(), {"a": 2}), ([Shard(0)], None), ([Shard(0), Shard(1)], {"a": 2}), ([Shard(0), 1], {"a": 2})],
    ids=["a partial sum", "no axes", "too many axes", "no placement"],
)
def test_placements_of_dtensor_that_are_no_hints(hint: Any, mesh: dict[str, int] | None) -> None:
    with pytest.raises(SpecError) as caught:
        sharding.plan(Ordered().to(D), (X, Y), cores(2), {"linear.weight": hint}, mesh=mesh)
    assert {problem.path for problem in caught.value.problems} == {"hints['linear.weight']"}


def on_torch_mesh() -> list[Any]:
    """Results on a mesh of torch's own, whose ranks lie in another order than ours would, beside one device."""
    torch.manual_seed(1)
    module = Ordered().to(D)
    mesh = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("data", "model"))
    plan = sharding.plan(
        module, (X, Y), cores(4), {"inputs": sharding.Split(0, axis="data"), "linear.weight": Shard(0)}, mesh=mesh
    )
    applied = sharding.apply(module, plan, mesh=mesh)
    equal = torch.allclose(applied(X, Y), module(X, Y), rtol=1e-12)
    at = applied.mesh.indices
    sharding.close(applied)
    again = sharding.apply(module, plan, mesh=mesh)  # whose process groups are still there
    with pytest.raises(SpecError) as caught:
        sharding.apply(module, plan, mesh=init_device_mesh("cpu", (4,)))
    paths = [problem.path for problem in caught.value.problems]
    with pytest.raises(SpecError) as caught:
        sharding.apply(module, plan, mesh=DeviceMesh("cpu", [[2, 0], [3, 1]]))
    paths += [problem.path for problem in caught.value.problems]
    return [dict(plan.mesh), equal and torch.allclose(again(X, Y), module(X, Y)), at, paths]


def test_a_mesh_of_torch(ranks: Pools) -> None:
    mesh = {"data": 2, "model": 2}
    assert ranks[4].run(on_torch_mesh) == [
        [mesh, True, at, ["mesh", "mesh"]] for at in ((0, 0), (1, 0), (0, 1), (1, 1))
    ]
