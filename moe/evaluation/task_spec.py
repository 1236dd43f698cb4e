"""Evaluation task spec: data files, prompt templates and metrics, with the keys of lm-evaluation-harness.

Only keys that are pure data are supported.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from moe.evaluation.template import REMEDY, RULE, NotPlain, Template
from moe.spec.base import Count, CountOrZero, NonNegative, Positive, Spec, Text
from moe.spec.errors import Problem, SpecError, spec_error
from moe.spec.generation import GenerationSpec

OutputType = Literal["loglikelihood", "multiple_choice", "loglikelihood_rolling", "generate_until"]

METRICS: Mapping[str, Mapping[str, tuple[str, bool]]] = {
    "loglikelihood": {"perplexity": ("perplexity", False), "acc": ("mean", True)},
    "multiple_choice": {
        "acc": ("mean", True),
        "acc_norm": ("mean", True),
        "acc_bytes": ("mean", True),
        "acc_mutual_info": ("mean", True),
    },
    "loglikelihood_rolling": {
        "word_perplexity": ("weighted_perplexity", False),
        "byte_perplexity": ("weighted_perplexity", False),
        "bits_per_byte": ("bits_per_byte", False),
    },
    "generate_until": {
        "exact_match": ("mean", True),
        "bleu": ("bleu", True),
        "chrf": ("chrf", True),
        "ter": ("ter", False),
    },
}
"""Metrics by output type: (aggregation in the harness, higher is better)."""
_USUAL_METRICS = {
    "loglikelihood": ("perplexity", "acc"),
    "multiple_choice": ("acc", "acc_norm"),
    "loglikelihood_rolling": ("word_perplexity", "byte_perplexity", "bits_per_byte"),
    "generate_until": ("exact_match",),
}
"""Default metrics, as in the harness."""
MAX_GEN_TOKS = 256
"""Default limit of generated tokens, as in the harness."""

Path = Annotated[Text, Field(min_length=1, max_length=1000)]
Split = Annotated[Text, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class DataFiles(Spec):
    """JSON lines files by split, in the task file's folder or below."""

    data_files: dict[Split, Path | Annotated[tuple[Path, ...], Field(min_length=1)]] = Field(min_length=1)

    def paths(self, split: str) -> tuple[str, ...]:
        files = self.data_files[split]
        return (files,) if isinstance(files, str) else files


class MetricSpec(Spec):
    """Metric by name, with options."""

    metric: Text
    aggregation: Text | None = None
    higher_is_better: bool | None = None
    ignore_case: bool = False
    """For `exact_match` only, like `ignore_punctuation`."""
    ignore_punctuation: bool = False


class GenerationKwargs(Spec):
    """Generation settings of an answer, with the harness's names."""

    until: Text | tuple[Text, ...] | None = None
    """Stop strings; default: `fewshot_delimiter`."""
    max_gen_toks: Count = MAX_GEN_TOKS
    do_sample: bool | None = None
    temperature: NonNegative = 0.0
    top_k: Count | None = None
    top_p: Positive = 1.0

    @model_validator(mode="after")
    def _check_sampling(self) -> "GenerationKwargs":
        if self.do_sample is not None and self.do_sample != (self.temperature > 0):
            rule = f"contradicts temperature (={self.temperature:g})"
            raise spec_error("conflict", "do_sample", self.do_sample, rule, "omit it: any temperature above 0 samples")
        self.spec("")
        return self

    def spec(self, fewshot_delimiter: str) -> GenerationSpec:
        """Generation spec. Raises SpecError with the names of these fields."""
        until = fewshot_delimiter if self.until is None else self.until
        stop = ((until,) if until else ()) if isinstance(until, str) else until
        try:
            return GenerationSpec(
                max_tokens=self.max_gen_toks,
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                stop=stop,
            )
        except SpecError as error:
            names = {"max_tokens": "max_gen_toks", "stop": "until"}
            raise SpecError(
                replace(problem, path=names.get(name, name) + problem.path[len(name) :])
                for problem in error.problems
                for name in [problem.path.partition("[")[0]]
            ) from None


class Metadata(Spec):
    """Metadata from the task's author."""

    version: float | Text | None = None


class TaskSpec(Spec):
    """Evaluation task."""

    task: Annotated[Text, Field(pattern=r"^[A-Za-z0-9_.-]{1,100}$")]
    """Task name."""
    dataset_path: Literal["json"]
    dataset_kwargs: DataFiles
    test_split: Split | None = None
    """Split to evaluate; default: `validation_split`."""
    validation_split: Split | None = None
    fewshot_split: Split | None = None
    """Split to draw few-shot examples from; a document is never an example for itself."""
    num_fewshot: CountOrZero = Field(default=0, le=100)
    output_type: OutputType
    doc_to_text: Text = ""
    """Context: a column name or a plain template, as for `doc_to_target`."""
    doc_to_target: Text | CountOrZero
    """Target text; with choices, the correct choice or its index from 0."""
    doc_to_choice: Text | tuple[Text, ...] | None = None
    """Column with lists of texts, or one template per choice."""
    description: Text = ""
    """Text before the few-shot examples and the context."""
    target_delimiter: Text = " "
    fewshot_delimiter: Text = "\n\n"
    metric_list: Annotated[tuple[MetricSpec, ...], Field(min_length=1)] | None = None
    generation_kwargs: GenerationKwargs | None = None
    metadata: Metadata | None = None

    @field_validator("doc_to_text", "doc_to_target", "doc_to_choice", "description")
    @classmethod
    def _plain(cls, value: Any, info: ValidationInfo) -> Any:
        for text in value if isinstance(value, tuple) else [value]:
            try:
                Template.parse(str(text))
            except NotPlain as error:
                raise spec_error("invalid_syntax", "", str(error), RULE, REMEDY) from None
        return value

    @model_validator(mode="after")
    def _check_fields(self) -> "TaskSpec":
        if problems := [*self._problems_of_splits(), *self._problems_of_output(), *self._problems_of_metrics()]:
            raise SpecError(problems)
        return self

    def _problems_of_splits(self) -> list[Problem]:
        problems, split_names = [], ", ".join(self.dataset_kwargs.data_files)
        for name in ("test_split", "validation_split", "fewshot_split"):
            split = getattr(self, name)
            if split is not None and split not in self.dataset_kwargs.data_files:
                problems.append(Problem("not_a_choice", name, split,
                                        f"must be one of dataset_kwargs.data_files: {split_names}",
                                        "name one of them"))  # fmt: skip
        if self.test_split is None and self.validation_split is None:
            problems.append(
                Problem("missing", "test_split", None, "is required", f"name one of data_files: {split_names}")
            )
        if self.num_fewshot and self.fewshot_split is None:
            problems.append(Problem("missing", "fewshot_split", None,
                                    f"is required with num_fewshot (={self.num_fewshot})",
                                    f"name one of data_files: {split_names}"))  # fmt: skip
        return problems

    def _problems_of_output(self) -> list[Problem]:
        problems, kind = [], self.output_type
        if kind == "multiple_choice":
            if self.doc_to_choice is None:
                rule = "is required with output_type: multiple_choice"
                problems.append(
                    Problem("missing", "doc_to_choice", None, rule, "name a column of lists, or list the choices")
                )
        else:
            if self.doc_to_choice is not None:
                problems.append(Problem("not_applicable", "doc_to_choice", self.doc_to_choice,
                                        f"does not apply to output_type: {kind}",
                                        "omit it, or use multiple_choice"))  # fmt: skip
            if isinstance(self.doc_to_target, int):
                problems.append(Problem("wrong_type", "doc_to_target", self.doc_to_target,
                                        "must be a column or a template", "only choices have an index"))  # fmt: skip
        if self.generation_kwargs is not None and kind != "generate_until":
            problems.append(Problem("not_applicable", "generation_kwargs", None,
                                    f"does not apply to output_type: {kind}",
                                    "omit it, or use generate_until"))  # fmt: skip
        if kind == "loglikelihood_rolling" and (self.num_fewshot or self.doc_to_text):
            field_name = "num_fewshot" if self.num_fewshot else "doc_to_text"
            problems.append(Problem("not_applicable", field_name, getattr(self, field_name),
                                    "does not apply to whole texts (loglikelihood_rolling)",
                                    "omit it; doc_to_target is the text"))  # fmt: skip
        return problems

    def _problems_of_metrics(self) -> list[Problem]:
        problems, metrics = [], METRICS[self.output_type]
        for index, metric in enumerate(self.metric_list or ()):
            place = f"metric_list[{index}]"
            if metric.metric not in metrics:
                problems.append(Problem("not_a_choice", f"{place}.metric", metric.metric,
                                        f"is not a metric of {self.output_type}",
                                        f"use one of {', '.join(metrics)}"))  # fmt: skip
                continue
            for name, usual in zip(("aggregation", "higher_is_better"), metrics[metric.metric], strict=True):
                if (setting := getattr(metric, name)) not in (None, usual):
                    rule = f"must be {usual!r} for {metric.metric}"
                    problems.append(Problem("unsupported", f"{place}.{name}", setting, rule, "omit it"))
            if metric.metric != "exact_match" and (metric.ignore_case or metric.ignore_punctuation):
                problems.append(Problem("unsupported", place, metric.metric, "ignores neither case nor punctuation",
                                        "omit ignore_case and ignore_punctuation"))  # fmt: skip
        names = [metric.metric for metric in self.metric_list or ()]
        problems += [Problem("duplicate", "metric_list", name, "occurs twice", "omit one")
                     for name in sorted({name for name in names if names.count(name) > 1})]  # fmt: skip
        return problems

    @property
    def split(self) -> str:
        """Split to evaluate."""
        split = self.test_split or self.validation_split
        assert split is not None
        return split

    @property
    def metrics(self) -> tuple[MetricSpec, ...]:
        usual = (MetricSpec(metric=name) for name in _USUAL_METRICS[self.output_type])
        return self.metric_list or tuple(usual)

    @property
    def generation(self) -> GenerationSpec:
        return (self.generation_kwargs or GenerationKwargs()).spec(self.fewshot_delimiter)
