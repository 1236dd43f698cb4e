"""What bad input gets: an error with the name, the user's line, what stands against what, and the remedy. Side effects
are in `test_side_effects.py`."""

import itertools
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from moe import sharding
from moe.spec import ProblemCode, SpecError
from tests import refusals
from tests.sharding.on_ranks import cores
from tests.sharding.refused import BATCH, MESH, Plain, lines_of, refused

TURNS = itertools.count(1)
DRAWN, OWN = np.random.default_rng(0), random.Random(0)
line_of = lines_of(__file__)


# hints

HINTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "matches nothing": (
        {"frist.weight": sharding.Split(0)},
        ("hints['frist.weight'] (='Split(0)') matches no tensor", "did you mean first.weight"),
    ),
    "contradict each other": (
        {"first.*": sharding.Split(0), "*.weight": sharding.Replicate()},
        ("hints['*.weight'] (='Replicate()') contradicts hints['first.*'] (=Split(0))", "both match first.weight",
         "drop one of the two, or name first.weight in full"),
    ),
    "a dimension that is not there": (
        {"first.*": sharding.Split(1)},
        ("hints['first.*'] (first.bias) (='Split(1)') must split a dimension of a tensor that has 1",
         "use one from 0 to 0"),
    ),
    "an axis that is not there": (
        {"first.weight": sharding.Split(0, axis="expert")},
        ("hints['first.weight']", "(=data, model)", "name one of these, or give plan(mesh={name: size})"),
    ),
    "no hint": ({"first.weight": 0}, ("hints['first.weight'] (=0) is no hint",
                                          "use Split, Replicate, Shard or Devices")),
}  # fmt: skip


@pytest.mark.parametrize("which", HINTS)
def test_hints_that_cannot_be_are_told_with_both_sides(which: str) -> None:
    hints, told = HINTS[which]
    message = refused(Plain(), hints=hints)
    for each in told:
        assert each in message


class Annotated(Plain):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden = sharding.split(hidden, 2, axis="data")  # no third dimension
        return self.second(hidden).square().mean()


def test_an_annotation_in_forward_is_told_with_its_line() -> None:
    message = refused(Annotated())
    assert f"the annotation at {line_of('no third dimension')}" in message
    assert "must split a dimension of a tensor that has 2; use one from 0 to 1" in message


def test_an_operator_without_a_rule_is_told_with_all_three_remedies_and_is_whole_only_when_asked() -> None:
    def between(module: Plain, h: Tensor) -> Tensor:
        return h @ torch.linalg.householder_product(h.detach(), h[0].detach())  # without a rule

    module = Plain(between)
    message = refused(module)
    assert f"{line_of('without a rule')} (='aten.linalg_householder_product.default') has no rule" in message
    assert "sharding.register" in message
    assert "sharding.manual" in message
    assert "plan(..., replicate=['aten.linalg_householder_product.default'])" in message
    plan = sharding.plan(module, BATCH, cores(4), mesh=MESH, replicate=["aten.linalg_householder_product.default"])
    name = next(each for each in plan.options if "householder" in each)
    assert plan.options[name] == ["whole", "whole"]


# modules that cannot be captured


def reads(module: Plain, h: Tensor) -> Tensor:
    return h * 2 if h.sum() > 0 else h  # reads a value


def reads_item(module: Plain, h: Tensor) -> Tensor:
    return h / h.abs().max().item()  # reads an item


def picks(module: Plain, h: Tensor) -> Tensor:
    return h[h[:, 0] > 0]  # a shape of the data


def to_numpy(module: Plain, h: Tensor) -> Tensor:
    return h * float(h.detach().numpy().sum())  # reads an array


def margins(module: Plain, h: Tensor) -> Tensor:
    classes = torch.zeros_like(h, dtype=torch.int64) - 1
    return h * nn.functional.multilabel_margin_loss(h, classes)  # traced otherwise


def split_by_values(module: Plain, h: Tensor) -> Tensor:
    return h * h.tensor_split(h.argmax(0)[:1])[0].sum()  # split by values


def wrong_shape(module: Plain, h: Tensor) -> Tensor:
    return h @ torch.ones(3, 3)  # does not run


def goes_back(module: Plain, h: Tensor) -> Tensor:
    h.sum().backward()  # goes back
    return h


def seeds(module: Plain, h: Tensor) -> Tensor:
    torch.manual_seed(0)  # seeds
    return h + torch.rand(8)


def own_generator(module: Plain, h: Tensor) -> Tensor:
    return h + torch.rand(8, generator=torch.Generator().manual_seed(3))  # own generator


def shuffled(module: Plain, h: Tensor) -> Tensor:
    return h[torch.randperm(8)]  # an order drawn at random


def pythons(module: Plain, h: Tensor) -> Tensor:
    return h * random.random()  # of Python


def counted(module: Plain, h: Tensor) -> Tensor:
    return h * torch.tensor(float(next(TURNS)))  # counted


def of_a_generator(module: Plain, h: Tensor) -> Tensor:
    return h * torch.tensor(DRAWN.random(8)).float()  # of numpy


def of_an_array(module: Plain, h: Tensor) -> Tensor:
    return h * torch.from_numpy(DRAWN.random(8)).float()  # an array of numpy


def of_a_random(module: Plain, h: Tensor) -> Tensor:
    return h * OWN.random()  # of an own generator


def goes_two_ways(module: Plain, h: Tensor) -> Tensor:
    if not module.is_begun:
        h = h * 2
    module.is_begun = True  # begun
    return h


def checked(module: Plain, h: Tensor) -> Tensor:
    return h * nn.functional.gaussian_nll_loss(h, h * 2, h.square())  # checked by torch


CAPTURED = {
    "a split at values": (split_by_values, "split by values", "must not read a tensor's values", "torch.where"),
    "another trace than it runs": (
        margins, "traced otherwise", "(='multilabel_margin_loss') is traced by torch with classes after the first -1",
        "write out what it computes"),
    "a check of torch's own": (checked, "checked by torch", "must not call gaussian_nll_loss, which reads a tensor's",
                               "without the check"),
    "a branch on values": (reads, "reads a value", "must not read a tensor's values", "torch.where"),
    "an item": (reads_item, "reads an item", "must not read a tensor's values", "before the module is called"),
    "an array": (to_numpy, "reads an array", "must not read a tensor's values", "torch.where"),
    "a shape of the data": (picks, "a shape of the data", "shapes that do not depend on the data (aten.nonzero",
                            "a mask"),
    "does not run": (wrong_shape, "does not run", "cannot be captured: RuntimeError", "runs on the sample"),
    "a backward pass": (goes_back, "goes back", "must only compute", "outside of the module"),
    "a seed": (seeds, "seeds", "(='torch.manual_seed') seeds torch's random numbers", "seed=..."),
    "a generator": (own_generator, "own generator", "a generator of its own", "keyed by seed, step, position"),
    "a random order": (shuffled, "an order drawn at random",
                       "(='aten.randperm.default') draws random numbers that would", "torch.rand"),
    "a count": (counted, "counted", ".0') is given to tensor, and is another in each call", "as a tensor"),
    "an own generator of numpy": (of_a_generator, "of numpy", "(='an array') is given to tensor", "torch.rand"),
    "arrays that differ": (of_an_array, "an array of numpy", "(='an array') is given to from_numpy", "torch.rand"),
    "an own generator of Python": (of_a_random, "of an own generator", "') is given to mul, and is", "torch.rand"),
    "another way at first": (goes_two_ways, "begun", "(='is_begun') is changed in forward", "in __init__"),
    "a parameter in a list": (lambda module, h: h * module.loose[0],  # loose
                              "loose", "asks for its gradient and is not registered", "nn.ParameterList"),
    "Python's numbers": (pythons, "of Python", "(='random') gives random numbers", "draw them with torch.rand"),
}  # fmt: skip


@pytest.mark.parametrize("which", CAPTURED)
def test_what_cannot_be_captured_is_told_with_the_users_line(which: str) -> None:
    between, mark, rule, remedy = CAPTURED[which]
    message = refused(Plain(between))
    assert message.startswith(line_of(mark)), message
    assert rule in message
    assert remedy in message


@torch.library.custom_op("shardyard_tests::without_fake", mutates_args=())
def custom_without_fake(x: Tensor) -> Tensor:
    return x.clone()


torch.library.define("shardyard_tests::without_meta", "(Tensor x) -> Tensor")
torch.library.impl("shardyard_tests::without_meta", "CPU", lambda x: x.clone())


def calls_custom(module: Plain, h: Tensor) -> Tensor:
    return custom_without_fake(h)  # a custom operator


def calls_library(module: Plain, h: Tensor) -> Tensor:
    return torch.ops.shardyard_tests.without_meta(h)  # an operator of a library


@pytest.mark.parametrize(
    ("between", "mark", "code"),
    [
        (wrong_shape, "does not run", "user_code"),
        (reads, "reads a value", "not_capturable"),
        (calls_custom, "a custom operator", "not_capturable"),
        (calls_library, "an operator of a library", "not_capturable"),
    ],
    ids=["does not run", "reads a value", "a custom operator", "an operator of a library"],
)
def test_code_of_the_users_that_fails_is_told_apart_from_what_cannot_be_captured(
    between: Callable[[Plain, Tensor], Tensor], mark: str, code: ProblemCode
) -> None:
    with refusals.refused(code, line_of(mark), "Plain"):
        sharding.plan(Plain(between), BATCH, cores(1))


def clocked(module: Plain, h: Tensor) -> Tensor:
    return h * (time.monotonic() + next(TURNS))  # a clock


def test_a_number_that_differs_is_told_with_its_values() -> None:
    place, values = refused(Plain(clocked)).split(" is given to mul", 1)[0].split(" (='")
    assert place == line_of("a clock")
    before, after = values.removesuffix("')").split(", then ")
    assert float(before) < float(after)


def test_the_innermost_module_is_named() -> None:
    class Inner(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return h.abs() if bool(h.any()) else h  # reads inside

    message = refused(
        nn.Sequential(nn.Linear(6, 6), nn.ModuleDict({"inner": Inner()})["inner"]), loss=lambda y: y.sum()
    )
    assert message.startswith(f"{line_of('reads inside')} (='1 (Inner)') must not read")


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, y: Tensor) -> Tensor:
        return y.mean() * self.scale


def test_a_loss_with_parameters_is_told() -> None:
    told = "loss (='Scaled') has parameters, which the module's program does not have; put it into the module"
    assert refused(nn.Linear(6, 4), loss=Scaled()).startswith(told)


# modules and samples of other kinds


class ChangesInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x[:, 0] = 0  # an input
        return x.sum()


def test_an_input_changed_in_place_is_told_with_its_line() -> None:
    assert (
        refused(ChangesInput())
        == f"{line_of('an input')} (='inputs.0') is an input that is changed in place; change a copy"
    )


def with_hook() -> nn.Module:
    module = Plain()
    module.first.weight.register_hook(lambda gradient: gradient * 2)
    return module


class Answer:
    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


class Returns(Plain):
    def forward(self, x: Tensor) -> Answer:
        return Answer(super().forward(x))


ODD: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "compiled": (lambda: torch.compile(Plain(), backend="eager"), BATCH,
                 "model (='OptimizedModule') is compiled already; give the module"),
    "shared out": (lambda: nn.DataParallel(Plain()), BATCH,
                   "(='DataParallel') shares its batch out by itself; give the module"),
    "without shapes": (lambda: nn.LazyLinear(3), BATCH, "weight has no shape yet; run the module once on the sample"),
    "a gradient's hook": (with_hook, BATCH,
                          "first.weight has a hook on its gradient, which a program would not run; register"),
    "a gradient of the batch": (Plain, (torch.randn(8, 6, requires_grad=True),),
                                "inputs.0 (='requires_grad') asks for its gradient"),
    "an empty batch": (Plain, (torch.randn(0, 6),), "inputs.0 (=[0, 6]) has no elements; give a sample with some"),
    "a sparse batch": (Plain, (torch.eye(6).to_sparse(),), "inputs.0 (='torch.sparse_coo') must be a dense tensor"),
    "a tensor by itself": (Plain, BATCH[0], "sample (='Tensor') must be a tuple or list of the module's arguments"),
    "a number": (Plain, 3, "sample (='int') must be a tuple or list of the module's arguments, in order, or a dict"),
    "an object": (Returns, BATCH, "(='Answer') is returned, and is neither a tensor nor plain"),
}  # fmt: skip


@pytest.mark.parametrize("which", ODD)
def test_modules_and_samples_of_other_kinds_are_told(which: str) -> None:
    build, sample, told = ODD[which]
    assert told in refused(build(), sample)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 6, sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids).square().mean()  # sparse


def test_a_sparse_gradient_is_told_with_its_remedy() -> None:
    message = refused(Sparse(), (torch.randint(0, 10, (8, 3)),))
    assert message.startswith(line_of("sparse"))
    assert "gives a sparse tensor, which has no parts; use dense ones: of an embedding, sparse=False" in message


def test_a_batch_that_asks_for_its_gradient_is_told_when_it_comes() -> None:
    module = Plain()
    applied = sharding.apply(module, sharding.plan(module, BATCH, cores(1)))
    x = BATCH[0].clone().requires_grad_()
    with pytest.raises(ValueError, match=r"inputs\.0 asks for its gradient.*; detach it"):
        applied(x)
    with torch.no_grad():
        assert torch.allclose(applied(x), module(x))


# clusters


def test_a_cluster_files_unknown_keys_are_told(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("num_nodes: 1\ndevices_per_node: 4\ndevise: h100\n")
    with pytest.raises(SpecError, match=r"^cluster\.devise \(='h100'\) is not a known key; .*its spelling$"):
        sharding.plan(Plain(), BATCH, path)


@pytest.mark.slow
def test_a_model_that_cannot_fit_is_told_the_smallest_cluster_that_would() -> None:
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    batch = (torch.empty(16, 256, device="meta"),)
    room = 1_500_000  # parameters, gradients and Adam's state are 4 x 65,792 x 16 bytes = 4.2 MB
    message = refused(module, batch, cluster=cores(2, room), mesh=None, loss=lambda y: y.square().mean())
    assert "cluster (='2 x cpu') has no room for the model: no plan fits in 1.33 MiB a device" in message
    devices = int(re.search(r"use (\d+) devices \(\d x 2\), the smallest cluster", message).group(1))
    fits = sharding.plan(module, batch, cores(2, room).sized_for(devices), loss=lambda y: y.square().mean())
    assert fits.memory.total <= room
    with pytest.raises(SpecError, match="has no room"):
        sharding.plan(module, batch, cores(2, room).sized_for(devices - 2), loss=lambda y: y.square().mean())
