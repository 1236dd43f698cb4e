"""Adapter to lm-evaluation-harness (github.com/EleutherAI/lm-evaluation-harness).

The harness builds prompts and few-shot contexts, requests log-likelihoods and generated texts, and computes metrics.
Import only after `moe.evaluation.extra.require_harness`.
"""

import io
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any

import datasets
from lm_eval import evaluator
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.task import ConfigurableTask

from moe.data.conversations.conversation import Conversation
from moe.data.conversations.template import ChatTemplate
from moe.evaluation.documents import TaskDocument
from moe.evaluation.scores import Score, TaskScores
from moe.evaluation.task_file import EvaluationTask
from moe.evaluation.task_spec import METRICS, GenerationKwargs, MetricSpec, TaskSpec
from moe.spec import Problem, SpecError, spec_error
from moe.spec.generation import GenerationSpec
from moe.tasks.language.generator import LanguageGenerator

_FEWSHOT_SEED = 1234
"""The harness's default."""
_RESAMPLINGS = 1000
"""Bootstrap resamples for standard errors without a formula, accurate to a few percent."""


@dataclass(frozen=True)
class ChatPrompts:
    """Contexts as conversations: the description is the system message."""

    template: ChatTemplate
    fewshot_as_multiturn: bool = True
    """Whether few-shot examples are turns of their own, instead of a part of the user's message."""


def evaluate(
    generator: LanguageGenerator,
    tasks: Sequence[EvaluationTask],
    limit: int | None = None,
    chat: ChatPrompts | None = None,
) -> TaskScores:
    """Scores of a model on tasks, or on the first `limit` documents of each; with `chat`, of prompts written by a chat
    template.

    Raises SpecError for a task that does not fit this model.
    """
    _require_room(generator.max_tokens, tasks)
    if chat is not None:
        _require_prompts(tasks)
    model = HarnessModel(generator, None if chat is None else chat.template)
    with _quiet():
        harness_tasks = {task.spec.task: _harness_task(task) for task in tasks}
        try:
            results = evaluator.evaluate(
                model, {"tasks": harness_tasks, "groups": {}}, limit=limit, bootstrap_iters=_RESAMPLINGS,
                log_samples=False, apply_chat_template=chat is not None,
                fewshot_as_multiturn=chat is not None and chat.fewshot_as_multiturn,
            )  # fmt: skip
        except OverflowError:
            rule = "overflows: the texts are too unlikely for this model"
            raise spec_error("not_finite", "metric_list", "perplexity", rule, "use bits_per_byte instead") from None
    return TaskScores(tuple(row for task in tasks for row in _rows(task, results)), model.num_cut)


class HarnessModel(LM):
    """Language model as the harness's `LM`."""

    tokenizer_name = ""
    """Key of the harness's cache of requests, which is off."""

    def __init__(self, generator: LanguageGenerator, template: ChatTemplate | None = None) -> None:
        """`template`: contexts are those of `apply_chat_template`."""
        super().__init__()
        self._generator, self._scorer, self._template = generator, generator.scorer(), template
        self.num_cut = 0
        """Contexts truncated so far."""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Messages as JSON: `contexts` renders all of them at once, as each rendering takes a process."""
        assert add_generation_prompt, "tasks have no gen_prefix"
        return json.dumps(chat_history)

    def contexts(self, requests: Sequence[Instance]) -> list[str]:
        """Contexts of requests; conversations are rendered by the template. An empty context stays empty."""
        contexts = [request.args[0] for request in requests]
        if self._template is None:
            return contexts
        histories = [context for context in dict.fromkeys(contexts) if context]
        prompts = self._template.render_prompts([Conversation(tuple(json.loads(history))) for history in histories])
        prompt_by_history = {"": "", **dict(zip(histories, prompts, strict=True))}
        return [prompt_by_history[context] for context in contexts]

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        continuations = [request.args[1] for request in requests]
        likelihoods, num_cut = self._scorer.log_likelihoods(
            list(zip(self.contexts(requests), continuations, strict=True)), verbatim=self._template is not None
        )
        self.num_cut += num_cut
        return [(likelihood.nats, likelihood.is_greedy) for likelihood in likelihoods]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        return self._scorer.rolling([text for (text,) in (request.args for request in requests)])

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """`args` of each request: context, `generation_kwargs`."""
        answers, kinds, contexts = [""] * len(requests), dict[GenerationSpec, list[int]](), self.contexts(requests)
        for index, request in enumerate(requests):
            kinds.setdefault(GenerationKwargs(**request.args[1]).spec(""), []).append(index)
        for spec, numbers in kinds.items():
            texts, num_cut = self._generator.generate_truncated(
                [contexts[index] for index in numbers], spec, verbatim=self._template is not None
            )
            self.num_cut += num_cut
            for index, text in zip(numbers, texts, strict=True):
                answers[index] = text
        return answers


def _require_room(max_tokens: int, tasks: Sequence[EvaluationTask]) -> None:
    """Raise SpecError, before any computation, for tasks whose answers leave no room for a prompt."""
    rule = f"must be below {max_tokens:,}, the length of the texts that the model was trained on"
    problems = [
        Problem(
            "out_of_range",
            f"{task.spec.task}: generation_kwargs.max_gen_toks",
            task.spec.generation.max_tokens,
            rule,
            "lower it",
        )
        for task in tasks
        if task.spec.output_type == "generate_until" and task.spec.generation.max_tokens >= max_tokens
    ]
    if problems:
        raise SpecError(problems)


def _require_prompts(tasks: Sequence[EvaluationTask]) -> None:
    """Raise SpecError for tasks whose texts have no prompt that a chat template could write."""
    problems = [
        Problem("not_applicable", f"{task.spec.task}: output_type", task.spec.output_type,
                "has no prompt for the chat template", "evaluate this task without chat")
        for task in tasks
        if task.spec.output_type == "loglikelihood_rolling"
    ]  # fmt: skip
    if problems:
        raise SpecError(problems)


def _harness_task(task: EvaluationTask) -> ConfigurableTask:
    """Task in the harness's form: templates replaced by column names, data in memory."""
    spec = task.spec
    documents = {"evaluated": _data_set(task.documents.test_documents)}
    examples = None
    if spec.num_fewshot:
        examples = "evaluated" if spec.fewshot_split == spec.split else "examples"
        documents.setdefault(examples, _data_set(task.documents.examples))
    config: dict[str, Any] = {
        "task": spec.task, "custom_dataset": lambda **_: documents, "test_split": "evaluated",
        "fewshot_split": examples, "num_fewshot": spec.num_fewshot, "output_type": spec.output_type,
        "doc_to_text": "text", "doc_to_target": "target",
        "doc_to_choice": None if spec.doc_to_choice is None else "choices",
        "description": "description", "target_delimiter": spec.target_delimiter,
        "fewshot_delimiter": spec.fewshot_delimiter, "metric_list": [_metric(spec, metric) for metric in spec.metrics],
    }  # fmt: skip
    if spec.output_type == "generate_until":
        generation_kwargs = (spec.generation_kwargs or GenerationKwargs()).model_dump(mode="json", exclude_none=True)
        config["generation_kwargs"] = {**generation_kwargs, "until": list(spec.generation.stop)}
    harness_task = ConfigurableTask(config=config)
    harness_task.set_fewshot_seed(_FEWSHOT_SEED)
    return harness_task


def _data_set(documents: Sequence[TaskDocument]) -> datasets.Dataset:
    return datasets.Dataset.from_list([
        {"text": document.text, "target": document.target, "choices": list(document.choices),
         "description": document.description}
        for document in documents
    ])  # fmt: skip


def _metric(spec: TaskSpec, metric: MetricSpec) -> dict[str, Any]:
    aggregation, higher_is_better = METRICS[spec.output_type][metric.metric]
    config = {"metric": metric.metric, "aggregation": aggregation, "higher_is_better": higher_is_better}
    if metric.metric == "exact_match":
        config |= {"ignore_case": metric.ignore_case, "ignore_punctuation": metric.ignore_punctuation}
    return config


def _rows(task: EvaluationTask, results: Any) -> Iterator[Score]:
    name = task.spec.task
    task_results = results["results"][name]
    for metric in task.spec.metrics:
        stderr = task_results.get(f"{metric.metric}_stderr,none")
        yield Score(
            name, metric.metric, float(task_results[f"{metric.metric},none"]),
            float(stderr) if isinstance(stderr, int | float) else None,
            METRICS[task.spec.output_type][metric.metric][1], results["n-samples"][name]["effective"],
        )  # fmt: skip


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the harness's output and log messages: stdout is for results.

    Also disables its resampling processes, each of which would copy this process and its model.
    """
    log, disable_multiproc = logging.getLogger("lm_eval"), os.environ.get("DISABLE_MULTIPROC")
    level = log.level
    log.setLevel(logging.ERROR)
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        log.setLevel(level)
        if disable_multiproc is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = disable_multiproc
