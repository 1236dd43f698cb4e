"""`generate`, `translate` and `export` as they are typed: streams, JSON, standard input, misuse, what is broken off."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from moe.export.load import load_trained
from moe.spec.generation import GenerationSpec
from tests.processes import heed_ctrl_c
from tests.service.checkpoints import commit
from tests.service.control_plane import spec as translation_job
from tests.service_cli.command import COMMAND, environment, shardyard
from tests.unit.language_runs import documents, language_job
from tests.unit.train_runs import RequestAfter, corpus, job, run

PROMPT = "def test_"


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a language model's job of a few steps, of Mixtral's shape."""
    folder = tmp_path_factory.mktemp("language")
    experts = {
        "num_experts": 4, "hidden_dim": 24, "router": "softmax_topk", "top_k": 2, "activation": "swiglu",
        "group_tokens": 128,
    }  # fmt: skip
    spec = language_job(documents(folder / "data"), model={"moe": experts})
    run(spec, folder / "storage", folder / "cache", control=RequestAfter("pause", 3))
    return folder / "storage"


def expected(storage: Path, prompt: str, spec: GenerationSpec) -> str:
    (checkpoint,) = (each for each in storage.glob("checkpoints/step-*3.a*") if each.is_dir())
    return load_trained(str(checkpoint)).generate([prompt], spec)[0]


def test_it_goes_on_from_a_text_as_the_options_say(storage: Path) -> None:
    done = shardyard("generate", storage, PROMPT, "--max-tokens", "12")
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected(storage, PROMPT, GenerationSpec(max_tokens=12)) + "\n"

    given = "import os\n\n"
    done = shardyard(
        "generate", storage, "--max-tokens=12", "--temperature=0.9", "--top-k=30", "--top-p=0.9", "--seed=5", "--json",
        "--stop=never", "--stop=ever", stdin=given,
    )  # fmt: skip
    told = json.loads(done.stdout)
    drawn = GenerationSpec(max_tokens=12, temperature=0.9, top_k=30, top_p=0.9, seed=5, stop=("never", "ever"))
    assert (told["prompt"], told["text"]) == (given, expected(storage, given, drawn))
    assert told["reason"] in ("end", "max_tokens", "stop")
    assert told["checkpoint"].startswith(str(storage))


def test_options_are_named_as_they_are_typed(tmp_path: Path) -> None:
    for given, said in (
        (["--top-k", "3"], "--top-k (=3) has no effect on greedy decoding (temperature is 0)"),
        (["--seed", "3"], "--seed (=3) has no effect on greedy decoding (temperature is 0)"),
        (["--length-penalty", "1"], "--length-penalty (=1.0) has no effect without beam search"),
        (["--beams", "100"], "--beams (=100) must be less than or equal to 64"),
        (["--beams", "4", "--temperature", "1"], "--beams (=4) has no effect on sampling (temperature is"),
    ):
        done = shardyard("generate", tmp_path, "x", *given)
        assert (done.returncode, done.stdout) == (2, "")
        assert said in done.stderr


@pytest.mark.slow
def test_a_job_of_another_kind_is_told_its_command_before_torch_is_loaded(tmp_path: Path) -> None:
    commit(tmp_path / "translates", 3, spec=translation_job())
    language = language_job(documents(tmp_path / "data")).model_dump(mode="json")
    commit(tmp_path / "generates", 3, spec=language)
    module = {**translation_job(), "model": {"kind": "module", "build": "mine:build"}}
    commit(tmp_path / "mine", 3, spec=module)
    without_torch = {"PYTHONPATH": f"{tmp_path}:{environment()['PYTHONPATH']}"}
    (tmp_path / "torch.py").write_text("raise AssertionError('torch was loaded')\n")
    for command, folder, said in (
        (
            "generate",
            "translates",
            "is a translation model, which does not generate; use 'shardyard translate {} TEXT'",
        ),
        ("translate", "generates", "is a language model, which does not translate; use 'shardyard generate {} PROMPT'"),
        ("generate", "mine", "is a user's module, which no command uses; 'shardyard download {}' fetches its"),
    ):
        job = str(tmp_path / folder)
        done = subprocess.run(
            [*COMMAND, command, job, "x"], capture_output=True, text=True, check=False, env=environment(**without_torch)
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert f"{job} {said.format(job)}" in done.stderr


@pytest.mark.slow
def test_a_reader_that_has_gone_and_ctrl_c_end_it_without_a_word(storage: Path) -> None:
    for end in ("closed", "interrupted"):
        with subprocess.Popen(
            [*COMMAND, "generate", str(storage), PROMPT, "--max-tokens", "20000"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), preexec_fn=heed_ctrl_c,
        ) as generating:  # fmt: skip
            assert generating.stdout is not None
            assert generating.stderr is not None
            assert os.read(generating.stdout.fileno(), 1), "it comes as it is made"
            if end == "closed":
                generating.stdout.close()
            else:
                generating.send_signal(signal.SIGINT)
            said = generating.stderr.read().decode()
            assert generating.wait() == (1 if end == "closed" else 130), said
        assert said == ""


@pytest.mark.slow
def test_translations_by_a_search(tmp_path: Path) -> None:
    run(job(corpus(tmp_path), train={"num_steps": 2}), tmp_path / "storage", tmp_path / "cache")
    (checkpoint,) = (each for each in (tmp_path / "storage/checkpoints").glob("step-*2.a*") if each.is_dir())
    trained = load_trained(str(checkpoint))
    done = shardyard("translate", tmp_path / "storage", "ein Wort", "--beams=3", "--length-penalty=1", "--json")
    assert done.returncode == 0, done.stderr
    spec = GenerationSpec(max_tokens=32, num_beams=3, length_penalty=1.0)
    assert json.loads(done.stdout)["translation"] == trained.generate(["ein Wort"], spec)[0]
    done = shardyard("translate", tmp_path / "storage", "ein Wort", "--length-penalty=1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--length-penalty (=1.0) has no effect without beam search" in done.stderr


@pytest.mark.sample(1)
@pytest.mark.parametrize(("format", "number"), [("huggingface", signal.SIGTERM), ("shardyard", signal.SIGINT)])
def test_an_export_that_is_broken_off_leaves_nothing(
    storage: Path, tmp_path: Path, format: str, number: signal.Signals
) -> None:
    for attempt in range(20):
        target = tmp_path / f"exported-{attempt}"
        with subprocess.Popen(
            [*COMMAND, "export", storage, target, "--format", format], stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env=environment(), preexec_fn=heed_ctrl_c,
        ) as exporting:  # fmt: skip
            while exporting.poll() is None and not [*tmp_path.iterdir()]:
                pass
            exporting.send_signal(signal.SIGSTOP)  # within it, if it is not over
            is_over = target.exists() or exporting.poll() is not None
            exporting.send_signal(number)
            exporting.send_signal(signal.SIGCONT)
            said = exporting.communicate()
        if not is_over:
            assert (exporting.returncode, *said) == (128 + number, b"", b"")
            assert not [*tmp_path.iterdir()]
            return
        assert exporting.returncode == 0, said
        shutil.rmtree(target)
    pytest.fail("it was over each time before it could be broken off")
