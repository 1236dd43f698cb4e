"""An adapter that a job names by its folder: what that fills in, what it begins with, and what is refused."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

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
from moe.spec import AdapterSpec, JobSpec, LanguageModelSpec, ProblemCode, SpecError, model_spec
from moe.spec.adapter import is_adapter
from moe.spec.patterns import starred
from moe.tasks.build import build_task
from moe.tasks.language import build_model
from moe.tasks.language.pretrained import check_trained_adapter
from tests.grid import first_seed_of
from tests.interchange import tiny
from tests.interchange.test_jobs import further, mixtral, stored_in, with_adapter
from tests.language.families import FAMILIES, their_model
from tests.parity.gloo_ranks import Pools
from tests.parity.trajectory import Degrees
from tests.refusals import refused
from tests.unit.language_runs import documents
from tests.unit.train_runs import RequestAfter, course, run

# PEFT's own use of it.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()


def adapter_beside(base: Path, folder: Path, adapter: dict[str, Any], seed: int = 0) -> LanguageModelSpec:
    """Write a random adapter of the base's model."""
    spec = model_spec(expand_model({"from": str(base), "adapter": adapter}, None))
    assert isinstance(spec, LanguageModelSpec)
    model = build_model(spec, seed=seed)
    with torch.no_grad():
        for name, each in model.named_parameters():
            if is_adapter(name):
                each.copy_(torch.randn_like(each))
    save_adapter(spec, ModelSource(model), folder, origin=Origin.of_folder(str(base), spec))
    return spec


def base_of(family: str, random: Random, folder: Path) -> Path:
    config = FAMILIES[family](random)
    config |= {"shared_intermediate_size": 0} if family == "granitemoeshared" else {}
    their_model(config).float().save_pretrained(folder, save_original_format=True)
    return folder


def names_of(spec: LanguageModelSpec) -> dict[str, tuple[int, ...]]:
    return {each.name: each.shape for each in spec.parameters() if not each.frozen}


def beginning_as(base: Path, folder: Path, **adapter: Any) -> LanguageModelSpec:
    spec = model_spec(expand_model({"from": str(base), "adapter": {"from": str(folder), **adapter}}, None))
    assert isinstance(spec, LanguageModelSpec)
    return spec


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", first_seed_of(FAMILIES, 3))
def test_a_folder_says_all_of_its_adapter(case: tuple[str, int], tmp_path: Path) -> None:
    """Random matrices, one by one or by kind; written with ends of names, and as PEFT writes it again."""
    import peft  # takes seconds, in each process that collects this file

    family, seed = case
    random = Random(f"{family} {seed}")
    base = base_of(family, random, tmp_path / "base")
    plain = model_spec(expand_model({"from": str(base)}, None))
    assert isinstance(plain, LanguageModelSpec)
    every = AdapterSpec(rank=1, targets=("*",))
    shapes = {each.name: each.shape for each in plain.parameters() if every.chooses(each.name)}
    matrices, smallest = list(shapes), min(min(shape[-2:]) for shape in shapes.values())
    some = random.sample(matrices, random.randint(1, len(matrices)))
    if random.random() < 0.5:
        some = [starred(name) for name in some]
    pairs = [("experts.w_in", "experts.w_gate"), ("experts.w_gate", "experts.w_in")]
    targets = [*some, *(name.replace(*pair) for name in some for pair in pairs if name.endswith(pair[0]))]
    adapter = {
        "rank": random.randint(1, min(2, smallest)), "alpha": random.choice([1.0, 2.5]),
        "rank_stabilized": random.random() < 0.5,
    }  # fmt: skip
    written = adapter_beside(base, tmp_path / "adapter", {**adapter, "targets": targets})
    read = beginning_as(base, tmp_path / "adapter")
    assert names_of(read) == names_of(written)
    assert read.adapter is not None
    assert (read.adapter.rank, read.adapter.alpha) == (adapter["rank"], adapter["alpha"])
    assert read.adapter.rank_stabilized == adapter["rank_stabilized"]
    beside = beginning_as(base, tmp_path / "adapter", **adapter, targets=targets)
    assert names_of(beside) == names_of(written)
    model = build_model(read)
    load_adapter(str(tmp_path / "adapter"), model, read)
    with pytest.raises(SpecError) as refusal:
        load_adapter(str(tmp_path / "adapter"), model, other_set(plain, adapter, matrices, names_of(written)))
    assert {problem.code for problem in refusal.value.problems} <= {"unknown_key", "missing"}
    theirs = peft.PeftModel.from_pretrained(their_base(base), tmp_path / "adapter")
    theirs.save_pretrained(tmp_path / "again")
    assert names_of(beginning_as(base, tmp_path / "again")) == names_of(written)


def their_base(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def other_set(
    plain: LanguageModelSpec, adapter: dict[str, Any], matrices: list[str], chosen: dict[str, Any]
) -> LanguageModelSpec:
    """The model with an adapter of one more or one less matrix of attention."""
    of_attention = next(name for name in matrices if ".attention." in name)
    kept = {name.removesuffix("_lora_b") for name in chosen if name.endswith("_lora_b")} ^ {of_attention}
    targets = sorted(kept) or [matrices[-1] if matrices[-1] != of_attention else matrices[1]]
    spec = model_spec({**plain.model_dump(), "adapter": {**adapter, "targets": targets}})
    assert isinstance(spec, LanguageModelSpec)
    return spec


def test_what_is_filled_in_stays_so_until_the_config_is_another(tmp_path: Path) -> None:
    base = tiny.folder_of(tiny.theirs("mixtral"), tmp_path / "base")
    adapter_beside(base, tmp_path / "adapter", {"rank": 2, "alpha": 3.0})
    given = {"model": {"from": str(base)}, "adapter": {"from": str(tmp_path / "adapter")}}
    roots = [str(tmp_path)]
    found = expand(given, roots)
    assert found["adapter"].items() >= {"rank": 2, "alpha": 3.0, "rank_stabilized": False, "targets": None}.items()
    assert expand(found, roots) == found
    inside = expand({"model": {**given["model"], "adapter": given["adapter"]}}, roots)
    assert inside["model"]["adapter"] == found["adapter"]
    job = JobSpec.parse(
        {**found, "data": documents(tmp_path / "data"), "train": {"num_steps": 1, "batch_tokens": 2048}}
    )
    dumped = job.model_dump(mode="json")
    assert dumped["model"]["adapter"]["from"] == str(tmp_path / "adapter")
    assert JobSpec.parse(expand(dumped, roots)) == job
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(config.read_text() + " ")
    with refused("changed", "model.adapter.from"):
        expand(dumped, roots)
    with refused("not_allowed", "adapter.from"):
        expand(given, [str(base)])


@pytest.fixture(scope="module")
def mixtral_adapter(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(base, adapter of its queries and values)"""
    folder = tmp_path_factory.mktemp("mixtral")
    base = tiny.folder_of(tiny.theirs("mixtral"), folder / "base")
    adapter = {"rank": 2, "alpha": 3.0, "targets": ["*.query.*", "*.value.*"]}
    adapter_beside(base, folder / "adapter", adapter)
    return base, folder / "adapter"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rank", 3), ("alpha", 1.0), ("rank_stabilized", True), ("targets", ["*.query.*"]),
        ("targets", ["*.query.*", "*.value.*", "*.output.*"]),
    ],
)  # fmt: skip
def test_what_is_written_beside_must_say_the_same(mixtral_adapter: tuple[Path, Path], field: str, value: Any) -> None:
    base, folder = mixtral_adapter
    with refused("mismatch", f"adapter.{field}", value):
        expand({"model": {"from": str(base)}, "adapter": {"from": str(folder), field: value}}, None)


OTHER_KINDS: list[tuple[dict[str, Any], ProblemCode]] = [
    ({"r": "2"}, "wrong_type"),
    ({"r": True}, "wrong_type"),
    ({"lora_alpha": None}, "wrong_type"),
    ({"use_rslora": 1}, "wrong_type"),
    ({"peft_type": "LOHA"}, "unsupported"),
    ({"peft_type": "IA3", "r": None}, "unsupported"),
    ({"use_dora": True}, "unsupported"),
    ({"modules_to_save": ["lm_head"]}, "unsupported"),
    ({"alpha_pattern": {"q_proj": 3}}, "unsupported"),
    ({"init_lora_weights": "olora"}, "unsupported"),
    ({"lora_dropout": "x"}, "wrong_type"),
    ({"lora_dropout": 1}, "out_of_range"),
]


def test_a_config_of_another_kind_is_refused_when_a_job_is_filled_in(
    mixtral_adapter: tuple[Path, Path], tmp_path: Path
) -> None:
    base, folder = mixtral_adapter
    config = tmp_path / "adapter" / "adapter_config.json"
    shutil.copytree(folder, config.parent)
    whole = json.loads(config.read_text())

    def fill_in(changes: dict[str, Any]) -> None:
        config.write_text(json.dumps({**whole, **changes}))
        expand({"model": {"from": str(base)}, "adapter": {"from": str(config.parent)}}, None)

    for changes, code in OTHER_KINDS:
        key, value = next(iter(changes.items()))
        with refused(code, f"{config}:{key}", value):
            fill_in(changes)
    with refused("out_of_range", "adapter.rank", -1):
        fill_in({"r": -1})
    with refused("wrong_type", "adapter.alpha"):
        fill_in({"lora_alpha": 10**400})


def test_an_adapter_of_another_base_is_refused_with_both_shapes(tmp_path: Path) -> None:
    base = tiny.folder_of(tiny.theirs("mixtral"), tmp_path / "base")
    adapter_beside(base, tmp_path / "adapter", {"rank": 2})
    held = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    rows, width = held[name].shape

    def refusal(changed: dict[str, torch.Tensor]) -> SpecError:
        save_file(changed, tmp_path / "adapter" / "adapter_model.safetensors")
        with pytest.raises(SpecError) as error:
            beginning_as(base, tmp_path / "adapter")
        return error.value

    wide = {**held, name: torch.zeros(rows, width + 1)}
    assert f"{name} (=[{rows}, {width + 1}]) must have the shape [{rows}, {width}]" in str(refusal(wide))
    beyond = name.replace(".0.", ".99.")
    (problem,) = refusal({**held, beyond: held[name].clone()}).problems
    assert f"{beyond} (=[{rows}, {width}])" in str(problem)
    assert problem.code == "unknown_key"
    halved = {each: held[each] for each in held if each != name.replace("lora_A", "lora_B")}
    assert "is missing, of shape" in str(refusal(halved))
    elsewhere = {"base_model.model.transformer.h.0.lora_A.weight": held[name]}
    assert "unknown_key" in {problem.code for problem in refusal(elsewhere).problems}
    whole_numbers = {**held, name: torch.zeros(rows, width, dtype=torch.int64)}
    assert "must be one of F32" in str(refusal(whole_numbers))
    save_file({**held, name: held[name] / 0}, tmp_path / "adapter" / "adapter_model.safetensors")
    spec = beginning_as(base, tmp_path / "adapter")
    with pytest.raises(SpecError, match="infinite or NaN"):
        load_adapter(str(tmp_path / "adapter"), build_model(spec), spec)
    save_file(wide, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(SpecError, match="must have the shape"):
        check_trained_adapter(spec, None)


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    base = tiny.folder_of(tiny.theirs("mixtral"), tmp_path / "base")
    adapter_beside(base, tmp_path / "adapter", {"rank": 2})
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    with refused("not_found", "model.adapter.from"):
        beginning_as(base, tmp_path / "adapter")
    torch.save({}, tmp_path / "adapter" / "adapter_model.bin")
    with refused("not_found", "model.adapter.from"):
        beginning_as(base, tmp_path / "adapter")


def of_rank(degrees: Degrees, job: JobSpec) -> dict[str, torch.Tensor]:
    """Largest difference of each part of an adapter on this rank from the same part of the folder's, as one rank reads
    it, and its number of values."""
    layout = Layout.build(degrees.plan(8))
    task = build_task(job)
    model = task.build_model(layout)
    task.begin(model, layout, None)
    assert task.begin_trained(model, layout, None) == (
        f"continues from the adapter of {job.model.adapter.from_folder}",
    )
    alone = task.build_model(Layout.single())
    task.begin_trained(alone, Layout.single(), None)
    found = {}
    for each in local_parameters(model):
        if is_adapter(each.name):
            within = tuple(slice(*bounds) for bounds in extent(each.part, layout))
            found[each.name] = torch.stack(
                [
                    (each.local.detach() - alone.get_parameter(each.name).detach()[within]).abs().max()
                    if each.local.numel()
                    else torch.tensor(0.0),
                    torch.tensor(float(each.local.numel())),
                ]
            )
    layout.close()
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "degrees", [Degrees(expert=2, tensor=2), Degrees(expert=2, data=2, tensor=2, fsdp=2, expert_fsdp=2)], ids=str
)
def test_each_rank_reads_its_own_part(ranks: Pools, degrees: Degrees, tmp_path: Path) -> None:
    folder = mixtral(tmp_path / "hub", dtype=torch.float32)
    adapter_beside(folder, tmp_path / "adapter", {"rank": 2, "targets": ["*"]})
    given = with_adapter(further(folder, tmp_path), rank=2).model_dump(mode="json")
    given["model"]["adapter"] = {"from": str(tmp_path / "adapter")}
    job = JobSpec.parse(expand(given, None))
    whole = {name: torch.Size(shape).numel() for name, shape in names_of(job.model).items()}
    answers = ranks[degrees.workers].run(of_rank, degrees, job)
    assert all(float(found[0]) == 0 for answer in answers for found in answer.values())
    assert all(answer.keys() == whole.keys() for answer in answers)
    assert all(sum(int(each[1]) for each in answer.values()) < sum(whole.values()) for answer in answers)
    for name, number in whole.items():
        assert sum(int(answer[name][1]) for answer in answers) >= number


@pytest.mark.slow
def test_a_job_goes_on_from_an_adapter_and_resumes_without_its_folder(tmp_path: Path) -> None:
    folder = mixtral(tmp_path / "hub", dtype=torch.float32)
    first = with_adapter(further(folder, tmp_path), rank=2, targets=["*.attention.*", "*.experts.*"])
    run(first, tmp_path / "first", tmp_path / "cache")
    save_checkpoint_as_folder(str(stored_in(tmp_path / "first", 4)), tmp_path / "adapter")
    given = {**further(folder, tmp_path).model_dump(mode="json"), "adapter": {"from": str(tmp_path / "adapter")}}
    spec = JobSpec.parse(expand(given, None))
    still = spec.model_copy(
        update={
            "train": spec.train.model_copy(
                update={"optimizer": spec.train.optimizer.model_copy(update={"peak_lr": 1e-30})}
            )
        }
    )
    _, unmoved = run(still, tmp_path / "still", tmp_path / "cache")
    save_checkpoint_as_folder(str(stored_in(tmp_path / "still", 4)), tmp_path / "same")
    before, after = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "same"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert any("continues from the adapter of" in line["message"] for line in unmoved.logs)

    _, undisturbed = run(spec, tmp_path / "whole", tmp_path / "cache")
    assert course(undisturbed)[0]["loss"] == course(unmoved)[0]["loss"], "the first loss is of the same adapter"
    _, fresh = run(first, tmp_path / "fresh", tmp_path / "cache")
    assert course(fresh)[0]["loss"] != course(undisturbed)[0]["loss"]
    run(spec, tmp_path / "resumed", tmp_path / "cache", control=RequestAfter("pause", 2))
    (tmp_path / "adapter").rename(tmp_path / "elsewhere")
    outcome, resumed = run(spec, tmp_path / "resumed", tmp_path / "cache", attempt=2)
    assert outcome.kind == "succeeded"
    assert course(resumed) == course(undisturbed)[2:]
    with pytest.raises(SpecError, match=r"adapter\.from .*does not exist"):
        run(spec, tmp_path / "anew", tmp_path / "cache")


def test_values_are_those_of_the_folder(tmp_path: Path) -> None:
    """Logits beside PEFT's, of a folder that PEFT has written."""
    import peft  # takes seconds, in each process that collects this file

    base = base_of("qwen3", Random(3), tmp_path / "base")
    theirs = peft.get_peft_model(
        their_base(base), peft.LoraConfig(r=2, lora_alpha=3, target_modules=r".*layers\.\d+\.self_attn\.(q|v)_proj",
                                          init_lora_weights=False),
    )  # fmt: skip
    theirs.save_pretrained(tmp_path / "adapter")
    spec = beginning_as(base, tmp_path / "adapter")
    assert spec.adapter is not None
    assert spec.adapter.targets == ("layers.*.attention.query.weight", "layers.*.attention.value.weight")
    model = build_model(spec)
    load_weights(str(base), model, spec)
    load_adapter(str(tmp_path / "adapter"), model, spec)
    tokens = torch.arange(12)[None]
    expected = theirs.eval()(tokens, use_cache=False).logits
    torch.testing.assert_close(model.eval()(tokens), expected, rtol=1e-4, atol=1e-5)
