"""`generate`, `translate`, `export`, `evaluate` as they are typed: streams, JSON, standard input, misuse."""

import json
import math
import os
import shutil
import signal
import subprocess
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from moe.evaluation.task_file import read_tasks
from moe.export.base import load_base
from moe.export.load import load_trained
from moe.export.trained_model import TrainedModel
from moe.spec.generation import GenerationSpec
from moe.tasks.language.generator import LanguageGenerator
from tests.evaluation.models import checkpoint_in, task, trained_job, write_lines
from tests.evaluation.models import documents as questions
from tests.processes import heed_ctrl_c
from tests.service.checkpoints import commit
from tests.service.control_plane import spec as translation_job
from tests.service_cli.command import COMMAND, OF_MODELS, ROOT, check_refused, environment, json_of, output_of
from tests.unit.language_runs import documents, language_job
from tests.unit.train_runs import RequestAfter, corpus, job, run

PROMPT = "def test_"


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Storage of a language model's job of a few steps, with Mixtral's shape."""
    folder = tmp_path_factory.mktemp("language")
    experts = {
        "num_experts": 4, "hidden_dim": 24, "router": "softmax_topk", "top_k": 2, "activation": "swiglu",
        "group_tokens": 128,
    }  # fmt: skip
    spec = language_job(documents(folder / "data"), model={"moe": experts})
    run(spec, folder / "storage", folder / "cache", control=RequestAfter("pause", 3))
    return folder / "storage"


def expected_text(storage: Path, prompt: str, spec: GenerationSpec) -> str:
    (checkpoint,) = (path for path in storage.glob("checkpoints/step-*3.a*") if path.is_dir())
    return load_trained(str(checkpoint)).generate([prompt], spec)[0]


def test_it_goes_on_from_a_text_as_the_options_say(storage: Path) -> None:
    output = output_of("generate", storage, PROMPT, "--max-tokens", "12", modules=OF_MODELS)
    assert output == expected_text(storage, PROMPT, GenerationSpec(max_tokens=12)) + "\n"

    prompt = "import os\n\n"
    answer = json_of(
        "generate", storage, "--max-tokens=12", "--temperature=0.9", "--top-k=30", "--top-p=0.9", "--seed=5",
        "--stop=never", "--stop=ever", stdin=prompt, modules=OF_MODELS,
    )  # fmt: skip
    sampling = GenerationSpec(max_tokens=12, temperature=0.9, top_k=30, top_p=0.9, seed=5, stop=("never", "ever"))
    assert (answer["prompt"], answer["text"]) == (prompt, expected_text(storage, prompt, sampling))
    assert answer["reason"] in ("end", "max_tokens", "stop")
    assert answer["checkpoint"].startswith(str(storage))


def test_options_are_named_as_they_are_typed(tmp_path: Path) -> None:
    for options, words in (
        (["--temperature=0", "--top-k=3"], "--top-k (=3) has no effect on greedy decoding (temperature is 0)"),
        (["--temperature=0", "--seed=3"], "--seed (=3) has no effect on greedy decoding (temperature is 0)"),
        (["--log-probs"], "--log-probs requires --json"),
        (["--length-penalty", "1"], "--length-penalty (=1.0) has no effect without beam search"),
        (["--beams", "100"], "--beams (=100) must be less than or equal to 64"),
        (["--beams", "4", "--temperature", "1"], "--beams (=4) has no effect on sampling (temperature is"),
    ):
        check_refused(words, "generate", tmp_path, "x", *options)


def test_the_models_own_settings_apply_where_the_command_has_none(storage: Path, tmp_path: Path) -> None:
    own = shutil.copytree(storage, tmp_path / "own")
    (checkpoint,) = (path for path in own.glob("checkpoints/step-*3.a*") if path.is_dir())
    config = {"do_sample": True, "temperature": 1.5, "top_p": 0.9, "no_repeat_ngram_size": 2}
    (checkpoint / "tokenizers" / "generation_config.json").write_text(json.dumps(config))
    answer = json_of(
        "generate", own, PROMPT, "--max-tokens=12", "--seed=5", "--top-p=1", "--log-probs", modules=OF_MODELS
    )
    spec = GenerationSpec(max_tokens=12, temperature=1.5, top_k=50, seed=5)
    assert answer["text"] == expected_text(storage, PROMPT, spec)
    assert [len(answer["notes"]), len(answer["tokens"])] == [1, answer["num_tokens"]]
    assert "no_repeat_ngram_size (=2)" in answer["notes"][0]
    greedy = output_of("generate", own, PROMPT, "--max-tokens=12", "--temperature=0", modules=OF_MODELS)
    assert greedy == expected_text(storage, PROMPT, GenerationSpec(max_tokens=12)) + "\n"
    check_refused(
        "--min-p (=0.1) has no effect on greedy decoding", "generate", storage, "x", "--min-p=0.1", modules=OF_MODELS
    )


@pytest.mark.slow
def test_a_job_of_another_kind_is_told_its_command_before_torch_is_loaded(tmp_path: Path) -> None:
    commit(tmp_path / "translates", 3, spec=translation_job())
    commit(tmp_path / "generates", 3, spec=language_job(documents(tmp_path / "data")).model_dump(mode="json"))
    commit(tmp_path / "mine", 3, spec={**translation_job(), "model": {"kind": "module", "build": "mine:build"}})
    (tmp_path / "torch.py").write_text("raise AssertionError('torch was loaded')\n")
    without_torch = environment(PYTHONPATH=f"{tmp_path}:{environment()['PYTHONPATH']}")
    for command, folder, remedy in (
        ("generate", "translates", "shardyard translate {} TEXT"),
        ("translate", "generates", "shardyard generate {} PROMPT"),
        ("generate", "mine", "shardyard download {}'"),
    ):
        job = str(tmp_path / folder)
        result = subprocess.run(
            [*COMMAND, command, job, "x"], capture_output=True, text=True, check=False, env=without_torch
        )
        assert (result.returncode, result.stdout) == (2, ""), result.stderr
        assert remedy.format(job) in result.stderr


@pytest.mark.slow
def test_a_reader_that_has_gone_and_ctrl_c_end_it_without_a_word(storage: Path) -> None:
    for end in ("closed", "interrupted"):
        with subprocess.Popen(
            [*COMMAND, "generate", str(storage), PROMPT, "--max-tokens", "20000"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), preexec_fn=heed_ctrl_c,
        ) as process:  # fmt: skip
            assert process.stderr is not None
            assert os.read(process.stdout.fileno(), 1), "it comes as it is made"
            if end == "closed":
                process.stdout.close()
            else:
                process.send_signal(signal.SIGINT)
            errors = process.stderr.read().decode()
            assert process.wait() == (1 if end == "closed" else 130), errors
        assert errors == ""


@pytest.mark.slow
def test_translations_by_a_search(tmp_path: Path) -> None:
    run(job(corpus(tmp_path), train={"num_steps": 2}), tmp_path / "storage", tmp_path / "cache")
    (checkpoint,) = (path for path in (tmp_path / "storage/checkpoints").glob("step-*2.a*") if path.is_dir())
    translate = ("translate", tmp_path / "storage", "ein Wort", "--length-penalty=1")
    spec = GenerationSpec(max_tokens=32, num_beams=3, length_penalty=1.0)
    expected = load_trained(str(checkpoint)).generate(["ein Wort"], spec)[0]
    assert json_of(*translate, "--beams=3", modules=OF_MODELS)["translation"] == expected
    check_refused("--length-penalty (=1.0) has no effect without beam search", *translate)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(("format", "number"), [("huggingface", signal.SIGTERM), ("shardyard", signal.SIGINT)])
def test_a_broken_export_leaves_nothing(storage: Path, tmp_path: Path, format: str, number: signal.Signals) -> None:
    for attempt in range(20):
        target = tmp_path / f"exported-{attempt}"
        with subprocess.Popen(
            [*COMMAND, "export", storage, target, "--format", format], stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env=environment(), preexec_fn=heed_ctrl_c,
        ) as process:  # fmt: skip
            while process.poll() is None and not [*tmp_path.iterdir()]:
                pass
            process.send_signal(signal.SIGSTOP)  # in the middle of it, unless it is over
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            is_over = target.exists() or process.poll() is not None
            process.send_signal(number)
            process.send_signal(signal.SIGCONT)
            outputs = process.communicate()
        if not is_over:
            assert (process.returncode, *outputs) == (128 + number, b"", b"")
            assert not [*tmp_path.iterdir()]
            return
        assert process.returncode == 0, outputs
        shutil.rmtree(target)
    pytest.fail("it was over each time before it could be broken off")


EXAMPLE = ROOT / "examples/evaluate/tasks.yaml"
ROWS = questions(Random(4))
NO_NETWORK = """
import socket
def refused(*_, **__):
    raise AssertionError('a connection was asked for')
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refused
"""


def run_evaluate(folder: Path, *arguments: str | Path, customize: str = NO_NETWORK) -> subprocess.CompletedProcess[str]:
    """Run `shardyard evaluate` in a process that cannot connect to anything."""
    (folder / "sitecustomize.py").write_text(customize)
    path = f"{folder}:{environment()['PYTHONPATH']}"
    return subprocess.run(
        [*COMMAND, "evaluate", *map(str, arguments)], capture_output=True, text=True, check=False, cwd=folder,
        env=environment(PYTHONPATH=path, OMP_NUM_THREADS="1"),
    )  # fmt: skip


@pytest.fixture(scope="module")
def adapter_job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a job that trained an adapter; `hub` in it is the base model."""
    folder = tmp_path_factory.mktemp("adapted")
    trained_job(folder, rank=2)
    return folder


def write_tasks(folder: Path, **keys: Any) -> Path:
    write_lines(folder / "data.jsonl", ROWS)
    (folder / "tasks.yaml").write_text(yaml.safe_dump(task(**keys)))
    return folder / "tasks.yaml"


def accuracy(generator: object, number: int) -> float:
    """Accuracy by our own log-likelihoods."""
    assert isinstance(generator, LanguageGenerator)
    right = 0
    for row in ROWS[:number]:
        pairs = [(row["question"], f" {choice}") for choice in row["choices"]]
        likelihoods, _ = generator.scorer().log_likelihoods(pairs)
        right += max(range(len(likelihoods)), key=lambda index: likelihoods[index].nats) == row["index"]
    return right / number


@pytest.mark.slow
def test_a_job_beside_what_it_began_with(adapter_job: Path, tmp_path: Path) -> None:
    tasks, checkpoint = write_tasks(tmp_path), checkpoint_in(adapter_job / "storage")
    result = run_evaluate(tmp_path, adapter_job / "storage", "--tasks", tasks, "--limit", "10", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    report = json.loads(result.stdout)
    model = TrainedModel.load(str(checkpoint))
    expected = accuracy(model.generator, 10)
    of_base = accuracy(load_base(str(adapter_job / "hub"), model.max_tokens, model.dtype), 10)
    first = report["scores"][0]
    assert (first["task"], first["metric"], first["num_documents"]) == ("choices", "acc", 10)
    assert first["value"] == pytest.approx(expected)
    assert first["stderr"] == pytest.approx(math.sqrt(expected * (1 - expected) / 9))
    assert first["base"]["value"] == pytest.approx(of_base)
    assert first["difference"] == pytest.approx(expected - of_base)
    assert (report["base"], report["checkpoint"]) == (str(adapter_job / "hub"), str(checkpoint))
    _, num_cut = model.generator.scorer().log_likelihoods(  # type: ignore[attr-defined]
        [(row["question"], f" {choice}") for row in ROWS[:10] for choice in row["choices"]]
    )
    assert report["contexts_cut"] == num_cut > 0


@pytest.mark.slow
def test_contexts_as_conversations_for_the_job_and_its_base(adapter_job: Path, tmp_path: Path) -> None:
    from moe.evaluation.harness import ChatPrompts, evaluate  # takes seconds, in each process that collects this file

    storage, tasks = shutil.copytree(adapter_job / "storage", tmp_path / "storage"), write_tasks(tmp_path)
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    (checkpoint_in(storage) / "tokenizers" / "chat_template.jinja").write_text(template)
    result = run_evaluate(tmp_path, storage, "--tasks", tasks, "--limit", "6", "--json", "--chat")
    assert (result.returncode, result.stderr) == (0, "")
    report = json.loads(result.stdout)
    assert report["chat"] is True
    values = [report["scores"][0]["value"], report["scores"][0]["base"]["value"]]
    model = TrainedModel.load(str(checkpoint_in(storage)))
    base = load_base(str(adapter_job / "hub"), model.max_tokens, model.dtype)
    prompts = ChatPrompts(model.generator.chat_template())  # type: ignore[attr-defined]
    for value, generator in zip(values, (model.generator, base), strict=True):
        assert isinstance(generator, LanguageGenerator)
        assert value == evaluate(generator, read_tasks(tasks), 6, prompts).rows[0].value
    result = run_evaluate(tmp_path, adapter_job / "storage", "--tasks", tasks, "--chat")
    assert (result.returncode, result.stdout) == (2, "")
    assert "chat (=True) requires a chat template" in result.stderr
    result = run_evaluate(tmp_path, storage, "--tasks", tasks, "--no-fewshot-as-multiturn")
    assert (result.returncode, result.stdout) == (2, "")
    assert "--no-fewshot-as-multiturn requires --chat" in result.stderr


@pytest.mark.slow
def test_an_exported_folder_on_the_example_in_words(adapter_job: Path, tmp_path: Path) -> None:
    folder = tmp_path / "exported"
    output_of("export", adapter_job / "storage", folder)
    result = run_evaluate(tmp_path, folder, "--tasks", EXAMPLE)
    assert (result.returncode, result.stderr) == (0, "")
    head, *lines = (line.split() for line in result.stdout.splitlines())
    assert head == ["task", "metric", "documents", "value", "base", "difference"]
    assert [line[:4] for line in lines[:3]] == [
        ["next_line", "acc", "↑", "8"], ["next_line", "acc_norm", "↑", "8"], ["source", "bits_per_byte", "↓", "8"]
    ]  # fmt: skip
    value, _, stderr, base, _, _, difference = lines[0][4:]
    assert 0 <= float(value) <= 1
    assert float(difference) == pytest.approx(float(value) - float(base), abs=1e-4)
    assert float(stderr) == pytest.approx(math.sqrt(float(value) * (1 - float(value)) / 7), abs=1e-4)
    assert "".join(lines[3]) == f"base:{adapter_job / 'hub'}"


@pytest.mark.slow
def test_what_it_refuses_and_where_it_fails(adapter_job: Path, tmp_path: Path) -> None:
    tasks, storage = write_tasks(tmp_path), adapter_job / "storage"
    result = run_evaluate(tmp_path, storage, "--tasks", tasks, customize="import sys; sys.modules['lm_eval'] = None")
    message = "evaluation requires lm-evaluation-harness, which is not installed: pip install 'shardyard[evaluate]'"
    assert (result.returncode, result.stdout, result.stderr) == (1, "", f"shardyard: {message}\n")

    commit(tmp_path / "translates", 3, spec=translation_job())
    (tmp_path / "long").mkdir()
    answers = {"output_type": "generate_until", "doc_to_choice": None, "doc_to_target": "answer"}
    long = write_tasks(tmp_path / "long", **answers, generation_kwargs={"max_gen_toks": 64})
    broken = tmp_path / "broken.yaml"
    broken.write_text("task: !function code.f\n")
    for model, *options, words in (
        (storage, "--tasks", tmp_path / "none.yaml", "none.yaml: No such file or directory"),
        (storage, "--tasks", broken, "broken.yaml, line 1 (='!function') is a tag, which tasks may not have"),
        (storage, "--tasks", tasks, "--limit", "0", "Invalid value for '--limit': must be greater"),
        (storage, "'--tasks'"),
        (tmp_path / "translates", "--tasks", tasks,
         "is a translation model, which does not evaluate tasks; use 'shardyard translate"),
        (storage, "--tasks", long, "--no-base",
         "choices: generation_kwargs.max_gen_toks (=64) must be below 64, the length of the texts"),
    ):  # fmt: skip
        check_refused(words, "evaluate", model, *options)


@pytest.mark.slow
def test_a_base_that_is_gone(tmp_path: Path) -> None:
    """A job that trained all weights does not need it."""
    _, storage = trained_job(tmp_path)
    (tmp_path / "hub").rename(tmp_path / "elsewhere")
    evaluate = ("evaluate", storage, "--tasks", write_tasks(tmp_path))
    assert "does not exist" in check_refused("restore the folder, or skip the base model with --no-base", *evaluate)
    output = output_of(*evaluate, "--no-base", "--limit", "2")
    assert output.splitlines()[0].split() == ["task", "metric", "documents", "value"]
    assert "base" not in output
