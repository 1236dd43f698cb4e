"""Plans of jobs that name no weights: planning needs none, training does."""

import json
from pathlib import Path
from typing import Any

import pytest

from moe.interchange.expand import expand_request
from moe.plan import Cluster, Plan, PlanQuery, plan_request
from moe.plan.notes import add_notes
from moe.plan.search.pools import plan_on_cluster
from moe.plan.verdict import verdict
from moe.spec import JobSpec, ProblemCode, SpecError
from moe.tasks.build import build_task
from moe.tasks.requirements import training_requirements
from tests.refusals import expect_problem

H100S = Cluster(num_nodes=1, devices_per_node=8, device="h100")
MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32_000, "intermediate_size": 14_336,
    "num_local_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
DOCUMENTS = {"corpus": "documents", "sources": [{"paths": ["/data/a.jsonl"]}]}
CHAT = {"corpus": "chat", "paths": ["/data/a.jsonl"]}
ADAPTER = {"rank": 16, "base": "bfloat16"}
PREFERENCE = {**CHAT, "corpus": "preference"}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A `config.json` without other files."""
    (tmp_path / "mixtral").mkdir()
    path = tmp_path / "mixtral" / "config.json"
    path.write_text(json.dumps(MIXTRAL))
    return path


def spec_of(model: dict[str, Any], data: dict[str, Any], **fields: Any) -> JobSpec:
    request = {
        "model": model, "data": {**data, "max_tokens": 4096}, "train": {"num_steps": 1, "batch_tokens": 65_536},
        "resources": {"num_workers": 8}, **fields,
    }  # fmt: skip
    return plan_request(expand_request(request, None)).spec


def plan_of(spec: JobSpec) -> Plan:
    return add_notes(plan_on_cluster(spec, H100S), spec, training_requirements(spec, None))


@pytest.mark.sample(1)
@pytest.mark.parametrize("data", [DOCUMENTS, CHAT, PREFERENCE])
def test_presets_and_bare_configs_are_planned_alike(data: dict[str, Any], config: Path) -> None:
    adapter = {"adapter": ADAPTER}
    of_preset, of_folder, of_file = (
        plan_of(spec_of(model, data, **adapter))
        for model in ({"preset": "mixtral-8x7b"}, {"from": str(config.parent)}, {"from": str(config)})
    )
    assert of_preset.missing[0].startswith("model.from is required with an adapter")
    new_path = config.rename(config.parent / "mixtral-8x7b.json")
    of_renamed = plan_of(spec_of({"from": str(new_path)}, data, **adapter))
    assert of_renamed.missing[0].startswith(f"model.from (={str(new_path)!r}) has no weights")
    assert of_folder.missing[0].startswith(f"model.from (={str(config.parent)!r}) has no weights")
    free: dict[str, Any] = {"missing": (), "made_for": None, "reasons": ()}
    assert of_preset.model_copy(update=free) == of_folder.model_copy(update=free)
    assert of_folder == of_file
    assert of_renamed.model_copy(update=free) == of_folder.model_copy(update=free)
    assert dict(verdict(of_preset))["missing"] == of_preset.missing[0]


@pytest.mark.parametrize(
    ("content", "path"),
    [('{"eos_token_id": 2}', "model_type"), ('{"model_type": "bert"}', "model_type"), ("[]", "model.from"),
     (None, "model.from")],
)  # fmt: skip
def test_json_that_is_no_models_config_is_refused(tmp_path: Path, content: str | None, path: str) -> None:
    """A config file is recognised by its contents, whatever its name."""
    file = tmp_path / "generation.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SpecError) as error:
        spec_of({"from": str(file)}, DOCUMENTS)
    (problem,) = error.value.problems
    assert problem.path == (path if path == "model.from" else f"{file}:{path}")
    assert path != "model.from" or problem.value == str(file)


def test_a_folder_may_be_called_as_a_file(config: Path) -> None:
    folder = config.parent.rename(config.parent.with_suffix(".json"))
    assert spec_of({"from": str(folder)}, DOCUMENTS) == spec_of({"from": str(folder / "config.json")}, DOCUMENTS)


def test_a_synthetic_corpus_is_planned_and_never_trained() -> None:
    spec = spec_of({"preset": "olmoe-1b-7b"}, {"corpus": "synthetic"})
    (requirement,) = plan_of(spec).missing
    assert requirement.startswith("data.corpus (='synthetic') has random tokens")
    with expect_problem("not_applicable", "data.corpus", "synthetic"):
        build_task(spec)


@pytest.mark.parametrize(
    ("train", "adapter", "unwritten", "remedy"),
    [
        ({}, {"rank": 16}, "train.dtype and adapter.base are not set", "write train.dtype: bfloat16 and adapter.base"),
        ({"dtype": "float32"}, {"rank": 16}, "adapter.base is not set", "write adapter.base: bfloat16, which 2 wo"),
        ({"dtype": "float32"}, {"rank": 16, "base": "float32"}, "", "write adapter.base: bfloat16, which 2 workers"),
        ({}, None, "train.dtype is not set", "train adapters instead of all weights, adapter: {rank: 16, base: bf"),
    ],
)  # fmt: skip
def test_a_refusal_names_float32_that_nobody_wrote(train, adapter, unwritten, remedy) -> None:
    """And suggests a change with which the same workers hold the job."""
    fields = {} if adapter is None else {"adapter": adapter}
    train = {"num_steps": 1, "batch_tokens": 65_536, **train}
    spec = spec_of({"preset": "mixtral-8x7b"}, {"corpus": "synthetic"}, train=train, **fields)
    with expect_problem("does_not_fit", "resources", "2 workers") as error:
        plan_on_cluster(spec, H100S, PlanQuery(2))
    (problem,) = error.value.problems
    assert unwritten in problem.rule
    assert unwritten or "left out" not in problem.rule
    assert remedy[:43] in problem.remedy
    narrow_adapter = {**(adapter or {"rank": 16}), "base": "bfloat16"}
    narrow_spec = spec_of(
        {"preset": "mixtral-8x7b"},
        {"corpus": "synthetic"},
        train={**train, "dtype": "bfloat16"},
        adapter=narrow_adapter,
    )
    assert plan_on_cluster(narrow_spec, H100S, PlanQuery(2)).memory.margin > 0


@pytest.mark.parametrize("adapter", [{}, {"adapter": {"rank": 16}}])
def test_no_remedy_names_a_dtype_that_the_devices_lack(adapter: dict[str, Any]) -> None:
    """With memory in which an adapter fits only in bfloat16, which a V100 does not compute in."""
    spec = spec_of({"preset": "olmoe-1b-7b"}, {"corpus": "synthetic"}, **adapter)
    v100, a100 = (
        Cluster(num_nodes=1, devices_per_node=8, device=device, memory_bytes=19 << 30) for device in ("v100", "a100-80")
    )
    remedies = []
    for cluster in (v100, a100):
        with expect_problem("does_not_fit", "resources", "1 worker") as error:
            plan_on_cluster(spec, cluster, PlanQuery(1))
        remedies.append(error.value.problems[0].remedy)
    assert ["train.dtype" in remedy for remedy in remedies] == [False, True]


@pytest.mark.parametrize(
    ("model", "data", "beside", "code"),
    [
        ({"preset": "mixtral-8x7b"}, DOCUMENTS, {"adapter": {"rank": 4}}, "missing"),
        ({"preset": "mixtral-8x7b", "adapter": {"rank": 4}}, CHAT, {}, "missing"),
        ({"preset": "mixtral-8x7b"}, CHAT, {}, "missing"),
        ({"preset": "mixtral-8x7b"}, PREFERENCE, {"adapter": {"rank": 4}}, "missing"),
        ({"from": ""}, CHAT, {"adapter": {"rank": 4}}, "not_found"),
    ],
)  # fmt: skip
def test_training_is_refused_without_weights(model, data, beside, code: ProblemCode, config: Path) -> None:
    model_fields = {**model, "from": str(config.parent)} if "from" in model else model
    spec = spec_of(model_fields, data, **beside)
    assert training_requirements(spec, None), "a plan says so"
    with expect_problem(code, "model.from"):
        build_task(spec).check_data(["/data", str(config.parent)])


def test_a_folder_that_lies_elsewhere_is_not_said_to_lack_weights(config: Path) -> None:
    spec = spec_of({"from": str(config.parent)}, DOCUMENTS)
    assert training_requirements(spec, ["/elsewhere"]) == ()
    config.unlink()
    assert training_requirements(spec, None) == ()


@pytest.mark.slow
def test_a_precision_that_the_job_leaves_out_is_told(config: Path) -> None:
    adapter = {"adapter": ADAPTER}
    plan = plan_of(spec_of({"from": str(config.parent)}, DOCUMENTS, **adapter))
    assert plan.defaults == {"train.dtype": "float32"}
    assert dict(verdict(plan))["by default"] == (
        "float32: train.dtype is not set; peak bfloat16 throughput is 2 times as high on h100"
    )
    train = {"num_steps": 1, "batch_tokens": 65_536, "dtype": "float32"}
    of_said = plan_of(spec_of({"from": str(config.parent)}, DOCUMENTS, train=train, **adapter))
    assert of_said == plan.model_copy(update={"defaults": {}})
    assert "defaults" not in of_said.model_dump(mode="json")
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
