"""Task files evaluated by Shardyard and by the harness on the same model. Likelihoods and texts of the model are
compared with the harness's own model class in test_beside_the_harness.py."""

import copy
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from moe.evaluation.extra import require_harness

require_harness()

from lm_eval import evaluator  # noqa: E402
from lm_eval.api.task import ConfigurableTask  # noqa: E402

from moe.evaluation.harness import HarnessModel, evaluate  # noqa: E402
from moe.evaluation.task_file import read_tasks  # noqa: E402
from moe.export.base import base_folder  # noqa: E402
from moe.export.trained_model import TrainedModel  # noqa: E402
from moe.tasks.language.generator import LanguageGenerator  # noqa: E402
from tests.evaluation.models import checkpoint_in, documents, task, trained_job, write_lines  # noqa: E402
from tests.refusals import expect_problem  # noqa: E402

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


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> LanguageGenerator:
    """Generator of a model trained from a folder."""
    folder = tmp_path_factory.mktemp("trained")
    _, storage = trained_job(folder)
    model = TrainedModel.load(str(checkpoint_in(storage)))
    assert base_folder(model.spec) == str(folder / "hub")
    return model.generator


def write_task_file(folder: Path, *tasks: dict[str, Any], seed: int = 0) -> Path:
    random = Random(seed)
    write_lines(folder / "data.jsonl", documents(random))
    write_lines(folder / "train.jsonl", documents(random))
    for entry in tasks:
        entry["dataset_kwargs"] = {"data_files": {"test": "data.jsonl", "train": "train.jsonl"}}
    (folder / "tasks.yaml").write_text(yaml.safe_dump(list(tasks), allow_unicode=True))
    return folder / "tasks.yaml"


def of_kind(name: str) -> dict[str, Any]:
    fields = {**task(), **copy.deepcopy(KINDS[name]), "task": name.replace(" ", "_")}
    return {key: value for key, value in fields.items() if value is not None}


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_means_to_us_what_it_means_to_the_harness(generator, tmp_path, kind) -> None:
    """The harness reads the same keys and files with its own loader and Jinja, and queries the same model."""
    path = write_task_file(tmp_path, of_kind(kind))
    result = evaluate(generator, read_tasks(path))
    (config,) = yaml.safe_load(path.read_text())
    files = config["dataset_kwargs"]["data_files"]
    config["dataset_kwargs"] = {
        "data_files": {split: str(tmp_path / name) for split, name in files.items()},
        "cache_dir": str(tmp_path / "cache"),
    }
    reference_task = ConfigurableTask(config=config)
    reference_task.set_fewshot_seed(1234)
    reference = evaluator.evaluate(
        HarnessModel(generator), {"tasks": {config["task"]: reference_task}}, bootstrap_iters=0, log_samples=False
    )
    expected = {name.removesuffix(",none"): value for name, value in reference["results"][config["task"]].items()}
    assert result.rows
    for row in result.rows:
        assert row.value == pytest.approx(expected[row.metric], rel=1e-6), row


def test_a_text_too_unlikely_for_a_number_is_told(generator: LanguageGenerator, tmp_path: Path) -> None:
    path = write_task_file(tmp_path, of_kind("texts"))
    write_lines(tmp_path / "data.jsonl", [{"text": "".join(chr(200 + offset) for offset in range(900))}])
    with expect_problem("not_finite", "metric_list", "perplexity"):
        evaluate(generator, read_tasks(path))
    path = write_task_file(tmp_path, {**of_kind("texts"), "metric_list": [{"metric": "bits_per_byte"}]})
    assert evaluate(generator, read_tasks(path)).rows[0].value > 0


def test_contexts_that_lost_their_beginning_are_counted(generator: LanguageGenerator, tmp_path: Path) -> None:
    path = write_task_file(tmp_path, of_kind("last words"), of_kind("answers"))
    expected, tokenizer = 0, generator._tokenizer
    for row in documents(Random(0)):
        read = tokenizer.encode(f"{row['question']} {row['answer']}")[:-1]
        expected += (len(read) > MAX_TOKENS) + (len(tokenizer.encode(row["question"])) > MAX_TOKENS - 6)
    assert expected > 0
    assert evaluate(generator, read_tasks(path)).num_cut == expected


def test_a_choice_that_no_text_leaves_room_for_is_told(generator: LanguageGenerator, tmp_path: Path) -> None:
    path = write_task_file(tmp_path, of_kind("choices"))
    rows = [{"question": "Which?", "choices": ["a", "b " * 200], "index": 0}]
    write_lines(tmp_path / "data.jsonl", rows)
    with expect_problem("too_large", "continuation"):
        evaluate(generator, read_tasks(path))
    with expect_problem("empty", "continuation", ""):
        generator.scorer().log_likelihoods([("Which?", "")])
