"""What an adapter is given beside which matrices, and what is refused."""

from typing import Any

import pytest

from moe.plan import Cluster, plan_job
from moe.spec import JobSpec, LanguageModelSpec, SpecError
from moe.spec.adapter import AdapterSpec
from tests.refusals import refused

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


def adapted(**adapter: Any) -> LanguageModelSpec:
    return LanguageModelSpec(**MODEL, adapter=adapter)


def test_every_matrix_of_attention_and_feed_forward_layers_has_one_and_all_else_is_frozen() -> None:
    table = {each.name: each for each in adapted(rank=4).parameters()}
    of_layer_1 = {name.removeprefix("layers.1."): each for name, each in table.items() if name.startswith("layers.1.")}
    shapes = {name: each.shape for name, each in of_layer_1.items() if not each.frozen}
    moe = "feed_forward.moe."
    assert shapes == {
        "attention.query.weight_lora_a": (4, 64), "attention.query.weight_lora_b": (64, 4),
        "attention.key.weight_lora_a": (4, 64), "attention.key.weight_lora_b": (32, 4),
        "attention.value.weight_lora_a": (4, 64), "attention.value.weight_lora_b": (32, 4),
        "attention.output.weight_lora_a": (4, 64), "attention.output.weight_lora_b": (64, 4),
        f"{moe}experts.w_in_lora_a": (4, 64, 4), f"{moe}experts.w_in_lora_b": (4, 4, 40),
        f"{moe}experts.w_gate_lora_b": (4, 4, 40),
        f"{moe}experts.w_out_lora_a": (4, 40, 4), f"{moe}experts.w_out_lora_b": (4, 4, 64),
        f"{moe}shared.w_in_lora_a": (4, 64), f"{moe}shared.w_in_lora_b": (48, 4),
        f"{moe}shared.w_gate_lora_a": (4, 64), f"{moe}shared.w_gate_lora_b": (48, 4),
        f"{moe}shared.w_out_lora_a": (4, 48), f"{moe}shared.w_out_lora_b": (64, 4),
    }  # fmt: skip
    plain = {each.name for each in LanguageModelSpec(**MODEL).parameters()}
    assert {name for name, each in table.items() if each.frozen} == plain


def test_patterns_choose_layers_and_routers() -> None:
    spec = adapted(rank=4, targets=["layers.2.attention.q*", "*.router"])
    trained = [each.name for each in spec.parameters() if not each.frozen]
    assert trained == [
        "layers.1.feed_forward.moe.router_lora_a", "layers.1.feed_forward.moe.router_lora_b",
        "layers.2.attention.query.weight_lora_a", "layers.2.attention.query.weight_lora_b",
        "layers.2.feed_forward.moe.router_lora_a", "layers.2.feed_forward.moe.router_lora_b",
    ]  # fmt: skip


@pytest.mark.parametrize("base", ["bfloat16", "int8", "nf4"])
def test_the_base_is_its_matrices_whether_they_have_adapters_or_not(base: str) -> None:
    table = adapted(rank=4, base=base, targets=["*.attention.q*"]).parameters()
    kept = {each.name.removeprefix("layers.1.") for each in table if each.form == base}
    moe = "feed_forward.moe."
    assert {name for name in kept if not name.startswith("layers.")} == {
        *(f"attention.{name}.weight" for name in ("query", "key", "value", "output")),
        *(f"{moe}{of}.{name}" for of in ("experts", "shared") for name in ("w_in", "w_gate", "w_out")),
    }
    assert {each.form for each in table} == {base, "full"}
    assert all(each.frozen for each in table if each.form == base)
    assert all(each.form == "full" for each in adapted(rank=4).parameters())


def test_a_plan_says_how_the_base_is_kept_and_its_bytes() -> None:
    """Counted matrix by matrix, as lines that blocks lie along and how long these are."""
    cluster = Cluster(num_nodes=1, devices_per_node=2, device="cpu", memory_bytes=1 << 40)
    job = {**JOB, "adapter": {"rank": 2, "base": "nf4"}}
    plan = plan_job(JobSpec.parse(job), cluster)
    attention = [(64, 64), (32, 64), (32, 64), (64, 64)]
    dense, shared, experts = [(96, 64)] * 3, [(64, 48), (64, 48), (48, 64)], [(4 * 40, 64)] * 3
    matrices = 3 * attention + dense + 2 * (shared + experts)
    number = sum(lines * length for lines, length in matrices)
    num_bytes = sum(lines * (length // 2 + 4) for lines, length in matrices)
    others = 2 * 100 * 64 + (2 * 3 + 1) * 64 + 3 * (64 + 32 + 32 + 2 * 16) + 2 * (64 * 4 + 64)
    assert (
        f"the base's matrices are stored in nf4, {number:,} weights in {num_bytes:,} bytes, "
        f"the rest of it in float32, {4 * others:,} bytes"
    ) in plan.reasons
    wide = plan_job(JobSpec.parse({**JOB, "adapter": {"rank": 2}}), cluster)
    assert f"the base is stored in float32, {4 * (number + others):,} bytes" in wide.reasons
    assert plan.memory.parameters < wide.memory.parameters
    assert [each.parameters for each in plan.blocks] == [each.parameters for each in wide.blocks]


@pytest.mark.parametrize(
    ("adapter", "scale"),
    [
        ({"rank": 4}, 1.0), ({"rank": 4, "alpha": 2.0}, 0.5), ({"rank": 4, "alpha": 2.0, "rank_stabilized": True}, 1.0),
        ({"rank": 9, "rank_stabilized": True}, 3.0),
    ],
)  # fmt: skip
def test_scale(adapter: dict[str, Any], scale: float) -> None:
    assert AdapterSpec(**adapter).scale == scale


@pytest.mark.parametrize(
    ("adapter", "words"),
    [
        ({"rank": 33}, r"(?<!model\.)adapter\.rank \(=33\) must be at most the smaller side \(=32\) of layers\.0\."),
        ({"rank": 0}, r"(?<!model\.)adapter\.rank \(=0\)"),
        ({"rank": 2, "base": "int4"}, r"(?<!model\.)adapter\.base \(='int4'\).*'bfloat16', 'int8' or 'nf4'"),
        ({"rank": 2, "targets": []}, r"(?<!model\.)adapter\.targets \(=\[\]\) must name at least one matrix"),
        ({"rank": 2, "targets": ["*.attention.*", "*.mlp.*"]},
         r"(?<!model\.)adapter\.targets\[1\] \(='\*\.mlp\.\*'\) is not "
         r"a matrix that adapters apply to; use one of .*layers\.\*\..*\.router"),
        ({"rank": 2, "targets": ["*.router"]}, r"whose selection bias follows the loads, "
                                               r"which adapters do not store; set "),
        ({"rank": 2, "targets": ["*norm*"]}, r"(?<!model\.)adapter\.targets\[0\] .* "
                                             r"is not a matrix that adapters apply to"),
        ({"rank": 2, "targets": ["*.experts.w_gate"]}, r"without layers\.1\.feed_forward\.moe\.experts\.w_in"),
        ({"rank": 2, "targets": ["layers.1.*", "*.experts.w_in"]}, r"without layers\.2\.feed_forward\..*\.w_gate"),
    ],
)  # fmt: skip
def test_what_an_adapter_cannot_be_is_told_in_words(adapter: dict[str, Any], words: str) -> None:
    router = {"router": "sigmoid_topk", "bias_update_rate": 0.01}
    with pytest.raises(SpecError, match=words):
        JobSpec.parse({**JOB, "model": {**MODEL, "moe": {**MODEL["moe"], **router}}, "adapter": adapter})


def test_what_it_cannot_be_is_told_where_it_was_written() -> None:
    wrong = {"rank": 0, "base": "int4"}
    for job, place in (
        ({**JOB, "adapter": wrong}, "adapter"),
        ({**JOB, "model": {**MODEL, "adapter": wrong}}, "model.adapter"),
    ):
        with pytest.raises(SpecError) as caught:
            JobSpec.parse({**job, "model": {**job["model"], "num_layers": 0}})
        assert {each.path for each in caught.value.problems} == {
            "model.num_layers", f"{place}.rank", f"{place}.base",
        }  # fmt: skip


def test_it_may_stand_beside_the_model_or_in_it_and_not_in_both() -> None:
    beside = JobSpec.parse({**JOB, "adapter": {"rank": 2}})
    assert beside == JobSpec.parse({**JOB, "model": {**MODEL, "adapter": {"rank": 2}}})
    assert JobSpec.parse(beside.model_dump(mode="json")) == beside
    with refused("duplicate", "adapter", None):
        JobSpec.parse({**JOB, "model": {**MODEL, "adapter": {"rank": 2}}, "adapter": {"rank": 2}})


def test_it_goes_beside_a_spec_that_is_made_too() -> None:
    made = JobSpec.parse({**JOB, "model": LanguageModelSpec(**MODEL), "adapter": {"rank": 2}})
    assert made == JobSpec.parse({**JOB, "adapter": {"rank": 2}})
    assert JobSpec.parse({**JOB, "adapter": None}) == JobSpec.parse(JOB)


def test_only_language_models_have_one() -> None:
    given = {**JOB, "model": {"preset": "gshard-tiny"}, "data": {"corpus": "catalogs"}, "adapter": {"rank": 2}}
    with refused("not_applicable", "adapter", None):
        JobSpec.parse(given)


def test_freezing_the_adapter_leaves_nothing_to_train() -> None:
    with refused("empty", "train.freeze", ["*_lora_*"]):
        JobSpec.parse({**JOB, "adapter": {"rank": 2}, "train": {**JOB["train"], "freeze": ["*_lora_*"]}})
