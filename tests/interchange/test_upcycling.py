"""A dense folder's model as a mixture: fields filled in, refusals, shards on ranks, and jobs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from moe.export.hub import save_checkpoint_as_folder
from moe.export.trained_model import TrainedModel
from moe.interchange.expand import expand, expand_model
from moe.interchange.load import load_weights
from moe.interchange.origin import Origin
from moe.interchange.save import save_folder
from moe.interchange.sources import ModelSource
from moe.plan import Cluster, plan_job
from moe.spec import JobSpec, LanguageModelSpec, ProblemCode, SpecError, UpcycleSpec, model_spec
from tests.interchange import tiny
from tests.interchange.test_jobs import further, stored_in, with_tiktoken
from tests.interchange.test_loading import MESHES, on_a_rank
from tests.refusals import expect_problem
from tests.unit.train_runs import RequestAfter, course, run

PLAIN: dict[str, Any] = {"attention_bias": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
NO_WINDOWS = {"use_sliding_window": False, "sliding_window": None}


def spec_of(folder: Path | str, **upcycle: Any) -> LanguageModelSpec:
    return model_spec(expand_model({"from": str(folder), "upcycle": upcycle}, None))


@pytest.fixture
def dense(hub: Callable[..., Path]) -> Callable[..., Path]:
    """A folder of a dense model that can become a mixture."""

    def make(family: str, **changes: Any) -> Path:
        return hub(family, **{**{"llama": PLAIN, "qwen3": NO_WINDOWS}.get(family, {}), **changes})

    return make


# Fields filled in.


def test_all_fields_are_filled_in_once(dense: Callable[..., Path]) -> None:
    folder = dense("llama")
    fields = {"from": str(folder), "upcycle": {"num_experts": 8, "granularity": 4}, "moe": {"group_tokens": 64}}
    spec = model_spec(expand_model(fields, None))
    assert spec.upcycle == UpcycleSpec(num_experts=8, granularity=4, form="mixtral")
    assert (spec.from_folder, spec.ffn_dim) == (str(folder), None)
    assert (spec.moe.num_experts, spec.moe.experts_per_token, spec.moe.hidden_dim) == (32, 8, 10)
    assert spec.moe.group_tokens == 64
    assert spec.moe.routing.auxiliary_loss.coefficient == 0.01, "routers are new, and to be balanced"
    stored_spec = spec.model_dump(mode="json")
    assert expand_model(stored_spec, None) == stored_spec, "as the service shows it"
    assert model_spec(stored_spec) == spec
    (folder / "config.json").write_text(json.dumps({**tiny.config_of(folder), "rms_norm_eps": 1e-3}))
    with expect_problem("changed", "model.from"):
        expand_model(stored_spec, None)


@pytest.mark.parametrize(
    ("family", "upcycle", "form"),
    [
        ("llama", {}, "mixtral"),
        ("llama", {"granularity": 4, "shared_slices": 1}, "qwen2_moe"),
        ("llama", {"granularity": 4, "shared_slices": 1, "every": 2}, "qwen2_moe"),
        ("qwen3", {}, "qwen3_moe"),
        ("qwen3", {"every": 3}, "qwen3_moe"),
        ("qwen3", {"granularity": 2, "shared_slices": 1}, "glm4_moe"),
        ("qwen3", {"granularity": 2, "shared_slices": 1, "every": 3}, "glm4_moe"),
        ("mistral", {}, "mixtral"),
        ("qwen2", {"granularity": 2, "shared_slices": 1}, "qwen2_moe"),
    ],
)
def test_the_form_is_the_first_that_can_express_the_model(family: str, upcycle: dict, form: str, dense) -> None:
    assert spec_of(dense(family), num_experts=4, **upcycle).upcycle.form == form


def test_dtypes_are_those_of_the_dense_folder(dense: Callable[..., Path], tmp_path: Path) -> None:
    """All but the selection bias, which is float32."""
    folder = dense("qwen3")
    spec = spec_of(folder, num_experts=4, granularity=2, shared_slices=1, form="glm4_moe")
    model = tiny.blank(spec)
    load_weights(str(folder), model, spec)
    assert all(bool(tensor.isfinite().all()) for tensor in (*model.parameters(), *model.buffers()))
    save_folder(spec, ModelSource(model), tmp_path / "out", origin=Origin.of_folder(str(folder), spec))
    wide = {name for name, tensor in tiny.tensors_of(tmp_path / "out").items() if tensor.dtype != torch.bfloat16}
    assert wide == {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in range(3)}
    config, original = tiny.config_of(tmp_path / "out"), tiny.config_of(folder)
    for key in ("bos_token_id", "eos_token_id", "max_position_embeddings"):
        assert config[key] == original[key]


# Refusals.

REFUSALS: dict[str, tuple[str, dict[str, Any], ProblemCode, str]] = {
    "a granularity that does not divide": ("llama", {"granularity": 3}, "not_divisible", "upcycle.granularity"),
    "layers beyond the last": ("llama", {"every": 4}, "out_of_range", "upcycle.every"),
    "more copies a token than there are": (
        "llama", {"experts_per_token": 5}, "out_of_range", "upcycle.experts_per_token"),
    "one expert a token": ("llama", {"experts_per_token": 1}, "out_of_range", "upcycle.experts_per_token"),
    "no slice left": ("llama", {"granularity": 2, "shared_slices": 2}, "out_of_range", "upcycle.shared_slices"),
    "no number of experts": ("llama", {"num_experts": ...}, "missing", "upcycle.num_experts"),
    "another key": ("llama", {"copies": 2}, "unknown_key", "upcycle.copies"),
    "another form": ("llama", {"form": "gpt_oss"}, "not_a_choice", "upcycle.form"),
    "a mixture already": ("mixtral", {}, "conflict", "upcycle"),
    "too many experts": ("llama", {"num_experts": 999_999, "granularity": 2}, "out_of_range", "moe.num_experts"),
    "head norms in a Mixtral": ("qwen3", {"form": "mixtral"}, "unsupported", "upcycle.form"),
    "no head norms in a Qwen3-MoE": ("llama", {"form": "qwen3_moe"}, "unsupported", "upcycle.form"),
    "dense layers in a Mixtral": ("llama", {"every": 2, "form": "mixtral"}, "unsupported", "upcycle.form"),
    "shared experts in a Mixtral": (
        "llama", {"granularity": 2, "shared_slices": 1, "form": "mixtral"}, "unsupported", "upcycle.form"),
    "no shared experts in a Qwen2-MoE": ("llama", {"form": "qwen2_moe"}, "conflict", "upcycle.form"),
    "biases in a Qwen3-MoE": ("qwen2", {"form": "qwen3_moe"}, "unsupported", "upcycle.form"),
    "no shared experts in a GLM-4.5": ("qwen3", {"form": "glm4_moe"}, "conflict", "upcycle.form"),
}  # fmt: skip
"""(dense family, fields of upcycle in addition to 4 experts, code, path in the model)"""


@pytest.mark.parametrize("case", REFUSALS)
def test_impossible_mixtures_are_refused(case: str, dense: Callable[..., Path]) -> None:
    family, changes, code, path = REFUSALS[case]
    upcycle = {name: value for name, value in {"num_experts": 4, **changes}.items() if value is not ...}
    with expect_problem(code, f"model.{path}"):
        JobSpec.parse(expand(job(dense(family), upcycle), None))


@pytest.mark.parametrize(
    ("family", "feature", "changes"),
    [
        ("qwen3", "windows of layers", {}), ("qwen2", "attention.bias", {}), ("gemma3_text", "norm_placement", {}),
        ("gemma4_text", "attention.keys_as_values", {"enable_moe_block": False}),
    ],
)  # fmt: skip
def test_dense_models_that_no_form_can_express_are_refused(family: str, feature: str, changes: dict, hub) -> None:
    """Windows of some layers; biases without a shared expert; norms after layers."""
    with pytest.raises(SpecError) as error:
        JobSpec.parse(expand(job(hub(family, **changes), {"num_experts": 4}), None))
    assert {problem.path for problem in error.value.problems} == {"model.upcycle.form"}
    assert any(feature in problem.rule for problem in error.value.problems)


def job(folder: Path, upcycle: Any, **model: Any) -> dict[str, Any]:
    return {
        "model": {"from": str(folder), "upcycle": upcycle, **model},
        "data": {"corpus": "packages", "max_tokens": 64}, "train": {"num_steps": 1, "batch_tokens": 1024},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("beside", "code", "path"),
    [
        ({"moe": {"num_experts": 6}}, "mismatch", "moe.num_experts"),
        ({"moe": {"top_k": 1}}, "mismatch", "moe.top_k"),
        ({"moe": {"hidden_dim": 11, "shared_hidden_dim": 3}}, "mismatch", "moe.shared_hidden_dim"),
        ({"moe": {"renormalize_gates": False}}, "unsupported", "moe.renormalize_gates"),
        ({"moe": {"router": "switch_top1"}}, "unsupported", "moe.router"),
        ({"moe": {"expert_bias": True}}, "mismatch", "moe.expert_bias"),
        ({"moe_every": 2, "ffn_dim": 40}, "mismatch", "moe_every"),
        ({"adapter": {"rank": 2}}, "conflict", "adapter"),
        ({"norm_eps": 0.5}, "mismatch", "norm_eps"),
        ({"attention": {"rope": {"base": 100.0}}}, "mismatch", "attention.rope.base"),
        ({"residual_multiplier": 0.5}, "mismatch", "residual_multiplier"),
        ({"logits_divisor": 2.0}, "mismatch", "logits_divisor"),
        ({"tie_embeddings": True}, "mismatch", "tie_embeddings"),
    ],
)
def test_fields_that_change_the_function_of_the_dense_model_are_refused(beside, code, path, dense) -> None:
    folder = dense("llama")
    with expect_problem(code, f"model.{path}"):
        JobSpec.parse(expand(job(folder, {"num_experts": 4}, **beside), None))
    if code == "mismatch" and "moe" not in path:  # which the dense model has: the same value is accepted
        fields = {"from": str(folder), "upcycle": {"num_experts": 4}}
        equal_fields = {
            name: value for name, value in expand_model({"from": str(folder)}, None).items() if name in beside
        }
        assert expand_model({**fields, **equal_fields}, None) == expand_model(fields, None)


def test_upcycling_needs_a_folder_of_the_same_shapes(dense: Callable[..., Path]) -> None:
    folder = dense("llama")
    stored_spec = spec_of(folder, num_experts=4, granularity=2).model_dump(mode="json")
    with expect_problem("requires", "upcycle", None):
        model_spec({**stored_spec, "from": None, "from_config": None})
    with expect_problem("requires", "upcycle", None):
        model_spec({**stored_spec, "moe": None, "ffn_dim": 40})
    with expect_problem("mismatch", "moe.num_experts", 8):
        model_spec({**stored_spec, "upcycle": {**stored_spec["upcycle"], "num_experts": 8}})
    narrow = model_spec({**stored_spec, "moe": {**stored_spec["moe"], "hidden_dim": 10}})
    with pytest.raises(SpecError, match=r"mlp\.up_proj\.weight .* must have the shape \[20, 24\]"):
        load_weights(str(folder), tiny.blank(narrow), narrow)


# On several ranks.


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("world_size", sorted(MESHES))
@pytest.mark.parametrize(
    ("family", "upcycle"),
    [
        ("llama", {"num_experts": 4, "granularity": 2, "noise": 0.2}),
        ("qwen3", {"num_experts": 2, "granularity": 5, "shared_slices": 1, "noise": 0.1}),
    ],
)
def test_each_rank_has_its_part_and_together_they_write_the_same_folder(
    family, upcycle, world_size, dense, tmp_path, ranks
) -> None:
    folder = dense(family)
    spec = spec_of(folder, **upcycle)
    reference = tiny.blank(spec)
    load_weights(str(folder), reference, spec, seed=5)
    save_folder(spec, ModelSource(reference), tmp_path / "one", origin=Origin.of_folder(str(folder), spec))
    sizes = ranks[world_size].run(on_a_rank, str(folder), str(tmp_path / "several"), MESHES[world_size], upcycle)
    assert all(part < total for part, total in sizes)
    tiny.same_tensors(tiny.tensors_of(tmp_path / "one"), tiny.tensors_of(tmp_path / "several"))


# As a job.


@pytest.mark.slow
def test_a_job_is_planned_trained_resumed_without_its_folder_and_exported(tmp_path: Path) -> None:
    folder = tiny.folder_of(tiny.their_model("llama", vocab_size=640, **PLAIN), tmp_path / "hub", dtype=torch.float32)
    (folder / "generation_config.json").unlink()
    with_tiktoken(folder, "[BOS]", "[EOS]")
    spec = further(folder, tmp_path, upcycle={"num_experts": 4, "granularity": 2})
    plan = plan_job(spec, Cluster(num_nodes=1, devices_per_node=1, device="cpu", memory_bytes=8 << 30))
    assert plan.memory.parameters >= 4 * spec.model.num_parameters()
    outcome, full_run = run(spec, tmp_path / "whole", tmp_path / "cache")
    assert outcome.kind == "succeeded"
    run(spec, tmp_path / "moved", tmp_path / "cache", control=RequestAfter("pause", 2))
    folder.rename(tmp_path / "elsewhere")
    _, resumed_run = run(spec, tmp_path / "moved", tmp_path / "other cache", attempt=2)
    assert course(resumed_run) == course(full_run)[2:]
    checkpoint = str(stored_in(tmp_path / "moved", 4))
    save_checkpoint_as_folder(checkpoint, tmp_path / "out")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert (model.config.model_type, model.config.eos_token_id) == ("mixtral", 2)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    tokens = torch.arange(4, 24)[None]
    with torch.no_grad():
        expected, own_logits = model.eval()(tokens, use_cache=False).logits, TrainedModel.load(checkpoint).model(tokens)
    torch.testing.assert_close(own_logits, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    assert "4 per token" in (tmp_path / "out" / "README.md").read_text()
