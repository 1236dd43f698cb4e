"""Modules and samples that planning refuses, with the user's line. Side effects are in `test_side_effects.py`."""

import itertools
import random
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe import sharding
from moe.spec import ProblemCode
from tests.refusals import Summary, check
from tests.sharding.modules import mean_square
from tests.sharding.on_ranks import cores
from tests.sharding.refused import BATCH, MESH, ONE_AXIS, Plain, lines_of, planning_problems

COUNT, TURNS = itertools.count(1), itertools.count(1)
NUMPY_DRAWS, PYTHON_DRAWS = np.random.default_rng(0), random.Random(0)
line_of = lines_of(__file__)


@torch.library.custom_op("shardyard_tests::without_fake", mutates_args=())
def custom_without_fake(x: Tensor) -> Tensor:
    return x.clone()


torch.library.define("shardyard_tests::without_meta", "(Tensor x) -> Tensor")
torch.library.impl("shardyard_tests::without_meta", "CPU", lambda x: x.clone())


def goes_back(module: Plain, h: Tensor) -> None:
    h.sum().backward()  # a backward pass


def differs_in_first_call(module: Plain, h: Tensor) -> Tensor:
    if not module.is_begun:
        h = h * 2
    module.is_begun = True  # another branch in the first call
    return h


def writes_at_index(module: Plain, h: Tensor) -> Tensor:
    q = torch.zeros(4, 8)
    q[h[:, 0].argmax() % 4] = h[0]  # an index to write at
    return h + q.sum(0)


def ctc(module: Plain, h: Tensor) -> Tensor:
    scores, label, length = h.log_softmax(1).unsqueeze(1), torch.ones(1, 2).long(), torch.tensor([8])
    return h * F.ctc_loss(scores, label, length, torch.tensor([2]))  # ctc_loss


Between = Callable[[Plain, Tensor], Any]
NOT_CAPTURABLE: dict[str, Between | tuple[Between, str]] = {
    "a branch on values": lambda module, h: h * 2 if h.sum() > 0 else h,  # a branch on values
    "an item": lambda module, h: h / h.abs().max().item(),  # an item
    "an array": lambda module, h: h * float(h.detach().numpy().sum()),  # an array
    "a shape of the data": lambda module, h: h[h[:, 0] > 0],  # a shape of the data
    "a split at values": lambda module, h: h * h.tensor_split(h.argmax(0)[:1])[0].sum(),  # a split at values
    "an index": lambda module, h: h[h[:, 0].argmax()] + h,  # an index
    "a start": lambda module, h: h.narrow(0, h[:, 0].argmax() % 4, 2).sum(0) + h,  # a start
    "an index to write at": writes_at_index,
    "a bound": lambda module, h: h[: h[:, 0].argmax()].sum(0) + h,  # a bound
    "ctc_loss": ctc,
    "a check by torch": lambda module, h: h * F.gaussian_nll_loss(h, h * 2, h.square()),  # a check by torch
    "a custom operator": lambda module, h: custom_without_fake(h),  # a custom operator
    "a library's operator": lambda module, h: torch.ops.shardyard_tests.without_meta(h),  # a library's operator
    "a backward pass": goes_back,
    "a function that is traced wrongly": (
        lambda module, h: h * F.multilabel_margin_loss(h, h.long() * 0 - 1),  # a function that is traced wrongly
        "multilabel_margin_loss",
    ),
    "a seed": (lambda module, h: torch.manual_seed(0) and h + torch.rand(8), "torch.manual_seed"),  # a seed
    "a generator": (
        lambda module, h: h + torch.rand(8, generator=torch.Generator().manual_seed(3)),  # a generator
        "generator",
    ),
    "a count": (lambda module, h: h * torch.tensor(float(next(COUNT))), ANY),  # a count
    "draws of NumPy": (lambda module, h: h * torch.tensor(NUMPY_DRAWS.random(8)).float(), "an array"),  # draws of NumPy
    "an array of draws": (
        lambda module, h: h * torch.from_numpy(NUMPY_DRAWS.random(8)).float(),  # an array of draws
        "an array",
    ),
    "draws of a Python generator": (lambda module, h: h * PYTHON_DRAWS.random(), ANY),  # draws of a Python generator
    "draws of Python": (lambda module, h: h * random.random(), "random"),  # draws of Python
    "a parameter in a list": (lambda module, h: h * module.loose[0], "requires_grad"),  # a parameter in a list
}  # fmt: skip


@pytest.mark.sample(8)
@pytest.mark.parametrize("mark", NOT_CAPTURABLE)
def test_code_that_cannot_be_captured_is_refused_with_its_line(mark: str) -> None:
    case = NOT_CAPTURABLE[mark]
    middle, value = case if isinstance(case, tuple) else (case, "Plain")
    check(planning_problems(Plain(middle)), [("not_capturable", line_of(mark), value)])


OTHER_CODES: dict[str, tuple[Between, ProblemCode, str]] = {
    "an error": (lambda module, h: h @ torch.ones(3, 3), "user_code", "Plain"),  # an error
    "a permutation": (lambda module, h: h[torch.randperm(8)], "unsupported", "aten.randperm.default"),  # a permutation
    "another branch in the first call": (differs_in_first_call, "side_effect", "is_begun"),
}


@pytest.mark.parametrize("mark", OTHER_CODES)
def test_other_codes_have_the_line_too(mark: str) -> None:
    middle, code, value = OTHER_CODES[mark]
    check(planning_problems(Plain(middle)), [(code, line_of(mark), value)])


def test_a_number_that_differs_between_calls_is_named_with_both_values() -> None:
    (problem,) = planning_problems(Plain(lambda module, h: h * (time.monotonic() + next(TURNS))))  # a clock
    assert (problem.code, problem.path) == ("not_capturable", line_of("a clock"))
    before, after = map(float, problem.value.split(", then "))
    assert before < after


def tensors_instead_of_values(module: Plain, h: Tensor) -> Tensor:
    index = h[:, 0].argmax()
    rows = h.index_select(0, index.view(1)) + h.index_select(0, index % 4 + torch.arange(2)).sum(0)
    q = torch.zeros(4, 8).index_copy(0, (index % 4).view(1), h[0].unsqueeze(0))
    return h + rows + q.sum(0) + (h * (torch.arange(len(h)) < index).unsqueeze(1)).sum(0)


@pytest.mark.slow
def test_remedies_for_reading_values_compute_the_same() -> None:
    module = Plain(tensors_instead_of_values)
    reads = Plain(lambda _, h: h + h[(index := h[:, 0].argmax())] + h[index % 4 :][:2].sum(0) + h[0] + h[:index].sum(0))
    reads.load_state_dict(module.state_dict())
    sharding.plan(module, BATCH, cores(2), mesh=ONE_AXIS)
    applied = sharding.apply(module, sharding.plan(module, BATCH, cores(1)))
    assert torch.allclose(applied(*BATCH), reads(*BATCH))


def test_a_loss_of_the_applied_modules_output_is_that_of_one_device() -> None:
    module = nn.Sequential(nn.Linear(6, 5), nn.LogSoftmax(-1), nn.Unflatten(1, (1, 5)))
    applied = sharding.apply(module, sharding.plan(module, BATCH, cores(1)))
    for model in (module, applied):
        F.ctc_loss(model(*BATCH), torch.tensor([[1, 2]]), torch.tensor([8]), torch.tensor([2])).backward()
    assert torch.allclose(applied.get_parameter("0.weight").grad, module[0].weight.grad)


def test_the_innermost_module_is_named() -> None:
    class Inner(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return h.abs() if bool(h.any()) else h  # reads inside

    problems = planning_problems(nn.Sequential(nn.Linear(6, 6), Inner()), loss=torch.sum)
    check(problems, [("not_capturable", line_of("reads inside"), "1 (Inner)")])


class AnnotatedPlain(Plain):
    def forward(self, x: Tensor) -> Tensor:
        hidden_states = sharding.split(self.first(x), 2, axis="data")  # no third dimension
        return self.second(hidden_states).square().mean()


def test_an_annotation_in_forward_is_named_by_its_line() -> None:
    path = f"the annotation at {line_of('no third dimension')}"
    check(planning_problems(AnnotatedPlain()), [("out_of_range", path, "Split(2, axis='data')")])


def householder(module: Plain, h: Tensor) -> Tensor:
    return h @ torch.linalg.householder_product(h.detach(), h[0].detach())  # without a rule


def test_an_operator_without_a_rule_runs_on_whole_tensors_only_on_request() -> None:
    module, name = Plain(householder), "aten.linalg_householder_product.default"
    check(planning_problems(module), [("no_sharding_rule", line_of("without a rule"), name)])
    plan = sharding.plan(module, BATCH, cores(4), mesh=MESH, replicate=[name])
    assert [options for node, options in plan.options.items() if "householder" in node] == [["whole", "whole"]]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, y: Tensor) -> Tensor:
        return y.mean() * self.scale


class ChangesInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x[:, 0] = 0  # an input
        return x.sum()


class Answer:
    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


class Returns(Plain):
    def forward(self, x: Tensor) -> Answer:
        return Answer(super().forward(x))


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 6, sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids).square().mean()  # sparse


def with_hook() -> nn.Module:
    module = Plain()
    module.first.weight.register_hook(lambda gradient: gradient * 2)
    return module


LAZY = [("uninitialized", name, None) for name in ("weight", "bias")]
IDS = (torch.randint(0, 10, (8, 3)),)
OTHER_KINDS: dict[str, tuple[Callable[[], Any], Any, Summary | list[Summary]]] = {
    "a function": (lambda: mean_square, BATCH, ("wrong_type", "model", "function")),
    "a class": (lambda: Plain, BATCH, ("wrong_type", "model", "Plain")),
    "compiled": (lambda: torch.compile(Plain(), backend="eager"), BATCH, ("unsupported", "model", "OptimizedModule")),
    "data parallel": (lambda: nn.DataParallel(Plain()), BATCH, ("unsupported", "model", "DataParallel")),
    "without shapes": (lambda: nn.LazyLinear(3), BATCH, LAZY),
    "a gradient hook": (with_hook, BATCH, ("unsupported", "first.weight", None)),
    "an input modified in place": (ChangesInput, BATCH, ("side_effect", line_of("an input"), "inputs.0")),
    "an object": (Returns, BATCH, ("not_capturable", ANY, "Answer")),
    "a sparse gradient": (Sparse, IDS, ("unsupported", line_of("sparse"), ANY)),
    "counting batch norm": (lambda: nn.BatchNorm1d(6, momentum=None), BATCH, ("not_capturable", ANY, "BatchNorm1d")),
    "a gradient of the batch": (
        Plain, (torch.randn(8, 6, requires_grad=True),), ("unsupported", "inputs.0", "requires_grad")
    ),
    "an empty batch": (Plain, (torch.randn(0, 6),), ("empty", "inputs.0", [0, 6])),
    "a sparse batch": (Plain, (torch.eye(6).to_sparse(),), ("unsupported", "inputs.0", "torch.sparse_coo")),
    "a tensor as the sample": (Plain, BATCH[0], ("wrong_type", "sample", "Tensor")),
    "a number as the sample": (Plain, 3, ("wrong_type", "sample", "int")),
}  # fmt: skip


@pytest.mark.sample(5)
@pytest.mark.parametrize("case", OTHER_KINDS)
def test_other_kinds_of_modules_and_samples_are_refused(case: str) -> None:
    build, sample, expected = OTHER_KINDS[case]
    check(planning_problems(build(), sample), expected if isinstance(expected, list) else [expected])


def test_a_loss_with_parameters_is_refused() -> None:
    check(planning_problems(nn.Linear(6, 4), loss=Scaled()), [("unsupported", "loss", "Scaled")])


def test_a_batch_that_requires_a_gradient_is_refused_in_a_call() -> None:
    module = Plain()
    applied = sharding.apply(module, sharding.plan(module, BATCH, cores(1)))
    x = BATCH[0].clone().requires_grad_()
    with pytest.raises(ValueError, match=r"^inputs\.0 requires a gradient"):
        applied(x)
    with torch.no_grad():
        assert torch.allclose(applied(x), module(x))
