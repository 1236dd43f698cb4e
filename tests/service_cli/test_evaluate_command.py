"""`evaluate` as it is typed: a job's model beside its base, in words and as JSON, with no network; what it refuses."""

import json
import math
import subprocess
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from moe.export.base import load_base
from moe.export.trained_model import TrainedModel
from moe.tasks.language.generator import LanguageGenerator
from tests.evaluation.models import checkpoint_in, documents, task, trained_job, write_lines
from tests.service.checkpoints import commit
from tests.service.control_plane import spec as translation_job
from tests.service_cli.command import COMMAND, ROOT, environment, shardyard

EXAMPLE = ROOT / "examples/evaluate/tasks.yaml"
ROWS = documents(Random(4))
NO_NETWORK = """
import socket
def refused(*_, **__):
    raise AssertionError('a connection was asked for')
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refused
"""


def typed(folder: Path, *arguments: str | Path, customize: str = NO_NETWORK) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, which can reach nobody."""
    (folder / "sitecustomize.py").write_text(customize)
    path = f"{folder}:{environment()['PYTHONPATH']}"
    return subprocess.run(
        [*COMMAND, "evaluate", *map(str, arguments)], capture_output=True, text=True, check=False, cwd=folder,
        env=environment(PYTHONPATH=path, OMP_NUM_THREADS="1"),
    )  # fmt: skip


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job that trained an adapter; `hub` in it is what that began with."""
    folder = tmp_path_factory.mktemp("adapted")
    trained_job(folder, rank=2)
    return folder


def write_tasks(folder: Path, **keys: Any) -> Path:
    write_lines(folder / "data.jsonl", ROWS)
    (folder / "tasks.yaml").write_text(yaml.safe_dump(task(**keys)))
    return folder / "tasks.yaml"


def accuracy(generator: object, number: int) -> float:
    """By log-likelihoods of our own."""
    assert isinstance(generator, LanguageGenerator)
    right = 0
    for row in ROWS[:number]:
        pairs = [(row["question"], f" {each}") for each in row["choices"]]
        found, _ = generator.scorer().log_likelihoods(pairs)
        right += max(range(len(found)), key=lambda at: found[at].nats) == row["index"]
    return right / number


@pytest.mark.slow
def test_a_job_beside_what_it_began_with(adapted: Path, tmp_path: Path) -> None:
    tasks, checkpoint = write_tasks(tmp_path), checkpoint_in(adapted / "storage")
    done = typed(tmp_path, adapted / "storage", "--tasks", tasks, "--limit", "10", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    trained = TrainedModel.load(str(checkpoint))
    expected = accuracy(trained.generator, 10)
    of_base = accuracy(load_base(str(adapted / "hub"), trained.max_tokens, trained.dtype), 10)
    first = told["scores"][0]
    assert (first["task"], first["metric"], first["num_documents"]) == ("choices", "acc", 10)
    assert first["value"] == pytest.approx(expected)
    assert first["stderr"] == pytest.approx(math.sqrt(expected * (1 - expected) / 9))
    assert first["base"]["value"] == pytest.approx(of_base)
    assert first["difference"] == pytest.approx(expected - of_base)
    assert (told["base"], told["checkpoint"]) == (str(adapted / "hub"), str(checkpoint))
    _, num_cut = trained.generator.scorer().log_likelihoods(  # type: ignore[attr-defined]
        [(row["question"], f" {each}") for row in ROWS[:10] for each in row["choices"]]
    )
    assert told["contexts_cut"] == num_cut > 0


@pytest.mark.slow
def test_an_exported_folder_on_the_example_in_words(adapted: Path, tmp_path: Path) -> None:
    exported = tmp_path / "exported"
    done = shardyard("export", adapted / "storage", exported)
    assert done.returncode == 0, done.stderr
    done = typed(tmp_path, exported, "--tasks", EXAMPLE)
    assert (done.returncode, done.stderr) == (0, "")
    head, *lines = (line.split() for line in done.stdout.splitlines())
    assert head == ["task", "metric", "documents", "value", "base", "difference"]
    assert [line[:4] for line in lines[:3]] == [
        ["next_line", "acc", "↑", "8"], ["next_line", "acc_norm", "↑", "8"], ["source", "bits_per_byte", "↓", "8"]
    ]  # fmt: skip
    value, _, stderr, base, _, _, difference = lines[0][4:]
    assert 0 <= float(value) <= 1
    assert float(difference) == pytest.approx(float(value) - float(base), abs=1e-4)
    assert float(stderr) == pytest.approx(math.sqrt(float(value) * (1 - float(value)) / 7), abs=1e-4)
    assert "".join(lines[3]) == f"base:{adapted / 'hub'}"


def test_what_it_refuses_and_where_it_fails(adapted: Path, tmp_path: Path) -> None:
    tasks, storage = write_tasks(tmp_path), adapted / "storage"
    done = typed(tmp_path, storage, "--tasks", tasks, customize="import sys; sys.modules['lm_eval'] = None")
    said = "evaluation requires lm-evaluation-harness, which is not installed: pip install 'shardyard[evaluate]'"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"shardyard: {said}\n")

    commit(tmp_path / "translates", 3, spec=translation_job())
    broken = tmp_path / "broken.yaml"
    broken.write_text("task: !function code.f\n")
    for arguments, code, words in (
        (["--tasks", str(tmp_path / "none.yaml")], 2, "none.yaml: No such file or directory"),
        (["--tasks", str(broken)], 2, "broken.yaml, line 1 (='!function') is a tag, which tasks may not have"),
        (["--tasks", str(tasks), "--limit", "0"], 2, "Invalid value for '--limit': must be greater"),
        ([], 2, "'--tasks'"),
    ):
        done = shardyard("evaluate", storage, *arguments)
        assert (done.returncode, done.stdout) == (code, "")
        assert words in done.stderr
    done = shardyard("evaluate", tmp_path / "translates", "--tasks", tasks)
    assert (done.returncode, done.stdout) == (2, "")
    assert "is a translation model, which does not evaluate tasks; use 'shardyard translate" in done.stderr

    answers = {"output_type": "generate_until", "doc_to_choice": None, "doc_to_target": "answer"}
    long = write_tasks(tmp_path, **answers, generation_kwargs={"max_gen_toks": 64})
    done = shardyard("evaluate", storage, "--tasks", long, "--no-base")
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        "choices: generation_kwargs.max_gen_toks (=64) must be below "
        "64, the length of the texts that the model was trained on" in done.stderr
    )


@pytest.mark.slow
def test_a_base_that_is_gone(tmp_path: Path) -> None:
    """A job that trained all weights does without it."""
    _, storage = trained_job(tmp_path)
    (tmp_path / "hub").rename(tmp_path / "elsewhere")
    tasks = write_tasks(tmp_path)
    done = shardyard("evaluate", storage, "--tasks", tasks)
    assert (done.returncode, done.stdout) == (2, "")
    assert "does not exist" in done.stderr
    assert "restore the folder, or skip the base model with --no-base" in done.stderr
    done = shardyard("evaluate", storage, "--tasks", tasks, "--no-base", "--limit", "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0].split() == ["task", "metric", "documents", "value"]
    assert "base" not in done.stdout
