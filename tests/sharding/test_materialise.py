"""Shards created from the meta device, module by module: the same for every plan, or refused by name."""

import math
import random
from collections.abc import Callable
from unittest.mock import ANY

import pytest
import torch
from torch import Tensor, nn

from moe import sharding
from moe.sharding.exchange.mesh import OneDevice
from tests.parity.gloo_ranks import Pools
from tests.refusals import Summary, expect_problem, expect_problems
from tests.sharding.odd import Odd, random_hints
from tests.sharding.on_ranks import apply_on_one_device, cores

BATCH = (torch.zeros(6, dtype=torch.int64), torch.zeros(6, 5))


class WithReset(Odd):
    """`Odd` with initial values for its own tensors."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.frozen)
        self.unused.data.uniform_(-1, 1)  # which does not change the tensor's version
        self.scale, self.shift = nn.Parameter(torch.tensor(1.3)), nn.Parameter(torch.randn(1))
        torch.arange(7.0, out=self.offsets)


def on_meta(kind: Callable[[], nn.Module] = WithReset) -> nn.Module:
    with torch.device("meta"):
        return kind()


def fill(name: str, tensor: Tensor) -> None:
    if tensor.is_floating_point():
        tensor.normal_().mul_(1 + len(name))


def initial_values(mesh: dict[str, int], seed: int, by_init: bool) -> dict[str, Tensor]:
    """Full tensors on rank 0."""
    model = on_meta()
    hints = random_hints(model, mesh, random.Random(seed)) if seed else None
    plan = sharding.plan(model, BATCH, cores(math.prod(mesh.values())), hints, mesh=mesh)
    applied = sharding.apply(model, plan, seed=5, init=fill if by_init else None)
    state = sharding.state_dict(applied) | {"offsets": applied.shards()["offsets"].part}
    sharding.close(applied)
    return state


ALWAYS = [("{'a': 2}", True), ("{'a': 4}", False), ("{'a': 2, 'b': 2}", False)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "by_init"),
    [pytest.param(mesh, by_init, marks=() if (str(mesh), by_init) in ALWAYS else pytest.mark.grid)
     for mesh in ({"a": 2}, {"a": 4}, {"a": 2, "b": 2}) for by_init in (False, True)],
    ids=str,
)  # fmt: skip
def test_initial_values_are_the_same_for_every_plan(ranks: Pools, mesh: dict[str, int], by_init: bool):
    expected = initial_values({"a": 1}, 0, by_init)
    assert set(on_meta().state_dict()) < set(expected)
    assert expected["norm.running_var"].equal(torch.ones(7)) or by_init
    assert expected["norm.num_batches_tracked"] == 0  # which init does not fill
    assert not expected["first.weight"].isnan().any()
    assert expected["second.weight"].equal(expected["first.weight"])
    for seed in (1, 2):
        values, *other_states = ranks[math.prod(mesh.values())].run(initial_values, mesh, seed, by_init)
        assert set(values) == set(expected)
        assert [name for name in values if name != "offsets" and not values[name].equal(expected[name])] == []
        assert all(set(state) == {"offsets"} for state in other_states)


class Rotary(nn.Module):
    """A module with a buffer that only its constructor fills."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("inv_freq", 1.0 / torch.arange(1, 5), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight * self.inv_freq).sum()


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale, self.shift = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x) * self.scale + self.shift).sum()


class Reaching(Bare):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        nn.init.zeros_(self.inner.bias)


def applied_of(kind: type[nn.Module], init: Callable[[str, Tensor], None] | None = None) -> sharding.Applied:
    model = on_meta(kind)
    return sharding.apply(model, sharding.plan(model, (torch.zeros(2, 4),), cores(1), mesh={"a": 1}), init=init)


EMPTY = [("uninitialized", "scale", "meta"), ("uninitialized", "shift", "meta")]
REFUSED: dict[type[nn.Module], list[Summary]] = {
    Rotary: [("uninitialized", "inv_freq", "meta")],
    Bare: EMPTY,
    Reaching: [("user_code", "model.reset_parameters", None)],
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_tensors_without_values_are_refused_by_name(kind: type[nn.Module]):
    with expect_problems(REFUSED[kind]):
        applied_of(kind)


def test_init_fills_what_reset_parameters_does_not():
    def init(name: str, tensor: Tensor) -> None:
        if name == "inv_freq":
            tensor.copy_(1.0 / torch.arange(1, 5))

    applied = applied_of(Rotary, init)
    assert applied.get_buffer("inv_freq").equal(1.0 / torch.arange(1, 5))
    assert applied.get_parameter("weight").equal(torch.ones(4, 4))
    assert "inv_freq" not in applied.state_dict()
    with expect_problems(EMPTY):
        applied_of(Bare, lambda name, tensor: None)


class Twice(nn.Module):
    """One module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.alias = self.norm

    def forward(self, x: Tensor) -> Tensor:
        return self.alias(self.norm(x)).square().sum()


@pytest.mark.slow
def test_a_module_under_two_names_stays_one():
    torch.manual_seed(0)
    model, x = Twice(), torch.randn(8, 4)
    applied = apply_on_one_device(model, x)
    for module in (model, applied):
        module(x)
    assert set(applied.state_dict()) == set(model.state_dict())
    assert all(torch.allclose(applied.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.slow
def test_another_graph_is_refused():
    model, other_model = on_meta(), on_meta()
    plan = sharding.plan(model, BATCH, cores(1), mesh={"a": 1})
    other_model.last = nn.Linear(7, 4, device="meta")
    for module, sample in ((other_model, None), (model, (BATCH[0][:5], BATCH[1][:5]))):
        with expect_problem("changed", "model", "WithReset"):
            sharding.apply(module, plan, sample=sample)


def test_an_applied_module_keeps_its_dtype_and_device():
    applied = apply_on_one_device(Twice(), torch.randn(8, 4))
    for module in (applied, applied.norm):
        with pytest.raises(RuntimeError, match=r"to torch\.float64 on cpu"):
            module.double()
        with pytest.raises(RuntimeError, match="on meta"):
            module.to("meta")
        assert module.to("cpu", torch.float32) is module


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mesh", "program", "draws", "names", "shards", "_programs"])
def test_submodules_named_like_an_attribute_of_applied_modules_are_refused(name: str):
    class NamedSubmodule(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            setattr(self, name, nn.Linear(5, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self._modules[name](x).square().sum()

    batch = (torch.ones(6, 5),)
    with expect_problem("conflict", name, ANY) as error:
        apply_on_one_device(NamedSubmodule(), *batch)
    assert f"`inner.{name}`" in error.value.problems[0].remedy
    applied = apply_on_one_device(nn.Sequential(NamedSubmodule()), *batch)
    applied(*batch).backward()
    assert applied.get_parameter(f"0.{name}.weight").grad is not None


class SharedBuffer(nn.Module):
    """A buffer with two names, one of which is used."""

    second: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))
        self.register_buffer("first", torch.arange(6.0))
        self.register_buffer("second", self.first)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale * self.second[:, None]).sum()


@pytest.mark.parametrize("name", ["first", "second"])
def test_all_names_of_a_buffer_have_one_placement(name: str):
    plan = sharding.plan(SharedBuffer(), (torch.ones(6, 5),), cores(2), {name: sharding.Split(0)}, mesh={"a": 2})
    shards = sharding.apply(SharedBuffer(), plan, OneDevice((2,), (1,))).shards()
    assert {name: shards[name].offsets for name in ("first", "second")} == {"first": (3,), "second": (3,)}
    assert shards["second"].part.tolist() == [3.0, 4.0, 5.0]
