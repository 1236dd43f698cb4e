"""Gradients summed in buckets during the backward pass, against exact sums, for random parameters on real ranks."""

import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from moe.dispatch.row_exchange import AllToAll, exchange_rows
from moe.parallel import GradientReduction, Layout, LocalParameter, ParameterShard, local_parameters, reduction
from tests.parity.combinations import assert_ranks_same, model_of, train_of
from tests.parity.gloo_ranks import Pools
from tests.parity.language_models import ATTENTIONS, language_model
from tests.parity.trajectory import Degrees, Model, Shape, run

BUCKET_UNIT = 128
"""Bytes of the smallest parameter in a bucket."""


@dataclass(frozen=True)
class Case:
    """A chain of parameters, and which ranks use them."""

    sizes: tuple[int, ...]
    """Numbers of elements."""
    users: tuple[frozenset[int], ...]
    """Ranks that use each parameter in the last backward pass."""
    expert_numbers: frozenset[int]
    """Numbers of the parameters that are parts of experts, of which other ranks have other parts."""
    frozen: frozenset[int]
    tied: bool
    """Whether the first parameter is used last, too."""
    num_passes: int
    bucket_units: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    sizes = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=8)))
    numbers = st.frozensets(st.integers(0, len(sizes) - 1))
    users = st.frozensets(st.integers(0, 3), min_size=1) | st.just(frozenset(range(4)))
    return Case(
        sizes, tuple(draw(st.lists(users, min_size=len(sizes), max_size=len(sizes)))), draw(numbers), draw(numbers),
        draw(st.booleans()), draw(st.integers(1, 3)), draw(st.integers(1, 4)),
    )  # fmt: skip


class Chain(nn.Module):
    """A sum over parameters, of which autograd completes the last one's gradient first."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.weights = nn.ParameterList(torch.ones(size, dtype=torch.float64) for size in case.sizes)
        for number, weight in enumerate(self.weights):
            weight.requires_grad_(number not in case.frozen)
            splits = (("expert", 0),) if number in case.expert_numbers else ()
            weight.part = ParameterShard(weight.shape, splits, of_experts=number in case.expert_numbers)

    def forward(self, rank: int, pass_number: int) -> Tensor:
        is_last = pass_number == self.case.num_passes - 1
        y = torch.zeros((), dtype=torch.float64, requires_grad=True)
        numbers = [*range(len(self.weights)), *[0] * self.case.tied]
        for number in numbers:
            if not is_last or rank in self.case.users[number]:
                y = y + (self.weights[number] * float((rank + 1) * 100**pass_number)).sum()
        return y


def expected_gradients(case: Case, ranks_of_part: list[int]) -> list[list[float]]:
    """Gradients on one rank. `ranks_of_part`: ranks with the same part of the experts."""
    gradients = []
    for number, size in enumerate(case.sizes):
        ranks = ranks_of_part if number in case.expert_numbers else range(4)
        times = 2 if case.tied and number == 0 else 1
        total = sum(
            times * (rank + 1) * 100**pass_number
            for rank in ranks for pass_number in range(case.num_passes)
            if pass_number < case.num_passes - 1 or rank in case.users[number]
        )  # fmt: skip
        gradients.append([float(total)] * size)
    return gradients


@dataclass(frozen=True)
class Sums:
    """Results of one step on one rank."""

    gradients: list[list[float] | None]
    num_overlapped: int
    """Sums that began in the backward pass."""


def summed_gradients(cases: list[Case]) -> list[list[Sums]]:
    """By case, the results of two steps."""
    layout = Layout.build(Degrees(expert=2, data=2).plan(8))
    sums = [[*_sums_by_step(case, layout)] for case in cases]
    layout.close()
    return sums


def _sums_by_step(case: Case, layout: Layout) -> Iterator[Sums]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduction, "BUCKET_BYTES", case.bucket_units * BUCKET_UNIT)
        model = Chain(case)
        gradient_reduction = GradientReduction(local_parameters(model), layout)
        for _ in range(2):
            model.zero_grad()
            for pass_number in range(case.num_passes - 1):
                model(layout.rank, pass_number).backward()
            assert not gradient_reduction._pending
            with gradient_reduction.overlapping_backward():
                model(layout.rank, case.num_passes - 1).backward()
            num_overlapped = len(gradient_reduction._pending)
            gradient_reduction.finish()
            gradients = [None if weight.grad is None else weight.grad.tolist() for weight in model.weights]
            yield Sums(gradients, num_overlapped)


@settings(max_examples=5)
@given(case_list=st.lists(cases(), min_size=10, max_size=10))
def test_gradients_are_the_exact_sums(ranks: Pools, case_list: list[Case]) -> None:
    """In every step; small integers have no rounding errors."""
    for rank, sums_by_case in enumerate(ranks[4].run(summed_gradients, case_list)):
        for case, steps in zip(case_list, sums_by_case, strict=True):
            expected = expected_gradients(case, [rank % 2, rank % 2 + 2])
            for sums in steps:
                for number, gradient in enumerate(sums.gradients):
                    assert gradient == (None if number in case.frozen else expected[number])


def case_of(sizes: tuple[int, ...], users: dict[int, frozenset[int]] | None = None) -> Case:
    """All ranks use a parameter unless `users` says otherwise."""
    all_users = tuple((users or {}).get(number, frozenset(range(4))) for number in range(len(sizes)))
    return Case(sizes, all_users, frozenset(), frozenset(), False, 2, bucket_units=1)


def test_sums_begin_in_the_backward_pass(ranks: Pools) -> None:
    """Those of all buckets before the first with a gradient that is not complete."""
    used, unused = case_of((4, 4, 4, 4)), case_of((4, 4, 4, 4), {1: frozenset((0, 1, 3))})
    for rank, (of_used, of_unused) in enumerate(ranks[4].run(summed_gradients, [used, unused])):
        assert [sums.num_overlapped for sums in of_used] == [4, 4]
        assert [sums.num_overlapped for sums in of_unused] == ([2, 2] if rank == 2 else [4, 4])


class Aliases(nn.Module):
    """In its only backward pass, autograd keeps the gradients of all biases in the memory of a hidden state's gradient,
    which it still reads for the table's."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(1, 4))
        self.biases = nn.ParameterList(torch.ones(4) for _ in range(4))

    def forward(self, rank: int) -> Tensor:
        hidden_states = (self.table * 2).sin()
        for bias in self.biases:
            hidden_states = hidden_states + bias.unsqueeze(0)
        return hidden_states.square().sum() * (rank + 1)


def gradients_that_share_memory(overlaps: bool) -> list[Tensor]:
    layout = Layout.build(Degrees(data=2).plan(8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduction, "BUCKET_BYTES", 1)
        model = Aliases()
        gradient_reduction = GradientReduction(local_parameters(model), layout)
        with gradient_reduction.overlapping_backward() if overlaps else nullcontext():
            model(layout.rank).backward()
        gradient_reduction.finish()
    layout.close()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_gradients_may_share_memory_in_the_pass(ranks: Pools) -> None:
    expected = [torch.zeros_like(parameter) for parameter in Aliases().parameters()]
    for rank in range(2):
        model = Aliases()
        gradients = torch.autograd.grad(model(rank), [*model.parameters()])
        expected = [total + gradient for total, gradient in zip(expected, gradients, strict=True)]
    for overlaps in (False, True):
        for gradients in ranks[2].run(gradients_that_share_memory, overlaps):
            torch.testing.assert_close(gradients, expected)


def gradients_without_a_parameter_on_one_rank() -> list[Tensor | None]:
    """Of a pass with a collective, whose rank 1 does not use the last parameter."""
    layout = Layout.build(Degrees(expert=2).plan(8))
    exchange = AllToAll(layout.group("expert", "expert_tensor"), layout.device)
    weights = [nn.Parameter(torch.ones(2)) for _ in range(6)]
    parameters = [LocalParameter(f"w{n}", weight, weight, ParameterShard(weight.shape))
                  for n, weight in enumerate(weights)]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduction, "BUCKET_BYTES", 1)
        gradient_reduction = GradientReduction(parameters, layout)
        x = torch.ones(2, 2)
        for number, weight in enumerate(weights):
            if number < 5 or layout.rank == 0:
                x = x * weight
            x = exchange_rows(x, [1, 1], [1, 1], exchange)
        with gradient_reduction.overlapping_backward():
            x.sum().backward()
        gradient_reduction.finish()
    layout.close()
    return [weight.grad for weight in weights]


def test_ranks_may_use_different_parameters(ranks: Pools) -> None:
    """Though the pass has collectives, in which they wait for each other."""
    for gradients in ranks[2].run(gradients_without_a_parameter_on_one_rank):
        assert [gradient.tolist() for gradient in gradients] == [[4.0, 4.0]] * 5 + [[2.0, 2.0]]


def errors_and_gradients_after_them() -> tuple[str, list[float]]:
    """(error of a parameter that a pass adds to twice, gradient of the next step)"""
    layout = Layout.build(Degrees(data=2).plan(8))
    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    parameters = [LocalParameter(f"w{n}", weight, weight, ParameterShard(weight.shape))
                  for n, weight in enumerate(weights)]  # fmt: skip
    gradient_reduction = GradientReduction(parameters, layout)
    with pytest.raises(RuntimeError) as error:
        _add_twice(gradient_reduction, weights[1])
    for weight in weights:
        weight.grad = None
    with gradient_reduction.overlapping_backward():
        sum(weight.sum() for weight in weights).backward()  # type: ignore[union-attr]
    gradient_reduction.finish()
    layout.close()
    assert weights[0].grad is not None
    return str(error.value), weights[0].grad.tolist()


def _add_twice(gradient_reduction: GradientReduction, weight: nn.Parameter) -> None:
    with gradient_reduction.overlapping_backward():
        weight.sum().backward()
        weight.sum().backward()


def test_a_second_addition_is_an_error_and_the_next_step_is_right(ranks: Pools) -> None:
    for error, gradient in ranks[2].run(errors_and_gradients_after_them):
        assert "w1" in error
        assert gradient == [2.0] * 3


def sharded_gradients_with_one_missing() -> list[float]:
    """Sums of a DTensor's gradients on tensor ranks, of which only the first has one."""
    layout = Layout.build(Degrees(expert=2, tensor=2).plan(8))
    weight = nn.Parameter(DTensor.from_local(torch.ones(3), DeviceMesh("cpu", [layout.rank]), [Replicate()]))
    weight.part = ParameterShard(torch.Size((3,)), shares_tokens=True)  # type: ignore[attr-defined]
    model = nn.Module()
    model.weight = weight
    (parameter,) = local_parameters(model)
    if layout.rank == 0:
        weight.grad = DTensor.from_local(torch.full((3,), 5.0), weight.device_mesh, [Replicate()])
    GradientReduction([parameter], layout).finish()
    layout.close()
    assert parameter.local.grad is not None
    return parameter.local.grad.tolist()


def test_sharded_gradients_may_be_missing_on_a_rank(ranks: Pools) -> None:
    assert ranks[2].run(sharded_gradients_with_one_missing) == [[5.0] * 3] * 2


def error_of_an_unfinished_step() -> str:
    layout = Layout.build(Degrees(data=2).plan(8))
    weight = nn.Parameter(torch.ones(3))
    gradient_reduction = GradientReduction([LocalParameter("w", weight, weight, ParameterShard(weight.shape))], layout)
    with gradient_reduction.overlapping_backward():
        weight.sum().backward()
    with pytest.raises(RuntimeError) as error:
        gradient_reduction.overlapping_backward().__enter__()
    gradient_reduction.finish()
    layout.close()
    return str(error.value)


def test_an_unfinished_step_is_an_error(ranks: Pools) -> None:
    assert all("finish" in error for error in ranks[2].run(error_of_an_unfinished_step))


LAYOUTS = [
    Degrees(data=4),
    Degrees(expert=4, micro_batch_groups=1),
    Degrees(expert=2, data=2, fsdp=2, expert_fsdp=2, recompute="full"),
    Degrees(expert=2, data=2, tensor=2, recompute="selective"),
]


def trajectory_with_small_buckets(*arguments: Any) -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduction, "BUCKET_BYTES", 512)
        return run(*arguments)


@pytest.mark.sample(1)
@pytest.mark.parametrize("model", [model_of(), language_model(next(iter(ATTENTIONS)))], ids=["translation", "language"])
@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
def test_models_of_many_buckets_train_the_same(ranks: Pools, degrees: Degrees, model: Model) -> None:
    expected = run(model, train_of("float64"), Degrees(), Shape(), 3, True)
    answers = ranks[4].run(trajectory_with_small_buckets, model, train_of("float64"), degrees, Shape(), 3, True)
    assert_ranks_same(answers, expected, 1e-10)


def freed_parameters() -> bool:
    layout = Layout.build(Degrees(data=2).plan(8))
    model = nn.Linear(3, 3)
    gradient_reduction = GradientReduction(local_parameters(model), layout)
    with gradient_reduction.overlapping_backward():
        model(torch.ones(1, 3)).sum().backward()
    gradient_reduction.finish()
    deleted = list[bool]()
    weakref.finalize(model.weight, deleted.append, True)
    del model, gradient_reduction
    layout.close()
    return deleted == [True]


def test_parameters_are_freed_with_their_model(ranks: Pools) -> None:
    assert ranks[2].run(freed_parameters) == [True, True]
