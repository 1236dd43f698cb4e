"""Promise 1: every layout computes the same function. On real gloo processes, with dropout, dropping and random
routing on."""

import pytest
import torch

from moe.spec import AdafactorSpec, AdamWSpec, ModelSpec, MoESpec, ScheduleSpec, TrainSpec
from tests.parity.conftest import Pools
from tests.parity.trajectory import Degrees, Shape, run

ONE = Degrees()
LAYOUTS = [
    Degrees(micro_batch_groups=4),
    Degrees(expert=2),
    Degrees(expert=2, micro_batch_groups=2),
    Degrees(data=2, micro_batch_groups=2),
    Degrees(expert=4),
    Degrees(expert=2, data=2),
    Degrees(data=4),
]
NUM_STEPS = 20


def model_of(**moe: object) -> ModelSpec:
    gshard = {"capacity_factor": 1.0, "min_capacity": 1, "aux_coefficient": 0.05}
    fields = {"group_tokens": 64, **(gshard if "router" not in moe else {}), **moe}
    return ModelSpec(
        model_dim=16, num_heads=2, head_dim=8, ffn_dim=32, num_encoder_layers=2, num_decoder_layers=2,
        source_vocab_size=300, target_vocab_size=300, dropout=0.1,
        moe=MoESpec(num_experts=4, model_dim=16, hidden_dim=24, **fields),
    )  # fmt: skip


def train_of(dtype: str = "float64", **fields: object) -> TrainSpec:
    optimizer = AdamWSpec(name="adamw", peak_lr=2.5e-3)
    schedule = ScheduleSpec(decay="constant", warmup_steps=0)
    settings = {"optimizer": optimizer, "schedule": schedule, **fields}
    return TrainSpec(num_steps=NUM_STEPS, batch_tokens=256, dtype=dtype, **settings)  # type: ignore[arg-type]


def run_on(ranks: Pools, degrees: Degrees, *arguments: object) -> list[dict]:
    """The records of rank 0, after a check that every rank recorded the same."""
    if degrees.workers == 1:
        return run(arguments[0], arguments[1], degrees, *arguments[2:])  # type: ignore[arg-type]
    answers = ranks[degrees.workers].run(run, arguments[0], arguments[1], degrees, *arguments[2:])
    for answer in answers[1:]:
        for ours, theirs in zip(answers[0], answer, strict=True):
            assert ours["loss"] == theirs["loss"]
            assert ours["grad_norm"] == theirs["grad_norm"], "ranks clip alike"
    return answers[0]


def assert_same(records: list[dict], reference: list[dict], tolerance: float) -> None:
    for number, (ours, theirs) in enumerate(zip(records, reference, strict=True), 1):
        for layer, decisions in theirs["routing"].items():
            assert torch.equal(ours["routing"][layer], decisions), (
                f"routing differs, step {number} layer {layer}"
            )
        for here, there in zip(ours["layers"], theirs["layers"], strict=True):
            assert here.pop("load") == there["load"], "of the global batch"
            rest = {name: value for name, value in there.items() if name != "load"}
            assert here == pytest.approx(rest, rel=tolerance, abs=tolerance)
        for name in ("loss", "nll", "aux_loss", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=tolerance, abs=tolerance), (
                f"step {number} {name}"
            )
        assert ours["gradients"].keys() == theirs["gradients"].keys()
        for name, norm in theirs["gradients"].items():
            assert ours["gradients"][name] == pytest.approx(norm, rel=tolerance, abs=tolerance), (
                f"{number} {name}"
            )


@pytest.fixture(scope="module")
def reference() -> list[dict]:
    return run(model_of(), train_of(), ONE, Shape(), NUM_STEPS)


def test_the_reference_meets_what_it_is_meant_to_meet(reference: list[dict]) -> None:
    """Otherwise the comparisons below would show little."""
    assert any(layer["dropped"] > 0 for record in reference for layer in record["layers"])
    assert any(layer["rejected"] > 0 for record in reference for layer in record["layers"])
    assert reference[-1]["loss"] < reference[0]["loss"]
    assert all(layer["layer"] in (1, 3) for layer in reference[0]["layers"])


@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
def test_float64_trajectories(ranks: Pools, reference: list[dict], degrees: Degrees) -> None:
    assert_same(run_on(ranks, degrees, model_of(), train_of(), Shape(), NUM_STEPS), reference, 1e-10)


VARIANTS = {
    "sampling": {"second_expert": "sampling"},
    "paper": {"capacity_rule": "paper", "rejected_second_takes_slot": True, "aux_form": "paper"},
    "after_drop": {"normalize_gates": "after_drop"},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("degrees", [Degrees(expert=2), Degrees(expert=2, data=2)], ids=str)
def test_float64_variants_of_gating(ranks: Pools, degrees: Degrees, variant: str) -> None:
    model = model_of(**VARIANTS[variant])
    reference = run(model, train_of(), ONE, Shape(), 4)
    assert_same(run_on(ranks, degrees, model, train_of(), Shape(), 4), reference, 1e-10)


ROUTERS = {
    "switch": {"router": "switch_top1", "capacity_factor": 0.8, "input_jitter": 0.1, "z_coefficient": 0.01},
    "softmax": {"router": "softmax_topk", "aux_scope": "sequence", "aux_coefficient": 0.05},
    "softmax after top-k, best first": {
        "router": "softmax_topk", "softmax": "after_topk", "capacity_factor": 0.9, "drop_by": "probability",
    },
    "softmax, balanced over the batch": {
        "router": "softmax_topk", "top_k": 3, "renormalize_gates": False, "aux_scope": "global_batch",
        "aux_coefficient": 0.05,
    },
    "sigmoid with bias, in groups": {
        "router": "sigmoid_topk", "num_expert_groups": 2, "bias_update_rate": 0.05, "routed_scaling_factor": 2.5,
    },
    "sinkhorn": {"router": "sinkhorn_topk", "capacity_factor": 1.1},
    "expert choice": {"router": "expert_choice", "later_tokens_choose_too": "accepted"},
    "gated experts with biases, shared ones with a gate": {
        "router": "softmax_topk", "activation": "swiglu", "expert_bias": True, "shared_hidden_dim": 20,
        "shared_gate": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("router", ROUTERS)
def test_float64_trajectories_of_every_router(ranks: Pools, router: str) -> None:
    model = model_of(**ROUTERS[router])
    reference = run(model, train_of(), ONE, Shape(), 5)
    for degrees in (Degrees(micro_batch_groups=4), Degrees(expert=2, data=2)):
        assert_same(run_on(ranks, degrees, model, train_of(), Shape(), 5), reference, 1e-10)


@pytest.mark.parametrize("degrees", [Degrees(expert=2), Degrees(expert=2, data=2)], ids=str)
def test_rows_that_come_padded_change_nothing(ranks: Pools, reference: list[dict], degrees: Degrees) -> None:
    """Batched products, for which rows are laid out as long as the busiest expert of each rank needs."""
    answer = run_on(ranks, degrees, model_of(), train_of(), Shape(), 4, False, False, "batched")
    assert_same(answer, reference[:4], 1e-10)


@pytest.mark.parametrize(
    "degrees", [Degrees(expert=2), Degrees(expert=4), Degrees(expert=2, data=2)], ids=str
)
@pytest.mark.parametrize("capacity_factor", [0.27, 8.0], ids=["a buffer of one", "a buffer for all"])
def test_all_tokens_to_one_expert(ranks: Pools, degrees: Degrees, capacity_factor: float) -> None:
    """Ranks whose experts get nothing take part with no rows, and their gradients are zeros."""
    model = model_of(capacity_factor=capacity_factor, second_expert="all")
    reference = run(model, train_of(), ONE, Shape(), 3, False, True)
    first = reference[0]["layers"]
    if capacity_factor < 1:  # one row of each of the 4 groups
        assert [layer["load"] for layer in first] == [[4, 4, 0, 0]] * 2
    else:
        assert all(layer["load"][2:] == [0, 0] and layer["dropped"] == 0 for layer in first)
    answer = run_on(ranks, degrees, model, train_of(), Shape(), 3, False, True)
    assert_same(answer, reference, 1e-10)


def test_one_expert(ranks: Pools) -> None:
    model = model_of()
    model = model.model_copy(update={"moe": model.moe.model_copy(update={"num_experts": 1})})
    reference = run(model, train_of(), ONE, Shape(), 4)
    assert_same(run_on(ranks, Degrees(data=2), model, train_of(), Shape(), 4), reference, 1e-10)


@pytest.mark.parametrize("degrees", [Degrees(expert=4), Degrees(expert=2, data=2), Degrees(data=4)], ids=str)
@pytest.mark.parametrize("groups", [1, 3, 5])
def test_ranks_without_a_group_and_uneven_shares(ranks: Pools, degrees: Degrees, groups: int) -> None:
    shape = Shape(groups=groups, rows=2)
    reference = run(model_of(), train_of(), ONE, shape, 3)
    assert_same(run_on(ranks, degrees, model_of(), train_of(), shape, 3), reference, 1e-10)


@pytest.mark.parametrize(
    "degrees", [Degrees(expert=2), Degrees(expert=4), Degrees(expert=2, data=2)], ids=str
)
def test_adafactor_does_not_see_the_layout(ranks: Pools, degrees: Degrees) -> None:
    train = train_of(optimizer=AdafactorSpec(name="adafactor", peak_lr=1e-2))
    reference = run(model_of(), train, ONE, Shape(), 6)
    assert_same(run_on(ranks, degrees, model_of(), train, Shape(), 6), reference, 1e-10)


def test_a_dense_twin_is_data_parallel(ranks: Pools) -> None:
    dense = model_of().model_copy(update={"moe": None, "dense_twin_ffn_dim": 48})
    reference = run(dense, train_of(), ONE, Shape(), 4)
    assert_same(run_on(ranks, Degrees(data=2), dense, train_of(), Shape(), 4), reference, 1e-10)


@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
def test_float32_one_step(ranks: Pools, degrees: Degrees) -> None:
    """The error against float64 is at most twice one process's; routing agrees, as no margin here is a tie."""
    exact = run(model_of(), train_of(), ONE, Shape(), 1, True)[0]
    one = run(model_of(), train_of("float32"), ONE, Shape(), 1, True)[0]
    ours = run_on(ranks, degrees, model_of(), train_of("float32"), Shape(), 1, True)[0]
    for layer, decisions in exact["routing"].items():
        assert torch.equal(ours["routing"][layer], decisions)

    def error(record: dict) -> float:
        squares = [
            (record["gradients"][name].double() - gradient).square().sum()
            for name, gradient in exact["gradients"].items()
        ]
        return torch.stack(squares).sum().sqrt().item()

    assert error(ours) <= 2 * error(one)
    assert abs(ours["loss"] - exact["loss"]) <= 2 * max(abs(one["loss"] - exact["loss"]), 1e-6)


@pytest.mark.parametrize("degrees", [ONE, Degrees(expert=2), Degrees(expert=2, data=2)], ids=str)
def test_the_same_layout_is_bit_identical(ranks: Pools, degrees: Degrees) -> None:
    first, second = (
        run_on(ranks, degrees, model_of(), train_of("float32"), Shape(), 5, True) for _ in range(2)
    )
    for ours, theirs in zip(first, second, strict=True):
        assert ours["loss"] == theirs["loss"]
        for name, gradient in theirs["gradients"].items():
            assert torch.equal(ours["gradients"][name], gradient)
