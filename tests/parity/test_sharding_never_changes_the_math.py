"""Promise 1: every layout computes the same function. On real gloo processes, with dropout, dropping and random
routing on."""

import weakref
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist

from moe.dispatch.row_exchange import AllToAll, Traffic
from moe.layers import MoELayer
from moe.parallel import Layout, apply
from moe.plan.degrees import ShardCounts
from moe.plan.placement import build_placements
from moe.spec import AdafactorSpec, AdamWSpec, MoESpec, OptimizerSpec, TrainSpec, TranslationModelSpec
from tests.parity.combinations import (
    LAYOUTS,
    NUM_STEPS,
    REFUSED,
    ROUTERS,
    assert_bit_identical,
    assert_same,
    assert_same_gradients_through_logits,
    model_of,
    option_of,
    refused_paths,
    run_on,
    train_of,
    train_with,
    with_option,
)
from tests.parity.gloo_ranks import Pools
from tests.parity.trajectory import Degrees, Shape, run
from tests.processes import await_that

ONE = Degrees()
SHAPE = Shape()
FOLDED = Degrees(expert=2, data=2, tensor=2, fsdp=2, expert_fsdp=2)
ONE_STEP = [
    Degrees(micro_batch_groups=4), Degrees(data=2, micro_batch_groups=2), Degrees(expert=2, data=2),
    Degrees(expert=4, ranks_per_node=2), Degrees(expert=2, expert_tensor=2, tensor=2, fsdp=2),
    Degrees(expert=4, num_chunks=3, recompute="full"),
    replace(FOLDED, max_rows=9),
]  # fmt: skip
EVERY_LAYOUT = [degrees for family in LAYOUTS.values() for degrees in family]
FAR = [Degrees(micro_batch_groups=4), Degrees(expert=2), FOLDED]


@pytest.fixture(scope="module")
def reference() -> list[dict]:
    return run(model_of(), train_of(), ONE, Shape(), NUM_STEPS)


def test_the_reference_meets_what_it_is_meant_to_meet(reference: list[dict]) -> None:
    """Otherwise the comparisons below would show little."""
    assert any(layer["dropped"] > 0 for record in reference for layer in record["layers"])
    assert any(layer["rejected"] > 0 for record in reference for layer in record["layers"])
    assert reference[-1]["loss"] < reference[0]["loss"]
    assert all(layer["layer"] in (1, 3) for layer in reference[0]["layers"])


@pytest.mark.sample(2)
@pytest.mark.parametrize("degrees", FAR, ids=str)
def test_float64_trajectories(ranks: Pools, reference: list[dict], degrees: Degrees) -> None:
    assert_same(run_on(ranks, degrees, model_of(), train_of(), Shape(), NUM_STEPS), reference, 1e-10)


FEW_STEPS = 2
"""The second begins with all that the first left: moments, biases of routers, gradient buffers."""


@cache
def few_steps(router: str, train: TrainSpec) -> list[dict]:
    return run(model_of(**ROUTERS[router]), train, ONE, Shape(), FEW_STEPS)


@pytest.mark.sample(14)
@pytest.mark.parametrize("number", range(len(EVERY_LAYOUT)), ids=lambda number: str(EVERY_LAYOUT[number]))
def test_every_layout_with_some_router_and_some_option(ranks: Pools, number: int) -> None:
    """Several layouts have each router and each option. `make parity` runs every combination."""
    router, option = list(ROUTERS)[number % len(ROUTERS)], option_of(number, EVERY_LAYOUT[number])
    degrees, train = with_option(EVERY_LAYOUT[number], option), train_with(option)
    answer = run_on(ranks, degrees, model_of(**ROUTERS[router]), train, Shape(), FEW_STEPS)
    assert_same(answer, few_steps(router, train), 1e-10)


@pytest.mark.parametrize(("degrees", "path", "why"), REFUSED, ids=str)
def test_a_model_that_does_not_divide_is_refused(degrees: Degrees, path: str, why: str) -> None:
    assert path in refused_paths(model_of(), degrees), why


def assert_same_training(
    ranks: Pools, degrees: Degrees, model: TranslationModelSpec, train: TrainSpec, num_steps: int, shape: Shape = SHAPE
) -> None:
    """Fail if training under a layout differs from one process."""
    reference = run(model, train, ONE, shape, num_steps)
    assert_same(run_on(ranks, degrees, model, train, shape, num_steps), reference, 1e-10)


VARIANTS = {
    "sampling": {"second_expert": "sampling"},
    "paper": {"capacity_rule": "paper", "rejected_second_takes_slot": True, "aux_form": "paper"},
    "after_drop": {"normalize_gates": "after_drop"},
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("degrees", [Degrees(expert=2), Degrees(expert=2, data=2)], ids=str)
def test_float64_variants_of_gating(ranks: Pools, degrees: Degrees, variant: str) -> None:
    assert_same_training(ranks, degrees, model_of(**VARIANTS[variant]), train_of(), 4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("degrees", [Degrees(expert=2), Degrees(expert=2, data=2)], ids=str)
def test_rows_that_come_padded_change_nothing(ranks: Pools, reference: list[dict], degrees: Degrees) -> None:
    """Batched products, for which rows are padded to the busiest expert of each rank."""
    answer = run_on(ranks, degrees, model_of(), train_of(), Shape(), 4, False, False, "batched")
    assert_same(answer, reference[:4], 1e-10)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "degrees", [Degrees(expert=2), Degrees(expert=4), Degrees(expert=2, data=2), Degrees(expert=2, expert_tensor=2)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("capacity_factor", [0.42, 8.0], ids=["a buffer of one", "a buffer for all"])
def test_all_tokens_to_one_expert(ranks: Pools, degrees: Degrees, capacity_factor: float) -> None:
    """Ranks whose experts get nothing take part with no rows, and their gradients are zeros."""
    model = model_of(capacity_factor=capacity_factor, second_expert="all")
    reference = run(model, train_of(), ONE, Shape(), 3, False, True)
    first = reference[0]["layers"]
    if capacity_factor < 1:  # one row of each of the 8 groups
        assert [layer["load"] for layer in first] == [[8, 8, 0, 0]] * 2
    else:
        assert all(layer["load"][2:] == [0, 0] and layer["dropped"] == 0 for layer in first)
    answer = run_on(ranks, degrees, model, train_of(), Shape(), 3, False, True)
    assert_same(answer, reference, 1e-10)


def test_one_expert_and_a_dense_twin(ranks: Pools) -> None:
    model = model_of()
    one_expert = model.model_copy(update={"moe": model.moe.model_copy(update={"num_experts": 1})})
    dense = model.model_copy(update={"moe": None, "dense_twin_ffn_dim": 48})
    for variant in (one_expert, dense):
        assert_same_training(ranks, Degrees(data=2), variant, train_of(), 4)


@pytest.mark.sample(2)
@pytest.mark.parametrize("degrees", [Degrees(expert=4), Degrees(expert=2, data=2), Degrees(data=4), FOLDED], ids=str)
@pytest.mark.parametrize("groups", [1, 3, 5])
def test_ranks_without_a_group_and_uneven_shares(ranks: Pools, degrees: Degrees, groups: int) -> None:
    assert_same_training(ranks, degrees, model_of(), train_of(), 3, shape=Shape(groups=groups, rows=2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "degrees",
    [
        Degrees(expert=4),
        Degrees(expert=2, data=2),
        FOLDED,
        Degrees(data=4, fsdp=4, expert_fsdp=4),
        Degrees(data=2, fsdp=2, expert_fsdp=2),
        Degrees(expert=2, expert_tensor=2, tensor=2),
    ],
    ids=str,
)
def test_adafactor_does_not_see_the_layout(ranks: Pools, degrees: Degrees) -> None:
    train = train_of(optimizer=AdafactorSpec(name="adafactor", peak_lr=1e-2))
    assert_same_training(ranks, degrees, model_of(), train, 6)


@pytest.mark.sample(1)
@pytest.mark.parametrize("optimizer", [AdamWSpec(name="adamw"), AdafactorSpec(name="adafactor")], ids=lambda o: o.name)
@pytest.mark.parametrize(
    "degrees", [Degrees(expert=2, data=2, fsdp=4, expert_fsdp=2), Degrees(data=4, fsdp=4, expert_fsdp=4)], ids=str
)
def test_fsdp_of_what_does_not_come_out_even(ranks: Pools, degrees: Degrees, optimizer: OptimizerSpec) -> None:
    """17 channels and 6 experts: some ranks hold less of a parameter, and some nothing."""
    moe = MoESpec(num_experts=6, model_dim=17, hidden_dim=23, group_tokens=64)
    model = model_of().model_copy(update={"model_dim": 17, "ffn_dim": 31, "moe": moe})
    assert_same_training(ranks, degrees, model, train_of(optimizer=optimizer), 4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("degrees", [Degrees(expert=2, tensor=2), Degrees(expert=2, fsdp=2), FOLDED], ids=str)
def test_gradients_of_logits_do_not_see_the_layout(ranks: Pools, degrees: Degrees) -> None:
    assert_same_gradients_through_logits(ranks, degrees, model_of())


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("degrees", ONE_STEP, ids=str)
def test_one_step_of_narrow_numbers(ranks: Pools, degrees: Degrees, dtype: str) -> None:
    """The error against float64 is at most twice that of one process. In float32 routing agrees, as there are no ties;
    in bfloat16, where tensor ranks add rounded parts, all but a few choices agree."""
    exact = run(model_of(), train_of(), ONE, Shape(), 1, True)[0]
    single = run(model_of(), train_of(dtype), ONE, Shape(), 1, True)[0]
    record = run_on(ranks, degrees, model_of(), train_of(dtype), Shape(), 1, True)[0]
    max_difference = 0.0 if dtype == "float32" else 0.03
    for layer, decisions in (exact if dtype == "float32" else single)["routing"].items():
        assert (record["routing"][layer] ^ decisions).double().mean() <= max_difference

    def error(record: dict) -> float:
        squares = [
            (record["gradients"][name].double() - gradient).square().sum()
            for name, gradient in exact["gradients"].items()
        ]
        return torch.stack(squares).sum().sqrt().item()

    assert error(record) <= 2 * error(single)
    unit = torch.finfo(getattr(torch, dtype)).eps * exact["loss"]  # the error of a single number may be zero by chance
    assert abs(record["loss"] - exact["loss"]) <= 2 * max(abs(single["loss"] - exact["loss"]), unit)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "degrees",
    [
        ONE,
        Degrees(expert=2),
        Degrees(expert=2, data=2),
        Degrees(expert=4, ranks_per_node=2, num_chunks=2, max_rows=9),
        replace(FOLDED, recompute="full"),
    ],
    ids=str,
)
def test_the_same_layout_is_bit_identical(ranks: Pools, degrees: Degrees) -> None:
    assert_bit_identical(ranks, degrees, model_of(), 5)


def count_traffic(degrees: Degrees) -> tuple[Traffic, Traffic, int]:
    """(traffic of a pass without gradients, traffic of one with gradients, rows that this rank sends to the other)"""
    layout = Layout.build(degrees.plan(8))
    spec = MoESpec(num_experts=4, model_dim=16, hidden_dim=24, group_tokens=64)
    layer = apply(MoELayer(spec), build_placements(spec.parameters(), ShardCounts.from_degrees(layout.degrees)), layout)
    x, traffic = torch.randn(64, 16), []
    for training in (False, True):
        with torch.set_grad_enabled(training):
            y, routing = layer(x)
        if training:
            y.sum().backward()
        traffic.append(layer.dispatch.take_traffic())
    layout.close()
    return traffic[0], traffic[1], int(routing.load.view(2, -1).sum(1)[1 - layout.rank])


def wait_for_rows_and_release() -> None:
    all_to_all = AllToAll(dist.group.WORLD, torch.device("cpu"))
    rows = torch.randn(4, 3)
    pending = all_to_all.start(rows, [2, 2], [2, 2])
    received_rows = pending.wait()
    references = weakref.ref(rows), weakref.ref(received_rows)
    del rows, received_rows  # gloo's own thread releases them later
    await_that(lambda: references[0]() is None and references[1]() is None, lambda: f"{pending} holds rows")


def test_rows_are_held_no_longer_than_they_are_waited_for(ranks: Pools) -> None:
    ranks[2].run(wait_for_rows_and_release)


def test_what_a_training_pass_exchanges_is_counted_and_nothing_else(ranks: Pools) -> None:
    """Rows of 16 float32 and their weights are sent, and outputs come back; gradients go the other way."""
    answers = ranks[2].run(count_traffic, Degrees(expert=2))
    rows_of_both = sum(rows for *_, rows in answers)
    assert rows_of_both > 0
    for evaluation, training, _ in answers:
        assert evaluation == Traffic()
        assert training.num_bytes == rows_of_both * 4 * (16 + 1 + 16)
        assert training.transfer_s > 0
