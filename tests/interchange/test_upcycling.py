"""A dense folder's model as a mixture: the spec that is filled in, what is refused, parts on ranks, and jobs."""

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
from moe.parallel import Layout, extent, local_parameters
from moe.plan import Cluster, plan_job
from moe.spec import JobSpec, LanguageModelSpec, SpecError, UpcycleSpec, model_spec
from tests.interchange import tiny
from tests.interchange.test_loading import MESHES, ranks  # noqa: F401  (a fixture)
from tests.interchange.test_tokenizer import FILE, RANKS
from tests.parity.gloo_ranks import Ranks
from tests.refusals import refused
from tests.unit.language_runs import documents
from tests.unit.train_runs import RequestAfter, course, run

PLAIN: dict[str, Any] = {"attention_bias": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
NO_WINDOWS = {"use_sliding_window": False, "sliding_window": None}


def spec_of(folder: Path | str, **upcycle: Any) -> LanguageModelSpec:
    spec = model_spec(expand_model({"from": str(folder), "upcycle": upcycle}, None))
    assert isinstance(spec, LanguageModelSpec)
    return spec


# What is filled in.


def test_all_fields_are_filled_in_and_stay_so(hub: Callable[..., Path]) -> None:
    folder = hub("llama", **PLAIN)
    given = {"from": str(folder), "upcycle": {"num_experts": 8, "granularity": 4}, "moe": {"group_tokens": 64}}
    filled_in = expand_model(given, None)
    spec = model_spec(filled_in)
    assert isinstance(spec, LanguageModelSpec)
    assert spec.upcycle == UpcycleSpec(num_experts=8, granularity=4, form="mixtral")
    assert spec.from_folder == str(folder)
    assert spec.ffn_dim is None
    assert spec.moe is not None
    assert (spec.moe.num_experts, spec.moe.experts_per_token, spec.moe.hidden_dim) == (32, 8, 10)
    assert spec.moe.group_tokens == 64
    assert spec.moe.routing.auxiliary_loss.coefficient == 0.01, "routers are new, and to be balanced"
    shown = spec.model_dump(mode="json")
    assert expand_model(shown, None) == shown, "as the service shows it"
    assert model_spec(shown) == spec
    (folder / "config.json").write_text(json.dumps({**tiny.config_of(folder), "rms_norm_eps": 1e-3}))
    with refused("changed", "model.from"):
        expand_model(shown, None)


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
    ],
)
def test_the_form_is_the_first_that_can_say_it(
    family: str, upcycle: dict[str, Any], form: str, hub: Callable[..., Path]
) -> None:
    spec = spec_of(hub(family, **(PLAIN if family == "llama" else NO_WINDOWS)), num_experts=4, **upcycle)
    assert spec.upcycle is not None
    assert spec.upcycle.form == form


def test_dtypes_are_those_of_the_dense_folder(hub: Callable[..., Path], tmp_path: Path) -> None:
    """But for the selection bias, which is wide."""
    folder = hub("qwen3", **NO_WINDOWS)
    spec = spec_of(folder, num_experts=4, granularity=2, shared_slices=1, form="glm4_moe")
    model = tiny.blank(spec)
    load_weights(str(folder), model, spec)
    assert all(bool(each.isfinite().all()) for each in (*model.parameters(), *model.buffers()))
    save_folder(spec, ModelSource(model), tmp_path / "out", origin=Origin.of_folder(str(folder), spec))
    wide = {name for name, each in tiny.tensors_of(tmp_path / "out").items() if each.dtype != torch.bfloat16}
    assert wide == {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in range(3)}
    config, dense = tiny.config_of(tmp_path / "out"), tiny.config_of(folder)
    for key in ("bos_token_id", "eos_token_id", "max_position_embeddings"):
        assert config[key] == dense[key]


# What is refused.

REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str, str]] = {
    "a granularity that does not divide": (
        "llama", {}, {"num_experts": 4, "granularity": 3}, "model.upcycle.granularity", "hidden dimension "
                                                            "of the dense"),
    "layers beyond the last": ("llama", {}, {"num_experts": 4, "every": 4}, "model.upcycle.every", "number of layers"),
    "more copies a token than there are": (
        "llama", {}, {"num_experts": 4, "experts_per_token": 5}, "model.upcycle.experts_per_token", "at most"),
    "one expert a token": (
        "llama", {}, {"num_experts": 4, "experts_per_token": 1}, "model.upcycle.experts_per_token",
        "router never learns"),
    "no slice left": ("llama", {}, {"num_experts": 4, "granularity": 2, "shared_slices": 2},
                      "model.upcycle.shared_slices", "below granularity"),
    "no number of experts": ("llama", {}, {}, "model.upcycle.num_experts", "is required"),
    "another key": ("llama", {}, {"num_experts": 4, "copies": 2}, "model.upcycle.copies", "known key"),
    "another form": ("llama", {}, {"num_experts": 4, "form": "gpt_oss"}, "model.upcycle.form", "must be 'mixtral'"),
    "a mixture already": ("mixtral", {}, {"num_experts": 4}, "model.upcycle", "already has experts"),
    "too many experts": ("llama", {}, {"num_experts": 999_999, "granularity": 2}, "model.moe.num_experts", "1000000"),
    "head norms in a Mixtral": ("qwen3", NO_WINDOWS, {"num_experts": 4, "form": "mixtral"}, "model.upcycle.form",
                                "attention.query_key_norm (='head') would be None"),
    "no head norms in a Qwen3-MoE": ("llama", {}, {"num_experts": 4, "form": "qwen3_moe"}, "model.upcycle.form",
                                     "attention.query_key_norm (=None) would be 'head'"),
    "dense layers in a Mixtral": ("llama", {}, {"num_experts": 4, "every": 2, "form": "mixtral"},
                                  "model.upcycle.form", "layers with experts (=[1]) would be [0, 1, 2]"),
    "shared experts in a Mixtral": (
        "llama", {}, {"num_experts": 4, "granularity": 2, "shared_slices": 1, "form": "mixtral"},
        "model.upcycle.form", "moe.shared_hidden_dim (=20) would be None"),
    "no shared experts in a Qwen2-MoE": (
        "llama", {}, {"num_experts": 4, "form": "qwen2_moe"}, "model.upcycle.form", "shared_slices is 0"),
    "no shared experts in a GLM-4.5": (
        "qwen3", NO_WINDOWS, {"num_experts": 4, "form": "glm4_moe"}, "model.upcycle.form", "shared_slices is 0"),
    "windows of some layers": ("qwen3", {}, {"num_experts": 4}, "model.upcycle.form", "windows of layers"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str, hub: Callable[..., Path]) -> None:
    family, changes, upcycle, path, words = REFUSED[case]
    folder = hub(family, **{**(PLAIN if family == "llama" else {}), **changes})
    with pytest.raises(SpecError) as raised:
        JobSpec.parse(expand(job(folder, upcycle), None))
    problem = next(each for each in raised.value.problems if each.path == path)
    assert words in problem.rule, problem
    assert problem.remedy


def job(folder: Path, upcycle: Any, **model: Any) -> dict[str, Any]:
    return {
        "model": {"from": str(folder), "upcycle": upcycle, **model},
        "data": {"corpus": "packages", "max_tokens": 64}, "train": {"num_steps": 1, "batch_tokens": 1024},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("beside", "path", "words"),
    [
        ({"moe": {"num_experts": 6}}, "model.moe.num_experts", "must be 4, as set by upcycle"),
        ({"moe": {"top_k": 1}}, "model.moe.top_k", "must be 2"),
        ({"moe": {"hidden_dim": 11, "shared_hidden_dim": 3}}, "model.moe.shared_hidden_dim", "must be None"),
        ({"moe": {"renormalize_gates": False}}, "model.moe.renormalize_gates", "to its scores"),
        ({"moe": {"router": "switch_top1"}}, "model.moe.router", "softmax_topk or sigmoid_topk"),
        ({"moe": {"expert_bias": True}}, "model.moe.expert_bias", "must be False"),
        ({"moe_every": 2, "ffn_dim": 40}, "model.moe_every", "in the layers [0, 1, 2]"),
        ({"adapter": {"rank": 2}}, "model.adapter", "cannot be used with upcycle"),
    ],
)
def test_fields_beside_it_that_make_another_function_are_refused(
    beside: dict[str, Any], path: str, words: str, hub: Callable[..., Path]
) -> None:
    with pytest.raises(SpecError) as raised:
        JobSpec.parse(expand(job(hub("llama", **PLAIN), {"num_experts": 4}, **beside), None))
    problem = next(each for each in raised.value.problems if each.path == path)
    assert words in problem.rule, problem
    assert problem.remedy


def test_it_needs_a_folder_and_fits_that_alone(hub: Callable[..., Path]) -> None:
    folder = hub("llama", **PLAIN)
    shown = spec_of(folder, num_experts=4, granularity=2).model_dump(mode="json")
    with refused("requires", "upcycle", None):
        model_spec({**shown, "from": None, "from_config": None})
    with refused("requires", "upcycle", None):
        model_spec({**shown, "moe": None, "ffn_dim": 40})
    with refused("mismatch", "moe.num_experts", 8):
        model_spec({**shown, "upcycle": {**shown["upcycle"], "num_experts": 8}})
    narrow = model_spec({**shown, "moe": {**shown["moe"], "hidden_dim": 10}})
    assert isinstance(narrow, LanguageModelSpec)
    with pytest.raises(SpecError, match=r"mlp\.up_proj\.weight .* must have the shape \[20, 24\]"):
        load_weights(str(folder), tiny.blank(narrow), narrow)


# On several ranks.


def on_a_rank(
    folder: str, out: str, degrees: dict[str, int], upcycle: dict[str, Any], whole: dict[str, torch.Tensor]
) -> tuple[int, int]:
    """Loads this rank's part of a mixture, holds it against the whole, and writes it with the others."""
    spec, layout = spec_of(folder, **upcycle), Layout.over(degrees)
    model = tiny.placed(spec, layout)
    load_weights(folder, model, spec, layout, seed=5)
    num_elements = 0
    for each in local_parameters(model):
        place = tuple(slice(*within) for within in extent(each.part, layout))
        assert torch.equal(each.local, whole[each.name][place]), each.name
        num_elements += each.local.numel()
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, whole[name]), name
    origin = Origin.of_folder(folder, spec)
    save_folder(spec, ModelSource(model, layout), out, origin=origin, max_shard_bytes=20_000)
    layout.close()
    return num_elements, spec.num_parameters()


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
    family: str,
    upcycle: dict[str, Any],
    world_size: int,
    hub: Callable[..., Path],
    tmp_path: Path,
    ranks: Callable[[int], Ranks],  # noqa: F811
) -> None:
    folder = hub(family, **(PLAIN if family == "llama" else NO_WINDOWS))
    spec = spec_of(folder, **upcycle)
    alone = tiny.blank(spec)
    load_weights(str(folder), alone, spec, seed=5)
    save_folder(spec, ModelSource(alone), tmp_path / "one", origin=Origin.of_folder(str(folder), spec))
    several, whole = str(tmp_path / "several"), alone.state_dict()
    told = ranks(world_size).run(on_a_rank, str(folder), several, MESHES[world_size], upcycle, whole)
    assert all(part < every for part, every in told)
    tiny.same_tensors(tiny.tensors_of(tmp_path / "one"), tiny.tensors_of(several))


# As a job.


@pytest.mark.slow
def test_a_job_is_planned_trained_resumed_without_its_folder_and_given_back(tmp_path: Path) -> None:
    folder = tiny.folder_of(tiny.theirs("llama", vocab_size=640, **PLAIN), tmp_path / "hub", dtype=torch.float32)
    (folder / "generation_config.json").unlink()
    (folder / "tiktoken.model").write_bytes(FILE)
    special = {str(len(RANKS) + at): {"content": name} for at, name in enumerate(["[BOS]", "[EOS]"])}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": special}))
    given = {
        "name": "wider", "data": documents(tmp_path / "data"),
        "model": {"from": str(folder), "upcycle": {"num_experts": 4, "granularity": 2}, "moe": {"group_tokens": 128}},
        "train": {"num_steps": 4, "batch_tokens": 128, "optimizer": {"name": "adamw", "peak_lr": 1e-2}},
        "resources": {"num_workers": 1}, "checkpoint": {"every_steps": 2},
    }  # fmt: skip
    spec = JobSpec.parse(expand(given, None))
    plan = plan_job(spec, Cluster(num_nodes=1, devices_per_node=1, device="cpu", memory_bytes=8 << 30))
    assert plan.memory.parameters >= 4 * spec.model.num_parameters()
    outcome, undisturbed = run(spec, tmp_path / "whole", tmp_path / "cache")
    assert outcome.kind == "succeeded"
    run(spec, tmp_path / "moved", tmp_path / "cache", control=RequestAfter("pause", 2))
    folder.rename(tmp_path / "elsewhere")
    _, resumed = run(spec, tmp_path / "moved", tmp_path / "other cache", attempt=2)
    assert course(resumed) == course(undisturbed)[2:]
    (stored,) = (each for each in (tmp_path / "moved/checkpoints").glob("step-00000004*") if each.is_dir())
    save_checkpoint_as_folder(str(stored), tmp_path / "out")
    theirs, told = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert theirs.config.model_type == "mixtral"
    assert theirs.config.eos_token_id == 2
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    tokens = torch.arange(4, 24)[None]
    with torch.no_grad():
        expected, ours = (theirs.eval()(tokens, use_cache=False).logits, TrainedModel.load(str(stored)).model(tokens))
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    assert "4 per token" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("beside", "path"),
    [
        ({"norm_eps": 0.5}, "model.norm_eps"),
        ({"attention": {"rope": {"base": 100.0}}}, "model.attention.rope.base"),
        ({"residual_multiplier": 0.5}, "model.residual_multiplier"),
        ({"logits_divisor": 2.0}, "model.logits_divisor"),
        ({"tie_embeddings": True}, "model.tie_embeddings"),
    ],
)
def test_what_makes_another_function_of_the_dense_model_is_refused(
    beside: dict[str, Any], path: str, tmp_path: Path
) -> None:
    folder = tiny.folder_of(tiny.theirs("llama", attention_bias=False), tmp_path / "dense")
    given = {"from": str(folder), "upcycle": {"num_experts": 4}}
    with pytest.raises(SpecError, match="changes the function of the folder's model") as found:
        expand_model({**given, **beside}, None)
    assert path in {problem.path for problem in found.value.problems}
    same = {name: value for name, value in expand_model({"from": str(folder)}, None).items() if name in beside}
    assert expand_model({**given, **same}, None) == expand_model(given, None)
