"""An adapter that a job names by its folder: fields filled in from it, initial weights, and refusals."""

import json
import shutil
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import ANY

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from moe.export.hub import save_checkpoint_as_folder
from moe.interchange import load_weights
from moe.interchange.adapters import load_adapter, save_adapter
from moe.interchange.expand import expand, expand_model
from moe.interchange.origin import Origin
from moe.interchange.sources import ModelSource
from moe.parallel import Layout, extent, local_parameters
from moe.spec import JobSpec, LanguageModelSpec, ProblemCode, SpecError, model_spec
from moe.spec.adapter_names import is_adapter
from moe.spec.patterns import layer_pattern
from moe.tasks.build import build_task
from moe.tasks.language import LanguageModel, build_model
from moe.tasks.language.pretrained import check_trained_adapter
from tests.grid import first_seed_of
from tests.interchange import tiny
from tests.interchange.test_jobs import further, mixtral, stored_in, with_adapter
from tests.language.adapted import write_base
from tests.language.families import FAMILIES, WITH_ADAPTERS
from tests.language.model_pairs import as_double, their_model, write_theirs
from tests.language.test_adapters import complete_targets, matrices_of
from tests.language.test_families import assert_close, loss_of, their_logits
from tests.parity.gloo_ranks import Pools
from tests.parity.trajectory import Degrees
from tests.refusals import expect_problem
from tests.unit.language_runs import documents
from tests.unit.train_runs import RequestAfter, course, run

# PEFT itself uses the first; of the patterns that it applies to parameters, it says the second.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"),
]


def adapter_beside(base: Path, folder: Path, adapter: dict[str, Any], seed: int = 0) -> LanguageModelSpec:
    """Write a random adapter of the base's model."""
    spec = model_spec(expand_model({"from": str(base), "adapter": adapter}, None))
    model = build_model(spec, seed=seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.copy_(torch.randn_like(parameter))
    save_adapter(spec, ModelSource(model), folder, origin=Origin.of_folder(str(base), spec))
    return spec


def base_of(family: str, random: Random, folder: Path) -> Path:
    config = FAMILIES[family](random)
    config |= {"shared_intermediate_size": 0} if family == "granitemoeshared" else {}
    write_theirs(their_model(config).float(), folder)
    return folder


def shapes_of(spec: LanguageModelSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of the adapter's parameters by name."""
    return {parameter.name: parameter.shape for parameter in spec.parameters() if not parameter.frozen}


def beginning_as(base: Path, folder: Path, **adapter: Any) -> LanguageModelSpec:
    return model_spec(expand_model({"from": str(base), "adapter": {"from": str(folder), **adapter}}, None))


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", first_seed_of(WITH_ADAPTERS, 3))
def test_a_folder_describes_all_of_its_adapter(case: tuple[str, int], tmp_path: Path) -> None:
    """Random matrices, one by one or by kind; written by suffixes of names, and as PEFT writes them again."""
    import peft  # takes seconds, in each process that collects this file

    family, seed = case
    random = Random(f"{family} {seed}")
    base = base_of(family, random, tmp_path / "base")
    fields = expand_model({"from": str(base)}, None)
    plain, matrices = model_spec(fields), matrices_of(fields)[0]
    shapes = {parameter.name: parameter.shape for parameter in plain.parameters() if parameter.name in matrices}
    smallest = min(min(shape[-2:]) for shape in shapes.values())
    names = random.sample(matrices, random.randint(1, len(matrices)))
    if random.random() < 0.5:
        names = [layer_pattern(name) for name in names]
    adapter = {
        "rank": random.randint(1, min(2, smallest)), "alpha": random.choice([1.0, 2.5]),
        "rank_stabilized": random.random() < 0.5,
    }  # fmt: skip
    targets = complete_targets(names, matrices)
    written_spec = adapter_beside(base, tmp_path / "adapter", {**adapter, "targets": targets})
    read_spec = beginning_as(base, tmp_path / "adapter")
    assert {name: getattr(read_spec.adapter, name) for name in adapter} == adapter
    explicit_spec = beginning_as(base, tmp_path / "adapter", **adapter, targets=targets)
    assert shapes_of(read_spec) == shapes_of(explicit_spec) == shapes_of(written_spec)
    model = build_model(read_spec)
    load_adapter(str(tmp_path / "adapter"), model, read_spec)
    with pytest.raises(SpecError) as refusal:
        load_adapter(str(tmp_path / "adapter"), model, other_set(plain, adapter, matrices, shapes_of(written_spec)))
    assert {problem.code for problem in refusal.value.problems} <= {"unknown_key", "missing"}
    peft_model = peft.PeftModel.from_pretrained(their_base(base), tmp_path / "adapter")
    peft_model.save_pretrained(tmp_path / "again")
    assert shapes_of(beginning_as(base, tmp_path / "again")) == shapes_of(written_spec)


def their_base(folder: Path) -> Any:
    """The class that the folder's config names."""
    (architecture,) = tiny.config_of(folder)["architectures"]
    return getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32)


def test_an_adapter_of_a_wrappers_language_model_alone_is_read(tmp_path: Path) -> None:
    """AutoModelForCausalLM loads Qwen3.5 without its vision part, whose modules then have other names."""
    import peft  # takes seconds, in each process that collects this file

    base = base_of("qwen3_5_moe", Random(3), tmp_path / "base")
    alone = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, experts_implementation="eager")
    config = peft.LoraConfig(r=2, target_modules=["in_proj_qkv", "o_proj"], init_lora_weights=False)
    peft_model = peft.get_peft_model(alone, config)
    peft_model.save_pretrained(tmp_path / "adapter")
    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all(name.startswith("base_model.model.model.layers.") for name in names)
    spec = beginning_as(base, tmp_path / "adapter")
    model = build_model(spec).eval()
    load_weights(str(base), model, spec)
    load_adapter(str(tmp_path / "adapter"), model, spec)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        difference = model(tokens) - peft_model.eval()(input_ids=tokens, use_cache=False).logits
    assert float(difference.abs().max()) < 1e-4


def test_an_adapter_of_the_logits_does_not_hide_whose_names_the_folder_has(tmp_path: Path) -> None:
    """`lm_head` has the same name in Qwen3.5 and in its language model alone. PEFT saves its table too."""
    import peft  # takes seconds, in each process that collects this file

    base = base_of("qwen3_5_moe", Random(4), tmp_path / "base")
    alone = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, experts_implementation="eager")
    config = peft.LoraConfig(r=2, target_modules=["o_proj", "lm_head"], init_lora_weights=False)
    peft.get_peft_model(alone, config).save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors, table = load_file(path), "base_model.model.lm_head.base_layer.weight"
    assert table in tensors
    spec = beginning_as(base, tmp_path / "adapter")
    assert "output.weight" in spec.adapter.targets
    model = build_model(spec)
    load_weights(str(base), model, spec)
    load_adapter(str(tmp_path / "adapter"), model, spec)
    tensors[table][3] += 1.0
    save_file(tensors, path)
    with expect_problem("mismatch", f"folder/adapter_model.safetensors:{table}".replace("folder/", f"{path.parent}/")):
        load_adapter(str(tmp_path / "adapter"), model, spec)


def test_an_adapter_for_a_model_that_transformers_lacks_is_refused(tmp_path: Path) -> None:
    base = base_of("bailing_moe_v2", Random(3), tmp_path / "base")
    adapter_beside(base_of("qwen3_moe", Random(3), tmp_path / "other"), tmp_path / "adapter", {"rank": 1})
    with expect_problem("unsupported", "adapter"):
        beginning_as(base, tmp_path / "adapter")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("mixtral", {"target_modules": "all-linear"}),
        ("qwen3_moe", {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"], "use_rslora": True}),
        ("qwen3_moe", {"target_modules": ["q_proj", "v_proj", "o_proj"], "rank_pattern": {r"^.*layers\.1\..*q_proj": 3},
                       "alpha_pattern": {"v_proj": 7, "model.layers.0.self_attn.o_proj": 2.5}}),
        ("mixtral", {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1],
                     "rank_pattern": {"q_proj": 1}}),
    ],
)  # fmt: skip
def test_ranks_and_alphas_by_pattern_are_pefts(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """PEFT turns names of one expert's projections into fused parameters, with twice the rank and alpha for gate and
    up. Logits, and adapters after a step of gradient descent, read and written again."""
    import peft  # takes seconds, in each process that collects this file

    base, _ = write_base(FAMILIES[family](Random(3)), tmp_path)
    config = peft.LoraConfig(r=2, lora_alpha=6, init_lora_weights=False, **settings)
    peft_model = peft.get_peft_model(base, config).double()
    peft_model.save_pretrained(tmp_path / "adapter")
    spec = beginning_as(tmp_path / "base", tmp_path / "adapter")
    assert spec.adapter.groups
    model = adapted_model(tmp_path / "base", tmp_path / "adapter", spec)
    assert_learns_as_peft(model, spec, peft_model, tmp_path)
    assert beginning_as(tmp_path / "base", tmp_path / "ours").adapter.groups == spec.adapter.groups


def assert_learns_as_peft(model: LanguageModel, spec: LanguageModelSpec, peft_model: Any, tmp_path: Path) -> None:
    """Compare logits, and adapters after a step of gradient descent."""
    tokens = torch.arange(24).view(2, 12) % spec.vocab_size
    with as_double():
        expected = their_logits(peft_model, tokens)
        loss_of(expected, tokens).backward()
    logits = model(tokens)
    assert_close(logits, expected, 1e-10)
    loss_of(logits, tokens).backward()
    with torch.no_grad():
        for parameter in [*peft_model.parameters(), *model.parameters()]:
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
    peft_model.save_pretrained(tmp_path / "stepped")
    save_adapter(spec, ModelSource(model), tmp_path / "ours", dtype=torch.float64,
                 origin=Origin.of_folder(str(tmp_path / "base"), spec))  # fmt: skip
    tensors, own_tensors = (tiny.tensors_of(tmp_path / folder) for folder in ("stepped", "ours"))
    assert tensors.keys() == own_tensors.keys()
    for name, tensor in tensors.items():
        assert_close(own_tensors[name], tensor, 1e-10)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("family", "saved", "ours"),
    [("qwen3_moe", ["lm_head", "embed_tokens"], ("embedding", "output")), ("mixtral", ["lm_head"], ("output",))],
)
def test_modules_trained_whole_are_pefts(family: str, saved: list[str], ours: tuple[str, ...], tmp_path: Path) -> None:
    import peft  # takes seconds, in each process that collects this file

    base, _ = write_base({**FAMILIES[family](Random(3)), "tie_word_embeddings": False}, tmp_path)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=saved, init_lora_weights=False)
    peft_model = peft.get_peft_model(base, config).double()
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if ".modules_to_save." in name:
                parameter += 0.1 * torch.randn_like(parameter)
    peft_model.save_pretrained(tmp_path / "adapter")
    spec = beginning_as(tmp_path / "base", tmp_path / "adapter")
    assert spec.adapter.modules_to_save == ours
    model = adapted_model(tmp_path / "base", tmp_path / "adapter", spec)
    assert_learns_as_peft(model, spec, peft_model, tmp_path)
    assert beginning_as(tmp_path / "base", tmp_path / "ours").adapter == spec.adapter.model_copy(
        update={
            "from_folder": str(tmp_path / "ours"), "from_config": ANY
        }
    )  # fmt: skip
    again = peft.PeftModel.from_pretrained(their_base(tmp_path / "base"), tmp_path / "ours")
    assert set(again.peft_config["default"].modules_to_save) == set(saved)


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_adapters_of_expert_modules_are_pefts(family: str, tmp_path: Path) -> None:
    """As PEFT has written them with transformers 4. Logits, and the gradients of both A's and B's."""
    import peft  # takes seconds, in each process that collects this file

    base, fields = write_base(FAMILIES[family](Random(3)), tmp_path)
    write_expert_modules(model_spec(fields), base.config, tmp_path / "adapter")
    peft_model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True).double()
    spec = beginning_as(tmp_path / "base", tmp_path / "adapter")
    assert spec.adapter.rank_of("layers.1.feed_forward.moe.experts.w_in") == 4
    model = adapted_model(tmp_path / "base", tmp_path / "adapter", spec)
    assert_learns_as_peft(model, spec, peft_model, tmp_path)


def test_adapters_of_expert_modules_that_differ_are_refused(tmp_path: Path) -> None:
    base = tiny.folder_of(tiny.their_model("mixtral"), tmp_path / "base")
    folder = tmp_path / "adapter"
    write_expert_modules(
        model_spec(expand_model({"from": str(base)}, None)), tiny.their_model("mixtral").config, folder
    )
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    fields, tensors = json.loads(config.read_text()), load_file(weights)
    stabilized_spec = written_anew(config, fields, use_rslora=True, base=base)
    experts = "layers.1.feed_forward.moe.experts.w_in"
    assert stabilized_spec.adapter.scale_of(experts) == pytest.approx(6 / 2**0.5, rel=1e-15)
    for patterns in ({"rank_pattern": {"w1": 3}}, {"alpha_pattern": {r"experts\.1\.w3": 3}}):
        with expect_problem("unsupported", f"{config}:rank_pattern"):
            written_anew(config, fields, base=base, **patterns)
    config.write_text(json.dumps(fields))
    for missing in (".experts.1.w2.", ".w1."):
        save_file({name: tensor for name, tensor in tensors.items() if missing not in name}, weights)
        with pytest.raises(SpecError) as error:
            beginning_as(base, folder)
        assert {problem.code for problem in error.value.problems} == {"missing"}
        assert all(missing in problem.path for problem in error.value.problems)


def written_anew(config: Path, fields: dict[str, Any], *, base: Path, **changes: Any) -> LanguageModelSpec:
    config.write_text(json.dumps({**fields, **changes}))
    return beginning_as(base, config.parent)


def write_expert_modules(spec: LanguageModelSpec, config: Any, folder: Path) -> None:
    """A random adapter of queries' outputs, routers and the projections of experts."""
    is_mixtral = config.model_type == "mixtral"
    names = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    width, hidden = spec.model_dim, spec.moe.hidden_dim
    tensors = {}

    def add(module: str, inputs: int, outputs: int) -> None:
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(2, inputs, dtype=torch.float64) / 4
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(outputs, 2, dtype=torch.float64) / 4

    for layer in spec.moe_layers:
        mlp = f"model.layers.{layer}.{'block_sparse_moe' if is_mixtral else 'mlp'}"
        add(f"{mlp}.gate", width, spec.moe.num_experts)
        for expert in range(spec.moe.num_experts):
            for name, sides in zip(names, [(width, hidden)] * 2 + [(hidden, width)], strict=True):
                add(f"{mlp}.experts.{expert}.{name}", *sides)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 6, "lora_dropout": 0.0,
              "target_modules": ["gate", *names], "bias": "none"}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))


def adapted_model(base: Path, folder: Path, spec: LanguageModelSpec) -> LanguageModel:
    model = build_model(spec, dtype=torch.float64).train()
    load_weights(str(base), model, spec)
    load_adapter(str(folder), model, spec)
    return model


def other_set(
    plain: LanguageModelSpec, adapter: dict, matrices: list[str], shapes: dict[str, Any]
) -> LanguageModelSpec:
    """The model with an adapter of one more or one less matrix of attention."""
    of_attention = next(name for name in matrices if ".attention." in name)
    names = {name.removesuffix("_lora_b") for name in shapes if name.endswith("_lora_b")} ^ {of_attention}
    targets = sorted(names) or [matrices[-1] if matrices[-1] != of_attention else matrices[1]]
    return model_spec({**plain.model_dump(), "adapter": {**adapter, "targets": targets}})


def test_filled_in_fields_are_valid_until_the_config_changes(tmp_path: Path) -> None:
    base = tiny.folder_of(tiny.their_model("mixtral"), tmp_path / "base")
    adapter_beside(base, tmp_path / "adapter", {"rank": 2, "alpha": 3.0})
    fields = {"model": {"from": str(base)}, "adapter": {"from": str(tmp_path / "adapter")}}
    roots = [str(tmp_path)]
    filled_in = expand(fields, roots)
    expected = {"rank": 2, "alpha": 3.0, "rank_stabilized": False, "targets": None}
    assert filled_in["adapter"].items() >= expected.items()
    assert expand(filled_in, roots) == filled_in
    nested_spec = expand({"model": {**fields["model"], "adapter": fields["adapter"]}}, roots)
    assert nested_spec["model"]["adapter"] == filled_in["adapter"]
    train = {"num_steps": 1, "batch_tokens": 2048}
    job = JobSpec.parse({**filled_in, "data": documents(tmp_path / "data"), "train": train})
    stored_spec = job.model_dump(mode="json")
    assert stored_spec["model"]["adapter"]["from"] == str(tmp_path / "adapter")
    assert JobSpec.parse(expand(stored_spec, roots)) == job
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(config.read_text() + " ")
    with expect_problem("changed", "model.adapter.from"):
        expand(stored_spec, roots)
    with expect_problem("not_allowed", "adapter.from"):
        expand(fields, [str(base)])


@pytest.fixture(scope="module")
def mixtral_adapter(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(base, adapter of its queries and values)"""
    folder = tmp_path_factory.mktemp("mixtral")
    base = tiny.folder_of(tiny.their_model("mixtral"), folder / "base")
    adapter = {"rank": 2, "alpha": 3.0, "targets": ["*.query.*", "*.value.*"]}
    adapter_beside(base, folder / "adapter", adapter)
    return base, folder / "adapter"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rank", 3), ("alpha", 1.0), ("rank_stabilized", True), ("targets", ["*.query.*"]),
        ("groups", [{"pattern": "*.query.*", "rank": 3}]), ("modules_to_save", ["output"]),
        ("targets", ["*.query.*", "*.value.*", "*.output.*"]),
    ],
)  # fmt: skip
def test_what_is_written_beside_must_say_the_same(mixtral_adapter: tuple[Path, Path], field: str, value: Any) -> None:
    base, folder = mixtral_adapter
    with expect_problem("mismatch", f"adapter.{field}", value):
        expand({"model": {"from": str(base)}, "adapter": {"from": str(folder), field: value}}, None)


OTHER_KINDS: list[tuple[dict[str, Any], ProblemCode, str]] = [
    ({"r": "2"}, "wrong_type", "{config}:r"),
    ({"r": True}, "wrong_type", "{config}:r"),
    ({"r": -1}, "out_of_range", "adapter.rank"),
    ({"lora_alpha": None}, "wrong_type", "{config}:lora_alpha"),
    ({"lora_alpha": 10**400}, "wrong_type", "adapter.alpha"),
    ({"use_rslora": 1}, "wrong_type", "{config}:use_rslora"),
    ({"peft_type": "LOHA"}, "unsupported", "{config}:peft_type"),
    ({"peft_type": "IA3", "r": None}, "unsupported", "{config}:peft_type"),
    ({"use_dora": 1}, "wrong_type", "{config}:use_dora"),
    ({"trainable_token_indices": [3, "x"]}, "wrong_type", "{config}:trainable_token_indices"),
    ({"trainable_token_indices": {"visual": [3]}}, "unsupported", "{config}:trainable_token_indices"),
    ({"modules_to_save": ["score"]}, "unsupported", "{config}:modules_to_save"),
    ({"modules_to_save": ["lm_head", 3]}, "wrong_type", "{config}:modules_to_save"),
    ({"alpha_pattern": {"q_proj": 0}}, "wrong_type", "{config}:alpha_pattern.q_proj"),
    ({"alpha_pattern": ["q_proj"]}, "wrong_type", "{config}:alpha_pattern"),
    ({"rank_pattern": {"(q_proj": 2}}, "invalid_value", "{config}:rank_pattern.(q_proj"),
    ({"rank_pattern": {"(a+)+": 2}}, "unsupported", "{config}:rank_pattern.(a+)+"),
    ({"later_than_this": True}, "unknown_key", "{config}:later_than_this"),
    ({"init_lora_weights": "olora"}, "unsupported", "{config}:init_lora_weights"),
    ({"lora_dropout": "x"}, "wrong_type", "{config}:lora_dropout"),
    ({"lora_dropout": 1}, "out_of_range", "{config}:lora_dropout"),
]


@pytest.mark.parametrize(("changes", "code", "path"), OTHER_KINDS)
def test_an_adapter_config_of_another_kind_is_refused(mixtral_adapter, tmp_path: Path, changes, code, path) -> None:
    base, folder = mixtral_adapter
    config = shutil.copytree(folder, tmp_path / "adapter") / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    with expect_problem(code, path.format(config=config)):
        expand({"model": {"from": str(base)}, "adapter": {"from": str(config.parent)}}, None)


def test_configs_of_all_releases_are_read(mixtral_adapter, tmp_path: Path) -> None:
    """Keys of published configs, from PEFT 0.2 to 0.19, without effect on this adapter."""
    base, folder = mixtral_adapter
    config = shutil.copytree(folder, tmp_path / "adapter") / "adapter_config.json"
    keys = {
        "enable_lora": None, "merge_weights": False, "revision": None, "layers_to_transform": [0, 1, 2],
        "layers_pattern": "layers", "auto_mapping": {"unsloth_fixed": True}, "megatron_config": None,
        "megatron_core": "megatron.core", "loftq_config": {}, "layer_replication": None, "eva_config": None,
        "exclude_modules": None, "lora_bias": False, "corda_config": None, "qalora_group_size": 16,
        "trainable_token_indices": None, "use_qalora": False, "arrow_config": None, "alora_invocation_tokens": None,
        "ensure_weight_tying": False, "peft_version": "0.19.1", "use_bdlora": None, "lora_ga_config": None,
        "rank_pattern": None, "alpha_pattern": None, "modules_to_save": [], "task_type": "SEQ_2_SEQ_LM",
    }  # fmt: skip
    spec = beginning_as(base, folder)
    config.write_text(json.dumps({**json.loads(config.read_text()), **keys}))
    assert shapes_of(beginning_as(base, config.parent)) == shapes_of(spec)


def test_an_adapter_of_another_base_is_refused_with_both_shapes(tmp_path: Path) -> None:
    base = tiny.folder_of(tiny.their_model("mixtral"), tmp_path / "base")
    adapter_beside(base, tmp_path / "adapter", {"rank": 2})
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    rows, width = tensors[name].shape
    wide = {**tensors, name: torch.zeros(rows, width + 1)}
    for variant, code in (
        (wide, "shape_mismatch"),
        ({**tensors, name.replace(".0.", ".99."): tensors[name].clone()}, "unknown_key"),
        ({key: tensors[key] for key in tensors if key != name.replace("lora_A", "lora_B")}, "missing"),
        ({"base_model.model.transformer.h.0.lora_A.weight": tensors[name]}, "unknown_key"),
        ({**tensors, name: torch.zeros(rows, width, dtype=torch.int64)}, "dtype_mismatch"),
    ):
        save_file(variant, path)
        with pytest.raises(SpecError) as error:
            beginning_as(base, tmp_path / "adapter")
        assert code in {problem.code for problem in error.value.problems}
    save_file({**tensors, name: tensors[name] / 0}, path)
    spec = beginning_as(base, tmp_path / "adapter")
    with pytest.raises(SpecError, match="infinite or NaN"):
        load_adapter(str(tmp_path / "adapter"), build_model(spec), spec)
    save_file(wide, path)
    with pytest.raises(SpecError, match=rf"must have the shape \[{rows}, {width}\]"):
        check_trained_adapter(spec, None)


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    base = tiny.folder_of(tiny.their_model("mixtral"), tmp_path / "base")
    adapter_beside(base, tmp_path / "adapter", {"rank": 2})
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    with expect_problem("not_found", "model.adapter.from"):
        beginning_as(base, tmp_path / "adapter")
    torch.save({}, tmp_path / "adapter" / "adapter_model.bin")
    with expect_problem("not_found", "model.adapter.from"):
        beginning_as(base, tmp_path / "adapter")


def of_rank(degrees: Degrees, job: JobSpec) -> dict[str, tuple[float, int]]:
    """For each shard of an adapter on this rank: the largest difference from what one rank reads, and its size."""
    layout = Layout.build(degrees.plan(8))
    task = build_task(job)
    model, reference = task.build_model(layout), task.build_model(Layout.single())
    for target, target_layout in ((model, layout), (reference, Layout.single())):
        task.begin(target, target_layout, None)
        notes = task.begin_trained(target, target_layout, None)
        assert notes == (f"continues from the adapter of {job.model.adapter.from_folder}",)
    parts = {}
    for parameter in local_parameters(model):
        if is_adapter(parameter.name):
            region = tuple(slice(*bounds) for bounds in extent(parameter.part, layout))
            difference = (parameter.local.detach() - reference.get_parameter(parameter.name).detach()[region]).abs()
            parts[parameter.name] = (float(difference.max()) if difference.numel() else 0.0, difference.numel())
    layout.close()
    return parts


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "degrees", [Degrees(expert=2, tensor=2), Degrees(expert=2, data=2, tensor=2, fsdp=2, expert_fsdp=2)], ids=str
)
def test_each_rank_reads_its_own_part(ranks: Pools, degrees: Degrees, tmp_path: Path) -> None:
    folder = mixtral(tmp_path / "hub", dtype=torch.float32)
    adapter_beside(folder, tmp_path / "adapter", {"rank": 2, "targets": ["*"]})
    fields = with_adapter(further(folder, tmp_path), rank=2).model_dump(mode="json")
    fields["model"]["adapter"] = {"from": str(tmp_path / "adapter")}
    job = JobSpec.parse(expand(fields, None))
    sizes = {name: torch.Size(shape).numel() for name, shape in shapes_of(job.model).items()}
    answers = ranks[degrees.workers].run(of_rank, degrees, job)
    for parts in answers:
        assert parts.keys() == sizes.keys()
        assert all(difference == 0 for difference, _ in parts.values())
        assert sum(size for _, size in parts.values()) < sum(sizes.values())
    for name, size in sizes.items():
        assert sum(parts[name][1] for parts in answers) >= size


@pytest.mark.slow
def test_a_job_continues_from_an_adapter_and_resumes_without_its_folder(tmp_path: Path) -> None:
    folder, cache = mixtral(tmp_path / "hub", dtype=torch.float32), tmp_path / "cache"
    first = with_adapter(further(folder, tmp_path), rank=2, targets=["*.attention.*", "*.experts.*"],
                                            modules_to_save=["output"])  # fmt: skip
    run(first, tmp_path / "first", cache)
    save_checkpoint_as_folder(str(stored_in(tmp_path / "first", 4)), tmp_path / "adapter")
    save_checkpoint_as_folder(str(stored_in(tmp_path / "first", 4)), tmp_path / "merged", merge=True)
    merged_tensors, saved = tiny.tensors_of(tmp_path / "merged"), tiny.tensors_of(tmp_path / "adapter")
    assert torch.equal(merged_tensors["lm_head.weight"], saved["base_model.model.lm_head.weight"])
    assert not torch.equal(merged_tensors["lm_head.weight"], tiny.tensors_of(folder)["lm_head.weight"])
    fields = {**further(folder, tmp_path).model_dump(mode="json"), "adapter": {"from": str(tmp_path / "adapter")}}
    spec = JobSpec.parse(expand(fields, None))
    optimizer = spec.train.optimizer.model_copy(update={"peak_lr": 1e-30})
    still = spec.model_copy(update={"train": spec.train.model_copy(update={"optimizer": optimizer})})
    _, still_run = run(still, tmp_path / "still", cache)
    save_checkpoint_as_folder(str(stored_in(tmp_path / "still", 4)), tmp_path / "same")
    tiny.same_tensors(tiny.tensors_of(tmp_path / "adapter"), tiny.tensors_of(tmp_path / "same"))
    assert any("continues from the adapter of" in line["message"] for line in still_run.logs)

    _, full_run = run(spec, tmp_path / "whole", cache)
    assert course(full_run)[0]["loss"] == course(still_run)[0]["loss"], "the first loss is of the same adapter"
    _, fresh_run = run(first, tmp_path / "fresh", cache)
    assert course(fresh_run)[0]["loss"] != course(full_run)[0]["loss"]
    run(spec, tmp_path / "resumed", cache, control=RequestAfter("pause", 2))
    (tmp_path / "adapter").rename(tmp_path / "elsewhere")
    outcome, resumed_run = run(spec, tmp_path / "resumed", cache, attempt=2)
    assert outcome.kind == "succeeded"
    assert course(resumed_run) == course(full_run)[2:]
    with pytest.raises(SpecError, match=r"adapter\.from .*does not exist"):
        run(spec, tmp_path / "anew", cache)


def test_a_regular_expression_of_peft_is_read_as_targets(tmp_path: Path) -> None:
    """Values are compared in tests/language/test_adapters.py."""
    import peft  # takes seconds, in each process that collects this file

    base = base_of("qwen3", Random(3), tmp_path / "base")
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=r".*layers\.\d+\.self_attn\.(q|v)_proj")
    peft.get_peft_model(their_base(base), config).save_pretrained(tmp_path / "adapter")
    spec = beginning_as(base, tmp_path / "adapter")
    assert spec.adapter.targets == ("layers.*.attention.query.weight", "layers.*.attention.value.weight")
