"""Adapters: which matrices have one, how the base is stored, and what is refused."""

from typing import Any

import pytest

from moe.plan import Cluster, plan_job
from moe.spec import JobSpec, LanguageModelSpec, ProblemCode
from moe.spec.adapter import AdapterSpec
from tests.refusals import expect_problem, expect_problems

MODEL: dict[str, Any] = {
    "kind": "language", "from": "/models/base",
    "model_dim": 64, "num_layers": 3, "vocab_size": 100, "ffn_dim": 96, "first_dense_layers": 1,
    "attention": {"kind": "grouped_query", "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "bias": True,
                  "query_key_norm": "head"},
    "moe": {"router": "softmax_topk", "num_experts": 4, "hidden_dim": 40, "activation": "swiglu", "group_tokens": 256,
            "shared_hidden_dim": 48, "shared_gate": True},
}  # fmt: skip
JOB: dict[str, Any] = {
    "model": MODEL, "data": {"corpus": "packages", "max_tokens": 256}, "train": {"num_steps": 1, "batch_tokens": 1024},
}  # fmt: skip
LAYER_1, MOE = "layers.1.", "feed_forward.moe."


def with_adapter(**adapter: Any) -> LanguageModelSpec:
    return LanguageModelSpec(**MODEL, adapter=adapter)


def test_every_matrix_of_attention_and_feed_forward_layers_has_an_adapter_and_all_else_is_frozen() -> None:
    parameters = with_adapter(rank=4).parameters()
    shapes = {p.name.removeprefix(LAYER_1): p.shape for p in parameters if p.name.startswith(LAYER_1) and not p.frozen}
    attention = {"query": 64, "key": 32, "value": 32, "output": 64}
    shared_matrices = {"w_in": (64, 48), "w_gate": (64, 48), "w_out": (48, 64)}
    assert shapes == {
        **{f"attention.{name}.weight_lora_a": (4, 64) for name in attention},
        **{f"attention.{name}.weight_lora_b": (outputs, 4) for name, outputs in attention.items()},
        f"{MOE}experts.w_in_lora_a": (4, 64, 4), f"{MOE}experts.w_in_lora_b": (4, 4, 40),
        f"{MOE}experts.w_gate_lora_b": (4, 4, 40),
        f"{MOE}experts.w_out_lora_a": (4, 40, 4), f"{MOE}experts.w_out_lora_b": (4, 4, 64),
        **{f"{MOE}shared.{name}_lora_a": (4, inputs) for name, (inputs, _) in shared_matrices.items()},
        **{f"{MOE}shared.{name}_lora_b": (outputs, 4) for name, (_, outputs) in shared_matrices.items()},
    }  # fmt: skip
    assert {p.name for p in parameters if p.frozen} == {p.name for p in LanguageModelSpec(**MODEL).parameters()}


def test_patterns_choose_layers_and_routers() -> None:
    spec = with_adapter(rank=4, targets=["layers.2.attention.q*", "*.router"])
    assert [parameter.name for parameter in spec.parameters() if not parameter.frozen] == [
        f"layers.{name}_lora_{half}"
        for name in (f"1.{MOE}router", "2.attention.query.weight", f"2.{MOE}router")
        for half in "ab"
    ]


@pytest.mark.parametrize("base", ["bfloat16", "int8", "nf4"])
def test_every_matrix_of_the_base_is_stored_in_its_form_with_an_adapter_or_without(base: str) -> None:
    parameters = with_adapter(rank=4, base=base, targets=["*.attention.q*"]).parameters()
    names = {p.name.removeprefix(LAYER_1) for p in parameters if p.form == base and p.name.startswith(LAYER_1)}
    assert names == {
        *(f"attention.{name}.weight" for name in ("query", "key", "value", "output")),
        *(f"{MOE}{part}.{name}" for part in ("experts", "shared") for name in ("w_in", "w_gate", "w_out")),
    }
    assert {parameter.form for parameter in parameters} == {base, "full"}
    assert all(parameter.frozen for parameter in parameters if parameter.form == base)
    assert all(parameter.form == "full" for parameter in with_adapter(rank=4).parameters())


def test_a_plan_counts_the_bytes_of_the_base() -> None:
    """Matrix by matrix, as (lines that blocks lie in, length of a line)."""
    cluster = Cluster(num_nodes=1, devices_per_node=2, device="cpu", memory_bytes=1 << 40)
    plan = plan_job(JobSpec.parse({**JOB, "adapter": {"rank": 2, "base": "nf4"}}), cluster)
    attention = [(64, 64), (32, 64), (32, 64), (64, 64)]
    dense, shared_matrices, experts = [(96, 64)] * 3, [(64, 48), (64, 48), (48, 64)], [(4 * 40, 64)] * 3
    matrices = 3 * attention + dense + 2 * (shared_matrices + experts)
    num_weights = sum(lines * length for lines, length in matrices)
    num_bytes = sum(lines * (length // 2 + 4) for lines, length in matrices)
    num_others = 2 * 100 * 64 + (2 * 3 + 1) * 64 + 3 * (64 + 32 + 32 + 2 * 16) + 2 * (64 * 4 + 64)
    assert (
        f"the base's matrices are stored in nf4, {num_weights:,} weights in {num_bytes:,} bytes, "
        f"the rest of it in float32, {4 * num_others:,} bytes"
    ) in plan.reasons
    wide = plan_job(JobSpec.parse({**JOB, "adapter": {"rank": 2}}), cluster)
    assert f"the base is stored in float32, {4 * (num_weights + num_others):,} bytes" in wide.reasons
    assert plan.memory.parameters < wide.memory.parameters
    assert [block.parameters for block in plan.blocks] == [block.parameters for block in wide.blocks]


@pytest.mark.parametrize(
    ("adapter", "scale"),
    [({"rank": 4, "groups": [{"pattern": "*.query.*", "rank": 8}, {"pattern": "*", "alpha": 1.0}]}, 0.5),
     ({"rank": 4, "groups": [{"pattern": "*.key.*"}, {"pattern": "*.q*", "alpha": 6.0}]}, 1.5),
     ({"rank": 4}, 1.0), ({"rank": 4, "alpha": 2.0}, 0.5), ({"rank": 4, "alpha": 2.0, "rank_stabilized": True}, 1.0),
     ({"rank": 9, "rank_stabilized": True}, 3.0)],
)  # fmt: skip
def test_scale(adapter: dict[str, Any], scale: float) -> None:
    assert AdapterSpec(**adapter).scale_of("layers.0.attention.query.weight") == scale


@pytest.mark.parametrize(
    ("adapter", "code", "path"),
    [
        ({"rank": 33}, "out_of_range", "adapter.rank"),
        ({"rank": 0}, "out_of_range", "adapter.rank"),
        ({"rank": 2, "base": "int4"}, "not_a_choice", "adapter.base"),
        ({"rank": 2, "targets": []}, "empty", "adapter.targets"),
        ({"rank": 2, "targets": ["*.attention.*", "*.mlp.*"]}, "not_found", "adapter.targets[1]"),
        ({"rank": 2, "targets": ["*norm*"]}, "not_found", "adapter.targets[0]"),
        ({"rank": 2, "targets": ["*.router"]}, "unsupported", "adapter.targets"),  # whose bias follows the loads
        ({"rank": 2, "targets": ["*.experts.w_gate"]}, "conflict", "adapter.targets"),  # without w_in
        ({"rank": 2, "targets": ["*.experts.w_in"]}, "conflict", "adapter.targets"),  # without w_gate
        ({"rank": 2, "groups": [{"pattern": "*.query.*", "rank": 65}]}, "out_of_range", "adapter.groups[0].rank"),
        ({"rank": 2, "groups": [{"pattern": "*.router"}]}, "not_found", "adapter.groups[0].pattern"),
        ({"rank": 2, "groups": [{"pattern": "*"}, {"pattern": "*.query.*"}]}, "duplicate", "adapter.groups[1].pattern"),
        ({"rank": 2, "groups": [{"pattern": "*.w_gate", "alpha": 1.0}]}, "conflict", "adapter.groups"),  # and not w_in
        ({"rank": 2, "targets": ["output.*"]}, "not_found", "adapter.targets[0]"),  # tables match only their name
        ({"rank": 2, "dora": True}, "unsupported", "adapter.dora"),  # experts
        ({"rank": 2, "dora": True, "targets": ["*.shared.*"]}, "unsupported", "adapter.dora"),
        ({"rank": 2, "dora": True, "targets": ["*.dense.*"]}, "unsupported", "adapter.dora"),  # beside experts
        ({"rank": 2, "dora": True, "targets": ["embedding.weight"]}, "unsupported", "adapter.dora"),
        ({"rank": 2, "targets": ["output.weight"], "modules_to_save": ["output"]}, "conflict",
         "adapter.modules_to_save"),
        ({"rank": 2, "trainable_token_indices": {}}, "empty", "adapter.trainable_token_indices.embedding"),
        ({"rank": 2, "trainable_token_indices": {"output": [100]}}, "out_of_range",
         "adapter.trainable_token_indices.output"),
        ({"rank": 2, "trainable_token_indices": {"embedding": [-1]}}, "out_of_range",
         "adapter.trainable_token_indices.embedding[0]"),
        ({"rank": 2, "trainable_token_indices": {"embedding": [4, 2, 4]}}, "duplicate",
         "adapter.trainable_token_indices.embedding"),
        ({"rank": 2, "targets": ["embedding.weight"], "trainable_token_indices": {"embedding": [4]}}, "conflict",
         "adapter.trainable_token_indices.embedding"),
        ({"rank": 2, "modules_to_save": ["output"], "trainable_token_indices": {"output": [4]}}, "conflict",
         "adapter.trainable_token_indices.output"),
    ],
)  # fmt: skip
def test_invalid_adapters_are_refused(adapter: dict[str, Any], code: ProblemCode, path: str) -> None:
    router = {"router": "sigmoid_topk", "bias_update_rate": 0.01}
    with expect_problem(code, path):
        JobSpec.parse({**JOB, "model": {**MODEL, "moe": {**MODEL["moe"], **router}}, "adapter": adapter})


@pytest.mark.parametrize(
    ("adapter", "path"),
    [({"targets": ["embedding.weight"]}, "adapter.targets"),
     ({"trainable_token_indices": {"output": [3]}}, "adapter.trainable_token_indices.output")],
)  # fmt: skip
def test_adapters_of_one_use_of_a_tied_table_are_refused(adapter: dict[str, Any], path: str) -> None:
    with expect_problem("conflict", path):
        JobSpec.parse({**JOB, "model": {**MODEL, "tie_embeddings": True}, "adapter": {"rank": 2, **adapter}})


@pytest.mark.parametrize(
    ("adapter", "tied", "path"),
    [({"targets": ["output.weight"]}, False, "adapter.targets"),
     ({"trainable_token_indices": {"output": [3]}}, False, "adapter.trainable_token_indices"),
     ({"trainable_token_indices": {"embedding": [3]}}, True, "adapter.trainable_token_indices")],
)  # fmt: skip
def test_adapters_of_an_output_with_normalized_columns_are_refused(
    adapter: dict[str, Any], tied: bool, path: str
) -> None:
    model = {**MODEL, "tie_embeddings": tied}
    job = {**JOB, "model": model, "adapter": {"rank": 2, **adapter}}
    JobSpec.parse(job)
    with expect_problem("unsupported", path):
        JobSpec.parse({**job, "model": {**model, "normalize_output": True}})
    JobSpec.parse({**job, "model": {**model, "normalize_output": True}, "adapter": {"rank": 2}})


def test_tables_have_adapters_only_by_their_names() -> None:
    """So that `*` in stored jobs keeps its meaning. A of the embedding starts at zero instead of B, as in PEFT."""
    assert not any(
        p.name.startswith(("embedding.", "output.")) and not p.frozen
        for p in with_adapter(rank=2, targets=["*"], base="float32").parameters()
    )
    spec = with_adapter(rank=2, targets=["output.weight", "embedding.weight", "*.query.*"], dora=False)
    shapes = {p.name: (p.shape, p.std) for p in spec.parameters() if not p.frozen and not p.name.startswith("layers")}
    assert shapes == {
        "embedding.weight_lora_a": ((2, 100), 0.0), "embedding.weight_lora_b": ((64, 2), 1.0),
        "output.weight_lora_a": ((2, 64), (3 * 64) ** -0.5), "output.weight_lora_b": ((100, 2), 0.0),
    }  # fmt: skip


def test_a_plan_counts_magnitudes_and_trained_rows() -> None:
    """Of queries [64, 64] and the output [100, 64], and three rows; with gradients and AdamW's moments."""
    cluster = Cluster(num_nodes=1, devices_per_node=1, device="cpu", memory_bytes=1 << 40)
    adapter = {"rank": 2, "targets": ["*.query.*", "output.weight"]}
    plain, more = (
        plan_job(JobSpec.parse({**JOB, "adapter": {**adapter, **extra}}), cluster).memory
        for extra in ({}, {"dora": True, "trainable_token_indices": {"embedding": [5, 1, 9]}})
    )
    num_more = 3 * 64 + 100 + 3 * 64
    assert more.parameters - plain.parameters == 4 * num_more
    assert more.gradients - plain.gradients == 4 * num_more
    assert more.optimizer - plain.optimizer == 8 * num_more
    assert more.activations > plain.activations


def test_modules_trained_whole_are_refused_where_the_base_would_change() -> None:
    adapter = {"rank": 2, "modules_to_save": ["output"]}
    assert [p.name for p in with_adapter(**adapter).parameters() if p.name == "output.weight" and not p.frozen]
    with expect_problem("conflict", "adapter.modules_to_save"):
        JobSpec.parse({**JOB, "model": {**MODEL, "tie_embeddings": True}, "adapter": adapter})
    preferences = {"corpus": "preference", "paths": ["pairs.jsonl"], "max_tokens": 256}
    with expect_problem("not_applicable", "adapter.modules_to_save"):
        JobSpec.parse({**JOB, "data": preferences, "adapter": adapter})


@pytest.mark.parametrize("place", ["adapter", "model.adapter"])
def test_mistakes_are_reported_where_the_adapter_was_written(place: str) -> None:
    wrong, model = {"rank": 0, "base": "int4"}, {**MODEL, "num_layers": 0}
    job = (
        {**JOB, "model": model, "adapter": wrong}
        if place == "adapter"
        else {**JOB, "model": {**model, "adapter": wrong}}
    )
    with expect_problems([
        ("out_of_range", "model.num_layers", 0), ("out_of_range", f"{place}.rank", 0),
        ("not_a_choice", f"{place}.base", "int4"),
    ]):  # fmt: skip
        JobSpec.parse(job)


def test_an_adapter_may_be_beside_the_model_or_in_it_and_not_in_both() -> None:
    job = JobSpec.parse({**JOB, "adapter": {"rank": 2}})
    assert job == JobSpec.parse({**JOB, "model": {**MODEL, "adapter": {"rank": 2}}})
    assert job == JobSpec.parse({**JOB, "model": LanguageModelSpec(**MODEL), "adapter": {"rank": 2}})
    assert job == JobSpec.parse(job.model_dump(mode="json"))
    assert JobSpec.parse({**JOB, "adapter": None}) == JobSpec.parse(JOB)
    with expect_problem("duplicate", "adapter", None):
        JobSpec.parse({**JOB, "model": {**MODEL, "adapter": {"rank": 2}}, "adapter": {"rank": 2}})


def test_only_language_models_have_one_and_something_must_be_trained() -> None:
    with expect_problem("not_applicable", "adapter", None):
        JobSpec.parse(
            {**JOB, "model": {"preset": "gshard-tiny"}, "data": {"corpus": "catalogs"}, "adapter": {"rank": 2}}
        )
    with expect_problem("empty", "train.freeze", ["*_lora_*"]):
        JobSpec.parse({**JOB, "adapter": {"rank": 2}, "train": {**JOB["train"], "freeze": ["*_lora_*"]}})
