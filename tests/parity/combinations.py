"""Combinations that are compared: every router under every layout, with and without each option of a plan, and layouts
that are refused.

The combinations are data: `python -m tests.parity` runs them all, the tests a part of them that covers each.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import pytest
import torch

from moe.parallel import Layout, local_parameters, reduce_gradients
from moe.plan.fit import fit_problems
from moe.spec import (
    AdafactorSpec,
    AdamWSpec,
    MoESpec,
    MuonSpec,
    ScheduleSpec,
    SpecError,
    TrainSpec,
    TranslationModelSpec,
)
from moe.spec.parallel import ContextExchange, PipelineSchedule
from moe.tasks.build import build_model
from moe.tasks.translation.batches import PairsBatch
from tests.parity.digests import OF_THE_LAYOUT
from tests.parity.full_tensors import FullTensors
from tests.parity.gloo_ranks import Pools
from tests.parity.trajectory import Degrees, Model, Shape, batch_of, run

NUM_STEPS = 20

LAYOUTS: dict[str, tuple[Degrees, ...]] = {
    "one process": (Degrees(),),
    "expert": (Degrees(expert=2), Degrees(expert=4)),
    "data": (Degrees(data=2), Degrees(data=4), Degrees(expert=2, data=2)),
    "expert x FSDP": (
        Degrees(expert=2, fsdp=2), Degrees(data=2, fsdp=2, expert_fsdp=2), Degrees(expert=4, fsdp=4),
        Degrees(expert=2, data=2, fsdp=4, expert_fsdp=2),
    ),
    "expert x HSDP": (Degrees(expert=2, data=2, fsdp=2), Degrees(data=4, fsdp=2, expert_fsdp=2)),
    "expert x tensor": (Degrees(expert=2, tensor=2), Degrees(expert=4, tensor=2), Degrees(expert=2, data=2, tensor=2)),
    "expert x expert-tensor": (Degrees(expert_tensor=2), Degrees(expert_tensor=4), Degrees(expert=2, expert_tensor=2)),
    "folded, three at a time": (
        Degrees(expert=2, expert_tensor=2, tensor=2, fsdp=2),
        Degrees(expert=2, data=2, tensor=2, fsdp=2, expert_fsdp=2),
        Degrees(expert_tensor=2, data=2, tensor=2, expert_fsdp=2), Degrees(expert=2, expert_tensor=2, fsdp=2),
    ),
    "over nodes": (
        Degrees(expert=2, ranks_per_node=1), Degrees(expert=4, ranks_per_node=2),
        Degrees(expert=4, ranks_per_node=2, tensor=2, fsdp=2), Degrees(expert=2, expert_tensor=2, ranks_per_node=2),
    ),
    "sharded optimizer": (
        Degrees(data=2, fsdp=2, expert_fsdp=2, sharding="optimizer"), Degrees(expert=2, fsdp=2, sharding="gradients"),
        Degrees(data=4, fsdp=2, expert_fsdp=4, sharding="gradients"),
        Degrees(expert=2, data=2, fsdp=4, expert_fsdp=2, sharding="gradients"),
        Degrees(expert=2, data=2, tensor=2, fsdp=2, expert_fsdp=2, sharding="gradients"),
        Degrees(expert=2, expert_tensor=2, tensor=2, fsdp=2, sharding="optimizer"),
    ),
    "context": (
        Degrees(data=2, context=2), Degrees(expert=2, context=2), Degrees(data=4, context=4),
        Degrees(expert=2, data=2, context=2),
    ),
    "context, folded": (
        Degrees(expert=2, context=2, fsdp=2), Degrees(expert=4, context=2, tensor=2),
        Degrees(expert=2, data=2, context=2, fsdp=4, expert_fsdp=2),
        Degrees(expert=2, expert_tensor=2, context=2, tensor=2, fsdp=2),
    ),
    "pipeline": (
        Degrees(pipeline=2, micro_batch_groups=2),
        Degrees(pipeline=2, data=2, tensor=2, schedule="zero_bubble", micro_batch_groups=2),
        Degrees(pipeline=2, data=2, fsdp=2, expert_fsdp=2, micro_batch_groups=1),
        Degrees(pipeline=2, expert=2, schedule="gpipe", micro_batch_groups=2),
    ),
    "pipeline, folded": (
        Degrees(pipeline=2, expert=2, tensor=2, fsdp=1, micro_batch_groups=2),
        Degrees(pipeline=2, expert=2, fsdp=2, schedule="zero_bubble", micro_batch_groups=1),
        Degrees(pipeline=2, expert=2, context=2, schedule="gpipe", micro_batch_groups=2),
        Degrees(pipeline=2, data=2, fsdp=2, expert_fsdp=2, sharding="gradients", micro_batch_groups=1),
    ),
    "context, by a ring or by heads": (
        Degrees(data=4, context=4, context_exchange="ring"),
        Degrees(expert=4, context=2, tensor=2, context_exchange="ring"),
        Degrees(data=2, context=2, context_exchange="heads"),
        Degrees(expert=2, data=2, context=2, fsdp=4, expert_fsdp=2, context_exchange="heads"),
    ),
}  # fmt: skip
"""Layouts on 1, 2 and 4 ranks, by kind; those with pipelines have two stages."""
FOUR_STAGES: dict[str, tuple[Degrees, ...]] = {
    "four stages": (
        Degrees(pipeline=4, micro_batch_groups=2), Degrees(pipeline=2, virtual_stages=2, micro_batch_groups=2),
        Degrees(pipeline=2, virtual_stages=2, expert=2, fsdp=2, micro_batch_groups=1),
        Degrees(pipeline=2, virtual_stages=2, expert=2, tensor=2, micro_batch_groups=2),
        Degrees(pipeline=2, virtual_stages=2, expert=2, context=2, micro_batch_groups=2),
    ),
}  # fmt: skip
"""Layouts of models with at least four layers, with micro-batches enough for every schedule."""
CONTEXT_EXCHANGES = get_args(ContextExchange)


def schedules_of(degrees: Degrees) -> tuple[PipelineSchedule | None, ...]:
    """Schedules of the layout's stages: those for one stage or for two stages on a rank."""
    if degrees.pipeline == 1:
        return (None,)
    return ("interleaved", "zb_v") if degrees.virtual_stages == 2 else ("1f1b", "gpipe", "zero_bubble")


def with_schedule_in_turn(degrees: Degrees, turn: int) -> Degrees:
    """The layout with the schedule, and beside stages with the exchange between context ranks, whose turn it is."""
    if degrees.pipeline == 1:
        return degrees
    exchanges = CONTEXT_EXCHANGES if degrees.context > 1 else (degrees.context_exchange,)
    turns = [(schedule, exchange) for exchange in exchanges for schedule in schedules_of(degrees)]
    schedule, exchange = turns[turn % len(turns)]
    return replace(degrees, schedule=schedule, context_exchange=exchange)


def with_possible_exchange(degrees: Degrees, model: Model) -> Degrees:
    """The same layout, which gathers keys and values if the model's heads or an indexer allow no other exchange."""
    axes = degrees.plan(num_groups=8).degrees.axes
    is_possible = not fit_problems(model, axes, degrees.context_exchange)
    return degrees if is_possible else replace(degrees, context_exchange="gather")


def with_option(degrees: Degrees, option: str) -> Degrees | None:
    """The same layout with an option of the plan; None if the option has no effect there."""
    exchanges = degrees.expert * degrees.expert_tensor > 1
    match option:
        case "without" | "Adafactor" | "Muon":
            return degrees
        case "recomputation, selective":
            return replace(degrees, recompute="selective")
        case "recomputation, full":
            return replace(degrees, recompute="full")
        case "accumulation":
            # One group at a time instead of all groups of a rank at once.
            return replace(degrees, micro_batch_groups=1)
        case "chunks":
            return replace(degrees, num_chunks=3) if exchanges else None
        case "a bound on skew":
            return replace(degrees, max_rows=9) if exchanges else None
        case "all":
            return replace(
                degrees, recompute="full", micro_batch_groups=1, num_chunks=2 if exchanges else 1,
                max_rows=9 if exchanges else None,
            )  # fmt: skip
    raise ValueError(option)


OPTIONS = (
    "without", "recomputation, selective", "recomputation, full", "accumulation", "chunks", "a bound on skew", "all",
    "Adafactor", "Muon",
)  # fmt: skip

ROUTERS: dict[str, dict[str, object]] = {
    "gshard": {},
    "gshard, second expert sampled": {"second_expert": "sampling"},
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
    "softmax with bias, in groups": {
        "router": "softmax_topk", "num_expert_groups": 2, "bias_update_rate": 0.05, "routed_scaling_factor": 1.5,
        "renormalize_gates": False,
    },
    "sigmoid with a frozen bias": {"router": "sigmoid_topk", "bias_update_rate": 0.0, "selection_bias": True},
    "sinkhorn": {"router": "sinkhorn_topk", "capacity_factor": 1.1},
    "sparsemixer": {"router": "sparsemixer", "jitter_noise": 0.4, "capacity_factor": 0.9, "aux_scope": "sequence"},
    "expert choice": {"router": "expert_choice", "later_tokens_choose_too": "accepted"},
    "gated experts with biases, shared ones with a gate": {
        "router": "softmax_topk", "activation": "swiglu", "expert_bias": True, "shared_hidden_dim": 20,
        "shared_gate": True,
    },
    "clamped experts with biases, logits with one": {
        "router": "softmax_topk", "softmax": "after_topk", "logit_bias": True, "activation": "swiglu_clamped",
        "activation_limit": 0.5, "expert_bias": True, "shared_hidden_dim": 20,
    },
    "gates on the experts' inputs": {
        "router": "sigmoid_topk", "top_k": 2, "renormalize_gates": False, "bias_update_rate": 0.0,
        "activation": "swiglu", "shared_hidden_dim": 20, "apply_gates_to": "inputs", "capacity_factor": 0.9,
    },
}  # fmt: skip

REFUSED: tuple[tuple[Degrees, str, str], ...] = (
    (Degrees(expert=3), "model.moe.num_experts", "4 experts on 3 ranks"),
    (Degrees(expert=4, tensor=4), "model.num_heads", "2 heads on 4 ranks"),
    (Degrees(expert_tensor=5), "model.moe.hidden_dim", "24 hidden units on 5 ranks"),
)
"""(layout, path of the problem, reason) of layouts that do not divide the model"""


def model_of(**moe: object) -> TranslationModelSpec:
    gshard = {"capacity_factor": 1.0, "min_capacity": 1, "aux_coefficient": 0.05}
    fields = {"num_experts": 4, "group_tokens": 64, **(gshard if "router" not in moe else {}), **moe}
    return TranslationModelSpec(
        model_dim=16, num_heads=2, head_dim=8, ffn_dim=32, num_encoder_layers=2, num_decoder_layers=2,
        source_vocab_size=300, target_vocab_size=300, dropout=0.1,
        moe=MoESpec(model_dim=16, hidden_dim=24, **fields),
    )  # fmt: skip


def train_of(dtype: str = "float64", **fields: object) -> TrainSpec:
    optimizer = AdamWSpec(name="adamw", peak_lr=2.5e-3)
    schedule = ScheduleSpec(decay="constant", warmup_steps=0)
    settings = {"optimizer": optimizer, "schedule": schedule, **fields}
    return TrainSpec(num_steps=NUM_STEPS, batch_tokens=256, dtype=dtype, **settings)  # type: ignore[arg-type]


def train_with(option: str) -> TrainSpec:
    """Training with the optimizer of an option: AdamW unless the option is another."""
    if option == "Adafactor":
        return train_of(optimizer=AdafactorSpec(name="adafactor", peak_lr=1e-2))
    if option == "Muon":
        return train_of(optimizer=MuonSpec(name="muon", peak_lr=2.5e-3, weight_decay=0.1))
    return train_of()


def run_on(ranks: Pools, degrees: Degrees, *arguments: object) -> list[dict]:
    """The records of rank 0, after a check that every rank recorded the same."""
    if degrees.workers == 1:
        return run(arguments[0], arguments[1], degrees, *arguments[2:])  # type: ignore[arg-type]
    answers = ranks[degrees.workers].run(run, arguments[0], arguments[1], degrees, *arguments[2:])
    assert_ranks_agree(answers)
    return answers[0]


def assert_ranks_agree(records_by_rank: Sequence[list[dict]]) -> None:
    """Fail unless all ranks recorded the same of each step. Only rank 0's records have tensors and routing."""
    for records in records_by_rank[1:]:
        for rank0_record, record in zip(records_by_rank[0], records, strict=True):
            assert rank0_record["loss"] == record["loss"]
            assert rank0_record["grad_norm"] == record["grad_norm"], "ranks clip alike"
            assert rank0_record["layers"] == record["layers"]


def option_of(number: int, degrees: Degrees) -> str:
    """The option whose turn it is, or the next one that has an effect."""
    turn = (OPTIONS[(number + offset) % len(OPTIONS)] for offset in range(len(OPTIONS)))
    return next(option for option in turn if with_option(degrees, option))


def assert_bit_identical(ranks: Pools, degrees: Degrees, model: Model, num_steps: int) -> None:
    """Run the same layout twice in float32; fail if any bit of losses or gradients differs."""
    first, second = (run_on(ranks, degrees, model, train_of("float32"), Shape(), num_steps, True) for _ in range(2))
    for first_record, second_record in zip(first, second, strict=True):
        assert first_record["loss"] == second_record["loss"]
        for name, gradient in second_record["gradients"].items():
            assert torch.equal(first_record["gradients"][name], gradient)


def refused_paths(model: Model, degrees: Degrees) -> set[str]:
    """Paths of the problems of a model that does not divide under a layout."""
    layout = Layout(
        0, degrees.workers, torch.device("cpu"), degrees.plan(8).degrees.axes, context_exchange=degrees.context_exchange
    )
    with pytest.raises(SpecError) as error:
        build_model(model, layout)
    return {problem.path for problem in error.value.problems}


def gradients_through_logits(degrees: Degrees, spec: Model) -> dict[str, torch.Tensor]:
    """Gradients of a loss over logits, as a user writes it who calls the model directly."""
    plan = degrees.plan(8)
    layout = Layout.build(plan)
    model = build_model(spec, layout, seed=3, dtype=torch.float64)
    batch = batch_of(layout, plan, Shape(), spec, 1)
    for micro_batch in batch.micro_batches:
        if isinstance(micro_batch, PairsBatch):
            logits, targets = (
                model(micro_batch.source, micro_batch.target_in, micro_batch.context),
                micro_batch.target_out != 0,
            )
        else:
            logits, targets = model(micro_batch.tokens, micro_batch.context), micro_batch.labels >= 0
        assert logits.shape == (*targets.shape, 300)
        ((logits.logsumexp(-1) * targets).sum() / batch.num_targets).backward()
    parameters = [parameter for parameter in local_parameters(model) if parameter.parameter.requires_grad]
    reduce_gradients(parameters, layout)
    gradients = FullTensors(parameters, layout).gradients()
    layout.close()
    return gradients


def assert_same_gradients_through_logits(ranks: Pools, degrees: Degrees, model: Model) -> None:
    expected = gradients_through_logits(Degrees(), model)
    for answer in ranks[degrees.workers].run(gradients_through_logits, degrees, model):
        for name, gradient in expected.items():
            torch.testing.assert_close(answer[name], gradient, rtol=1e-10, atol=1e-13, msg=name)


def assert_ranks_same(records_by_rank: Sequence[list[dict]], reference: list[dict], tolerance: float) -> None:
    """`assert_same` of rank 0's records, with which those of all ranks must agree."""
    assert_ranks_agree(records_by_rank)
    assert_same(records_by_rank[0], reference, tolerance)


def assert_same(records: list[dict], reference: list[dict], tolerance: float) -> None:
    for number, (record, expected) in enumerate(zip(records, reference, strict=True), 1):
        for layer, decisions in expected["routing"].items():
            assert torch.equal(record["routing"][layer], decisions), f"routing differs, step {number} layer {layer}"
        for layer_record, expected_layer in zip(record["layers"], expected["layers"], strict=True):
            assert layer_record["load"] == expected_layer["load"], "of the global batch"
            values, expected_values = (
                {name: value for name, value in layer.items() if name not in (*OF_THE_LAYOUT, "load")}
                for layer in (layer_record, expected_layer)
            )
            assert values == pytest.approx(expected_values, rel=tolerance, abs=tolerance)
        names = ("loss", "nll", "aux_loss", "grad_norm", *(["indexer_loss"] if expected["indexer_loss"] else []))
        for name in names:
            assert record[name] == pytest.approx(expected[name], rel=tolerance, abs=tolerance), f"step {number} {name}"
        assert (record.get("numbers") or {}) == pytest.approx(
            expected.get("numbers") or {}, rel=tolerance, abs=tolerance
        )
        for kind in ("gradients", "moments", "parameters", "biases"):
            if kind not in record or kind not in expected:
                continue  # only the last record of a run has the last three
            assert record[kind].keys() == expected[kind].keys()
            for name, norm in expected[kind].items():
                assert record[kind][name] == pytest.approx(norm, rel=tolerance, abs=tolerance), (
                    f"step {number}: {kind} of {name}"
                )
