"""Tasks with contexts written by a chat template, compared with lm-evaluation-harness's own model class."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moe.evaluation.extra import require_harness

require_harness()

from lm_eval import evaluator  # noqa: E402
from lm_eval.api.task import ConfigurableTask  # noqa: E402

from moe.evaluation.harness import ChatPrompts, HarnessModel, evaluate  # noqa: E402
from moe.evaluation.task_file import EvaluationTask, read_tasks  # noqa: E402
from moe.export.base import load_base  # noqa: E402
from moe.tasks.language.generator import LanguageGenerator  # noqa: E402
from tests.evaluation.models import task  # noqa: E402
from tests.evaluation.test_harness import of_kind, write_task_file  # noqa: E402
from tests.interchange import tiny  # noqa: E402
from tests.refusals import expect_problem  # noqa: E402
from tests.unit import chats  # noqa: E402
from tests.unit.published_templates import read_template  # noqa: E402

MAX_TOKENS = 512
KINDS = ("choices", "shots", "others", "last words", "answers")
TEMPLATES = {
    "chatml": chats.STRUCTURES["chatml"].source, "llama": chats.STRUCTURES["llama"].source,
    **{name: read_template(name) for name in ("qwen3", "gemma3", "phi3", "deepseek_r1_distill", "cohere2")},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a tokenizer; templates are added by tests."""
    folder = tmp_path_factory.mktemp("hub")
    model = tiny.their_model("qwen3_moe", vocab_size=480)
    with torch.no_grad():
        model.get_parameter("lm_head.weight").mul_(0.02)
    tiny.folder_of(model, folder, dtype=torch.float32)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "config.json").write_text(json.dumps({**tiny.config_of(folder), "eos_token_id": 1}))
    return folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    from lm_eval.models.huggingface import HFLM  # takes seconds, in each process that collects this file

    for name, content in chats.tokenizer_files(TEMPLATES["chatml"]).items():
        (folder / name).write_bytes(content)
    return HFLM(pretrained=str(folder), device="cpu", dtype="float32", max_length=MAX_TOKENS, batch_size=1)


def generator_with(folder: Path, template: str) -> LanguageGenerator:
    (folder / "chat_template.jinja").write_text(template)
    return load_base(str(folder), MAX_TOKENS, "float32")


def harness_tasks(path: Path) -> Iterator[tuple[str, ConfigurableTask]]:
    """The tasks of a file, as the harness reads them."""
    for config in json.loads(
        json.dumps([entry.spec.model_dump(mode="json", exclude_unset=True) for entry in read(path)])
    ):
        files = config["dataset_kwargs"]["data_files"]
        config["dataset_kwargs"] = {
            "data_files": {split: str(path.parent / name) for split, name in files.items()},
            "cache_dir": str(path.parent / "cache"),
        }
        reference_task = ConfigurableTask(config=config)
        reference_task.set_fewshot_seed(1234)
        yield config["task"], reference_task


def read(path: Path) -> list[EvaluationTask]:
    return list(read_tasks(path))


@pytest.mark.sample(1)
@pytest.mark.parametrize("template", TEMPLATES)
def test_contexts_are_those_of_the_harness(template: str, folder: Path, reference: Any, tmp_path: Path) -> None:
    path = write_task_file(tmp_path, *(of_kind(kind) for kind in ("shots", "others", "answers")))
    generator = generator_with(folder, TEMPLATES[template])
    model = HarnessModel(generator, generator.chat_template())
    reference.tokenizer.chat_template = TEMPLATES[template]
    for _, reference_task in harness_tasks(path):
        for as_multiturn in (True, False):
            instances, expected = (
                _requests(reference_task, apply, as_multiturn)
                for apply in (model.apply_chat_template, reference.apply_chat_template)
            )
            assert model.contexts(instances) == [request.args[0] for request in expected]
            assert [request.args[1] for request in instances] == [request.args[1] for request in expected]
            assert len({request.args[0] for request in expected}) > 5


def _requests(reference_task: ConfigurableTask, apply: Any, as_multiturn: bool) -> Any:
    reference_task.set_fewshot_seed(1234)
    reference_task.build_all_requests(
        apply_chat_template=True, chat_template=apply, fewshot_as_multiturn=as_multiturn, tokenizer_name=""
    )
    return list(reference_task.instances)


@pytest.mark.slow
@pytest.mark.parametrize("as_multiturn", [True, False])
@pytest.mark.parametrize("template", ["chatml", "llama"])
def test_scores_are_those_of_the_harness(
    template: str, as_multiturn: bool, folder: Path, reference: Any, tmp_path: Path
) -> None:
    path = write_task_file(tmp_path, *map(of_kind, KINDS))
    generator = generator_with(folder, TEMPLATES[template])
    scores = evaluate(generator, read(path), chat=ChatPrompts(generator.chat_template(), as_multiturn))
    reference.tokenizer.chat_template = TEMPLATES[template]
    results = evaluator.evaluate(
        reference, {"tasks": dict(harness_tasks(path))}, bootstrap_iters=0, log_samples=False,
        apply_chat_template=True, fewshot_as_multiturn=as_multiturn,
    )["results"]  # fmt: skip
    plain = evaluate(generator, read(path))
    assert len(scores.rows) > 8
    for row in scores.rows:
        assert row.value == pytest.approx(results[row.task][f"{row.metric},none"], rel=1e-4), row
    assert [row.value for row in plain.rows] != [row.value for row in scores.rows]

    model = HarnessModel(generator, generator.chat_template())
    for name, reference_task in harness_tasks(path):
        instances, expected = (
            _requests(reference_task, apply, as_multiturn)
            for apply in (model.apply_chat_template, reference.apply_chat_template)
        )
        if name == "answers":
            assert model.generate_until(instances) == reference.generate_until(expected)
        else:
            likelihoods = list(zip(model.loglikelihood(instances), reference.loglikelihood(expected), strict=True))
            assert all(ours == (pytest.approx(theirs[0], rel=1e-4), theirs[1]) for ours, theirs in likelihoods)


def test_what_a_template_cannot_write_is_refused(folder: Path, reference: Any, tmp_path: Path) -> None:
    generator = generator_with(folder, TEMPLATES["chatml"])
    path = write_task_file(tmp_path, of_kind("texts"))
    with expect_problem("not_applicable", "texts: output_type", "loglikelihood_rolling"):
        evaluate(generator, read(path), chat=ChatPrompts(generator.chat_template()))
    no_system = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{% endfor %}"
    )
    generator = generator_with(folder, no_system)
    path = write_task_file(tmp_path, task(description="Choose."))
    with expect_problem("unsupported", "chat", None):
        evaluate(generator, read(path), chat=ChatPrompts(generator.chat_template()))
