"""The harness on a model of ours, beside plain sums of log-probabilities, transformers, and the harness on its own."""

import copy
import json
import math
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from moe.evaluation.extra import require_harness

require_harness()

from lm_eval import evaluator  # noqa: E402
from lm_eval.api.task import ConfigurableTask  # noqa: E402

from moe.evaluation.harness import HarnessModel, evaluate  # noqa: E402
from moe.evaluation.scores import Score  # noqa: E402
from moe.evaluation.task_file import read_tasks  # noqa: E402
from moe.export.base import base_folder, load_base  # noqa: E402
from moe.export.hub import save_checkpoint_as_folder  # noqa: E402
from moe.export.trained_model import TrainedModel  # noqa: E402
from moe.spec.generation import GenerationSpec  # noqa: E402
from moe.tasks.language.generation import generate  # noqa: E402
from moe.tasks.language.generator import LanguageGenerator  # noqa: E402
from tests.evaluation.models import checkpoint_in, documents, task, trained_job, write_lines  # noqa: E402
from tests.refusals import refused  # noqa: E402

MAX_TOKENS = 64
KINDS: dict[str, dict[str, Any]] = {
    "choices": {"metric_list": [{"metric": name} for name in ("acc", "acc_norm", "acc_bytes", "acc_mutual_info")]},
    "shots": {"num_fewshot": 2, "fewshot_split": "test", "description": "Choose.\n\n", "doc_to_target": "answer"},
    "others": {"num_fewshot": 3, "fewshot_split": "train", "doc_to_text": "Q: {{question | trim}}\nA:"},
    "last words": {"output_type": "loglikelihood", "doc_to_target": " {{answer}}", "doc_to_choice": None},
    "texts": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "text", "doc_to_choice": None,
    },
    "answers": {
        "output_type": "generate_until", "doc_to_target": "answer", "doc_to_choice": None,
        "generation_kwargs": {"until": ["\n", " x"], "max_gen_toks": 6},
        "metric_list": [{"metric": name} for name in ("exact_match", "chrf", "ter")],
    },
}  # fmt: skip


class Made:
    """A trained model, its base, and what transformers loads of it."""

    def __init__(self, folder: Path) -> None:
        _, storage = trained_job(folder)
        trained = TrainedModel.load(str(checkpoint_in(storage)))
        assert isinstance(trained.generator, LanguageGenerator)
        self.generator, self.trained, self.folder = trained.generator, trained, folder
        found = base_folder(trained.spec)
        assert found == str(folder / "hub")
        self.base = load_base(found, trained.max_tokens, trained.dtype)
        save_checkpoint_as_folder(str(checkpoint_in(storage)), folder / "out")
        self.tokenizer = AutoTokenizer.from_pretrained(folder / "out")
        self.begins = json.loads((folder / "hub/config.json").read_text())["bos_token_id"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("made"))


def written(folder: Path, *tasks: dict[str, Any], seed: int = 0) -> Path:
    random = Random(seed)
    write_lines(folder / "data.jsonl", documents(random))
    write_lines(folder / "train.jsonl", documents(random))
    for each in tasks:
        each["dataset_kwargs"] = {"data_files": {"test": "data.jsonl", "train": "train.jsonl"}}
    (folder / "tasks.yaml").write_text(yaml.safe_dump(list(tasks), allow_unicode=True))
    return folder / "tasks.yaml"


def of_kind(name: str) -> dict[str, Any]:
    found = {**task(), **copy.deepcopy(KINDS[name]), "task": name.replace(" ", "_")}
    return {key: value for key, value in found.items() if value is not None}


def values(rows: tuple[Score, ...]) -> dict[tuple[str, str], float]:
    return {(row.task, row.metric): row.value for row in rows}


@torch.no_grad()
def log_probability(model: Any, tokens: list[int], from_position: int) -> float:
    """Of the tokens from a position on, given those before: a plain forward pass over at most MAX_TOKENS."""
    read = tokens[:-1][-MAX_TOKENS:]
    logits = model(torch.tensor([read]), use_cache=False).logits[0].double().log_softmax(-1)
    after = tokens[from_position:]
    return float(sum(logits[len(read) - len(after) + at, token] for at, token in enumerate(after)))


@pytest.mark.parametrize("seed", range(3))
def test_accuracy_is_that_of_plain_log_likelihoods(made: Made, tmp_path: Path, seed: int) -> None:
    """By our own sums, and by transformers' logits of the exported folder."""
    path = written(tmp_path, of_kind("choices"), seed=seed)
    rows = documents(Random(seed))
    theirs = AutoModelForCausalLM.from_pretrained(made.folder / "out", dtype=torch.float32).eval()
    counted = {"acc": 0, "acc_norm": 0, "acc_bytes": 0, "acc_mutual_info": 0}
    for row in rows:
        found, of_theirs, alone = [], [], []
        for choice in row["choices"]:
            context = row["question"].rstrip()
            gap = row["question"][len(context) :] + " "
            pair = (context, gap + choice)
            before, whole = (made.tokenizer(each).input_ids for each in (context, "".join(pair)))
            of_theirs.append(log_probability(theirs, whole, len(before)))
            ([likelihood], _) = made.generator.scorer().log_likelihoods([(row["question"], " " + choice)])
            found.append(likelihood.nats)
            alone.append(log_probability(theirs, [made.begins, *made.tokenizer(" " + choice).input_ids], 1))
        assert found == pytest.approx(of_theirs, rel=1e-4)
        scores = {
            "acc": found,
            "acc_norm": [nats / len(choice) for nats, choice in zip(found, row["choices"], strict=True)],
            "acc_bytes": [nats / len(choice.encode()) for nats, choice in zip(found, row["choices"], strict=True)],
            "acc_mutual_info": [nats - other for nats, other in zip(found, alone, strict=True)],
        }  # fmt: skip
        for name, each in scores.items():
            counted[name] += max(range(len(each)), key=each.__getitem__) == row["index"]
    told = values(evaluate(made.generator, read_tasks(path)).rows)
    assert told == {("choices", name): pytest.approx(right / len(rows)) for name, right in counted.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_means_to_us_what_it_means_to_the_harness(made: Made, tmp_path: Path, kind: str) -> None:
    """The harness reads the same keys and files with its own loader and Jinja, and asks the same model."""
    path = written(tmp_path, of_kind(kind))
    ours = evaluate(made.generator, read_tasks(path))
    (config,) = yaml.safe_load(path.read_text())
    files = config["dataset_kwargs"]["data_files"]
    config["dataset_kwargs"] = {
        "data_files": {split: str(tmp_path / name) for split, name in files.items()},
        "cache_dir": str(tmp_path / "cache"),
    }
    theirs = ConfigurableTask(config=config)
    theirs.set_fewshot_seed(1234)
    told = evaluator.evaluate(
        HarnessModel(made.generator), {"tasks": {config["task"]: theirs}}, bootstrap_iters=0, log_samples=False
    )
    found = {name.removesuffix(",none"): value for name, value in told["results"][config["task"]].items()}
    assert ours.rows
    for row in ours.rows:
        assert row.value == pytest.approx(found[row.metric], rel=1e-6), row


def test_whole_texts_are_as_likely_as_plain_passes_say(made: Made, tmp_path: Path) -> None:
    path = written(tmp_path, of_kind("texts"))
    nats, num_bytes, num_words = 0.0, 0, 0
    theirs = AutoModelForCausalLM.from_pretrained(made.folder / "hub", dtype=torch.float32).eval()
    for row in documents(Random(0)):
        tokens = made.tokenizer(row["text"]).input_ids
        for first in range(0, len(tokens), MAX_TOKENS):
            last = min(first + MAX_TOKENS, len(tokens))
            nats += log_probability(theirs, [made.begins, *tokens][: last + 1], first + 1)
        num_bytes += len(row["text"].encode())
        num_words += len(re.split(r"\s+", row["text"]))
    told = values(evaluate(made.base, read_tasks(path)).rows)
    assert told["texts", "bits_per_byte"] == pytest.approx(-nats / math.log(2) / num_bytes, rel=1e-4)
    assert told["texts", "byte_perplexity"] == pytest.approx(math.exp(-nats / num_bytes), rel=1e-4)
    assert told["texts", "word_perplexity"] == pytest.approx(math.exp(-nats / num_words), rel=1e-3)


def test_answers_are_what_the_model_generates(made: Made, tmp_path: Path) -> None:
    """By one prompt at a time, cut to what leaves room for the answer, ended before the first of `until`."""
    path, rows = written(tmp_path, of_kind("answers")), documents(Random(0))
    for at, row in enumerate(rows):
        prompt = made.tokenizer(row["question"]).input_ids[-(MAX_TOKENS - 6) :]
        tokens = generate(made.trained.model, [prompt], GenerationSpec(max_tokens=6), made.generator._ends)[0]
        answer = re.split("\n| x", made.tokenizer.decode(tokens, skip_special_tokens=True))[0]
        row["answer"] = answer if at % 3 else f"not {answer}"
    write_lines(tmp_path / "data.jsonl", rows)
    told = values(evaluate(made.generator, read_tasks(path)).rows)
    assert told["answers", "exact_match"] == pytest.approx(2 / 3)


def test_a_text_too_unlikely_for_a_number_is_told(made: Made, tmp_path: Path) -> None:
    path = written(tmp_path, of_kind("texts"))
    write_lines(tmp_path / "data.jsonl", [{"text": "".join(chr(200 + at) for at in range(900))}])
    with refused("not_finite", "metric_list", "perplexity"):
        evaluate(made.generator, read_tasks(path))
    path = written(tmp_path, {**of_kind("texts"), "metric_list": [{"metric": "bits_per_byte"}]})
    assert evaluate(made.generator, read_tasks(path)).rows[0].value > 0


def test_contexts_that_lost_their_beginning_are_counted(made: Made, tmp_path: Path) -> None:
    path = written(tmp_path, of_kind("last words"), of_kind("answers"))
    expected = 0
    for row in documents(Random(0)):
        read = made.tokenizer(f"{row['question']} {row['answer']}").input_ids[:-1]
        prompt = made.tokenizer(row["question"]).input_ids
        expected += (len(read) > MAX_TOKENS) + (len(prompt) > MAX_TOKENS - 6)
    assert expected > 0
    assert evaluate(made.generator, read_tasks(path)).num_cut == expected


def test_a_choice_that_no_text_leaves_room_for_is_told(made: Made, tmp_path: Path) -> None:
    path = written(tmp_path, of_kind("choices"))
    rows = [{"question": "Which?", "choices": ["a", "b " * 200], "index": 0}]
    write_lines(tmp_path / "data.jsonl", rows)
    with refused("too_large", "continuation"):
        evaluate(made.generator, read_tasks(path))
    with refused("empty", "continuation", ""):
        made.generator.scorer().log_likelihoods([("Which?", "")])
