"""The examples of language models as short jobs: trained from scratch and from a folder, used through the control
plane, and exported as a folder that transformers loads."""

from collections.abc import Iterator
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

from examples.corpora import docstrings
from examples.small_folder import FAMILIES, VOCAB_SIZE, make
from moe.export.hub import save_checkpoint_as_folder
from moe.export.trained_model import TrainedModel
from moe.spec.generation import GenerationSpec
from service.client import ApiError, Client, Job
from service.head.local_head import LocalHead
from tests.processes import DEADLINE_S
from tests.ray.control_plane import ControlPlane, losses, state_changes
from tests.unit.language_runs import documents

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPT = "def read_lines(path):"


def example(name: str, num_steps: int, max_sequences: int = 4, **changes: Any) -> dict[str, Any]:
    """An example with fewer steps, on its number of workers, evaluated on part of the held-out set."""
    fields: dict[str, Any] = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    evaluation = {"every_steps": num_steps, "max_sequences": max_sequences}
    train = {**fields["train"], "num_steps": num_steps, "evaluation": evaluation}
    return {**fields, "train": train, "checkpoint": {"every_steps": num_steps}, **changes}


@pytest.fixture(scope="module")
def data(folder: Path) -> dict[str, Any]:
    """Documents that are prepared faster than the packages for the tokenizer of each folder."""
    return {**documents(folder.parent / "data"), "max_tokens": 512}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small folder of random weights, made by the example's script."""
    folder = tmp_path_factory.mktemp("hub") / "small"
    make("qwen3_moe", folder)
    return folder


@pytest.fixture(scope="module")
def plane(
    head: LocalHead, cache: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ControlPlane]:
    plane = ControlPlane(head, cache, tmp_path_factory.mktemp("plane"), data_roots=f'["{folder.parent}"]').start()
    yield plane
    plane.close()


def train_to_end(client: Client, spec: dict[str, Any]) -> Job:
    job = client.submit(spec)
    events = list(job.events())
    job = job.wait(DEADLINE_S)
    assert job.state == "succeeded", job.data["reason"]
    assert state_changes(events)[-1]["state"] == "succeeded"
    assert len(losses(job)) == spec["train"]["num_steps"]
    return job


def checkpoint_of(job: Job) -> str:
    return f"{job.storage}/checkpoints/{job.checkpoints()[-1]['name']}"


def librarys_text(job: Job, num_tokens: int) -> str:
    """Text from the library with the weights of a job. The exported folder has bfloat16 weights where the base folder
    has, and after so short a training their text may differ."""
    (text,) = TrainedModel.load(checkpoint_of(job)).generate([PROMPT], GenerationSpec(max_tokens=num_tokens))
    return text


def transformers_text(folder: Path, num_tokens: int, adapter: Path | None = None) -> str:
    """Text that transformers generates from a folder after the prompt, with PEFT for an adapter."""
    from peft import PeftModel  # takes seconds, in each process that collects this file

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter))
    inputs = tokenizer(PROMPT, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


@pytest.mark.slow
def test_a_model_of_python_source_learns_and_is_given_back(plane: ControlPlane, tmp_path: Path) -> None:
    job = train_to_end(plane.client, example("code-model", 40, 32))
    course = list(losses(job).values())
    assert sum(course[-5:]) < sum(course[:5]) - 5
    report = job.report
    assert set(report["sources"]) == {"h11", "sqlparse", "structlog", "uvicorn", "all"}
    totals = report["sources"]["all"]
    assert totals["bits_per_byte"] < 3.5
    assert totals["xz_bits_per_byte"] < totals["unigram_bits_per_byte"]
    assert len(report["completions"]) == 3
    save_checkpoint_as_folder(checkpoint_of(job), tmp_path / "exported")
    assert "".join(job.generate(PROMPT, max_tokens=12)) == transformers_text(tmp_path / "exported", 12)


@pytest.mark.slow
def test_train_on_a_folder_with_frozen_router(
    plane: ControlPlane, folder: Path, data: dict[str, Any], tmp_path: Path
) -> None:
    spec = example("train-on", 4, data=data)
    job = train_to_end(plane.client, {**spec, "model": {**spec["model"], "from": str(folder)}})
    messages = [line["message"] for line in job.logs()]
    assert any(f"starts from the weights of {folder}" in line for line in messages)
    assert any(
        "of all 1,411,840 weights are trained; frozen: layers.*.feed_forward.moe.router" in line for line in messages
    )
    save_checkpoint_as_folder(checkpoint_of(job), tmp_path / "exported")
    before, after = (
        transformers.AutoModelForCausalLM.from_pretrained(location).state_dict()
        for location in (folder, tmp_path / "exported")
    )
    assert before.keys() == after.keys()
    equal_names = {name for name in before if torch.equal(before[name], after[name])}
    assert equal_names == {name for name in before if name.endswith("mlp.gate.weight")}
    assert "".join(job.generate(PROMPT, max_tokens=12)) == librarys_text(job, 12)


# PEFT itself uses it.
@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["fine-tune", "preference", "kto"])
def test_a_folder_is_tuned_on_conversations(name: str, plane: ControlPlane, folder: Path, tmp_path: Path) -> None:
    docstrings.make(folder.parent / "docstrings", 300)
    spec = example(name, 6)
    paths = [path.replace("/tmp", str(folder.parent)) for path in spec["data"]["paths"]]
    spec["data"] = {**spec["data"], "paths": paths, "held_out": 0.1}
    spec["train"]["optimizer"] = {"name": "adamw", "peak_lr": 1e-2}  # so that six steps change the generated text
    job = train_to_end(plane.client, {**spec, "model": {**spec["model"], "from": str(folder)}})
    log_text = "\n".join(str(line["message"]) for line in job.logs())
    assert "are learned: the assistant's, found by the text that each answer adds" in log_text
    source = job.report["sources"]["conversations"]
    if name == "preference":
        losses = [point["nll"] for point in job.metrics()]
        assert losses[0] == pytest.approx(log(2), abs=1e-3), "as every pair has before the first step"
        assert min(losses) < log(2)
    elif name == "kto":
        numbers = [point["numbers"] for point in job.metrics()]
        assert numbers[0]["kl"] == pytest.approx(0, abs=1e-3)
        assert job.metrics()[0]["nll"] == pytest.approx(0.5, abs=1e-3), "as every answer has before the first step"
        assert max(number.get("reward_margin", 0.0) for number in numbers) > 0
        assert source["kl"] is not None
    else:
        assert source["loss"] < source["base_loss"]
    save_checkpoint_as_folder(checkpoint_of(job), tmp_path / "adapter")
    assert sorted(file.name for file in (tmp_path / "adapter").glob("adapter_*")) == [
        "adapter_config.json", "adapter_model.safetensors"]  # fmt: skip
    text = transformers_text(folder, 12, tmp_path / "adapter")
    assert "".join(job.generate(PROMPT, max_tokens=12)) == text
    assert text != transformers_text(folder, 12)


@pytest.mark.slow
def test_upcycling_a_folder(plane: ControlPlane, folder: Path, data: dict[str, Any], tmp_path: Path) -> None:
    dense = folder.parent / "dense"
    make("llama", dense)
    spec = example("upcycle", 4, data=data)
    job = train_to_end(plane.client, {**spec, "model": {**spec["model"], "from": str(dense)}})
    messages = [line["message"] for line in job.logs()]
    assert any("2 of its 2 feed-forward layers become 8 experts each" in line for line in messages)
    save_checkpoint_as_folder(checkpoint_of(job), tmp_path / "exported")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "exported").model_type == "mixtral"
    assert "".join(job.generate(PROMPT, max_tokens=12)) == librarys_text(job, 12)


@pytest.mark.slow
def test_a_job_goes_on_from_the_adapter_of_another(plane: ControlPlane, folder: Path, data: dict[str, Any]) -> None:
    spec = example("train-on", 4, data=data)
    spec["train"].pop("freeze")
    spec["model"] = {**spec["model"], "from": str(folder)}
    targets = ["*.attention.*", "*.experts.*"]
    first = train_to_end(plane.client, {**spec, "adapter": {"rank": 4, "alpha": 8.0, "targets": targets}})
    adapter = folder.parent / "adapter"
    save_checkpoint_as_folder(checkpoint_of(first), adapter)
    job = train_to_end(plane.client, {**spec, "adapter": {"from": str(adapter)}})
    adapter_spec = job.data["spec"]["model"]["adapter"]
    assert (adapter_spec["rank"], adapter_spec["alpha"], adapter_spec["from"]) == (4, 8.0, str(adapter))
    assert any(f"continues from the adapter of {adapter}" in line["message"] for line in job.logs())
    assert losses(job)[1] < losses(first)[1], "the same batch, seen by what was trained"
    with pytest.raises(ApiError, match=r"adapter\.rank \(=8\) must be 4, as .* says; omit it"):
        plane.client.submit({**spec, "adapter": {"from": str(adapter), "rank": 8}})
    with pytest.raises(ApiError, match=r"adapter\.from .*outside the folders that this service may read"):
        plane.client.submit({**spec, "adapter": {"from": "/etc"}})


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_script_makes_a_folder_of_each_family(family: str, tmp_path: Path) -> None:
    make(family, tmp_path / "folder")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder", dtype=torch.float32)
    logits = model(input_ids=torch.arange(10)[None], use_cache=False).logits
    assert logits.shape == (1, 10, VOCAB_SIZE)
    assert bool(logits.isfinite().all())
