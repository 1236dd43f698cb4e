"""The job spec."""

import re
from collections.abc import Iterator
from dataclasses import replace
from math import isqrt, prod
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError, ValidationInfo, model_validator

from moe.spec.adapter import AdapterSpec
from moe.spec.base import Count, Spec, Text
from moe.spec.batch_problems import problems_of_sequences, problems_of_stream
from moe.spec.conversations import ConversationsSpec, PreferenceSpec, UnpairedPreferenceSpec
from moe.spec.data import DataSpec, SequencesSpec, SyntheticSpec
from moe.spec.errors import Problem, RuleError, SpecError, spec_error
from moe.spec.former_defaults import with_former_defaults
from moe.spec.groups import with_group
from moe.spec.language import LanguageModelSpec
from moe.spec.model import ModelSpec, kind_of
from moe.spec.module import ModuleDataSpec, ModuleModelSpec
from moe.spec.module_problems import problems_of_module
from moe.spec.parallel import ParallelSpec
from moe.spec.parallel_problems import problems_of_context, problems_of_stages
from moe.spec.preference_problems import problems_of_preferences
from moe.spec.problems import problems_of
from moe.spec.resources import CheckpointSpec, LogsSpec, ResourcesSpec, RetrySpec
from moe.spec.track import TrackSpec
from moe.spec.train import LOSSES_WITH_REFERENCE, TrainSpec
from moe.spec.train_problems import (
    problems_of_evaluation,
    problems_of_freezing,
    problems_of_graphs,
    problems_of_optimizer,
    problems_without_evaluation,
)

_NEW = {"new": True}
"""Validation context for new jobs, as opposed to stored ones."""
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._/-]{0,61}[A-Za-z0-9])?")


def _labels(labels: dict[str, str]) -> dict[str, str]:
    for key, value in labels.items():
        if not _LABEL.fullmatch(key) or (value and not _LABEL.fullmatch(value)):
            raise RuleError("invalid_value",
                            "must have keys and values of at most 63 letters, digits, '.', '_', '/' and '-', "
                            "starting and ending with a letter or digit", "rename them")  # fmt: skip
    return labels


class StartFromSpec(Spec):
    """Committed checkpoint of another job of the same owner, copied to the new job's storage at submission.

    Model, data (except `sampling_exponent` and `date`), `train.dtype` and the optimizer's name must equal that job's;
    steps, batches, learning rate, schedule, seed, layout and workers may differ. `train.num_steps` includes the
    checkpoint's steps.
    """

    job: Text = Field(min_length=1, max_length=64)
    """Id of that job."""
    step: Count | None = None
    """Step of the checkpoint. Default: the newest one."""


class JobSpec(Spec):
    """A training job: model, data, training settings, resources. The same type in files, over HTTP and in workers."""

    name: str = Field(default="job", min_length=1, max_length=63, pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")
    labels: Annotated[dict[str, str], AfterValidator(_labels)] = Field(default={}, max_length=32)
    model: ModelSpec
    data: DataSpec
    train: TrainSpec
    resources: ResourcesSpec = ResourcesSpec(num_workers=1)
    parallel: ParallelSpec = ParallelSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    retry: RetrySpec = RetrySpec()
    logs: LogsSpec = LogsSpec()
    track: TrackSpec = TrackSpec()
    notify: tuple[Annotated[Text, Field(min_length=1, max_length=63)], ...] = Field(default=(), max_length=32)
    """Names of webhooks that get this job's events, besides those that get every job's."""
    start_from: StartFromSpec | None = None
    """Checkpoint to start the model and its optimizer from. Default: none, training starts at step 0."""
    adapter: AdapterSpec | None = Field(default=None, exclude=True)
    """LoRA adapter to train instead of the model's weights; the same as `model.adapter`."""
    storage: Text | None = Field(default=None, max_length=1024)
    """fsspec URL under the service's storage roots; checkpoints and records are in a folder below it, named by the
    job's id. Default: the first root."""

    @model_validator(mode="before")
    @classmethod
    def _with_adapter(cls, values: Any) -> Any:
        """Move a top-level `adapter` into `model`."""
        if not isinstance(values, dict) or values.get("adapter") is None:
            return values
        model = values.get("model")
        if (kind := kind_of(model)) != "language" and not (isinstance(model, dict) and "from" in model):
            raise spec_error("not_applicable", "adapter", None, f"does not apply to a {kind} model",
                             "omit it, or use a language model")  # fmt: skip
        fields = model if isinstance(model, dict) else model.model_dump(exclude_unset=True)  # type: ignore[union-attr]
        if fields.get("adapter") is not None:
            raise spec_error("duplicate", "adapter", None, "is given twice, at the top level and in model", "omit one")
        rest = {name: value for name, value in values.items() if name != "adapter"}
        return {**rest, "model": {**fields, "adapter": values["adapter"]}}

    @model_validator(mode="after")
    def _coherent(self, info: ValidationInfo) -> "JobSpec":
        problems = list(_problems_across_parts(self))
        if info.context is _NEW:
            problems += _problems_from_scratch(self)
        if problems:
            raise SpecError(problems)
        return self

    @property
    def group_tokens(self) -> int:
        """Positions per token group: whole pairs or sequences, routed together and never split.

        For a dense model, the smallest divisor of the batch that holds the longest possible pair or sequence: the
        finest split over ranks.
        """
        if self.model.moe is not None:
            return self.model.moe.group_tokens
        if isinstance(self.model, LanguageModelSpec):
            return self.data.max_tokens
        if isinstance(self.model, ModuleModelSpec):
            return self.train.batch_tokens  # every rank gets the whole batch
        batch_tokens, smallest = self.train.batch_tokens, 2 * self.data.max_tokens
        small = [size for size in range(1, isqrt(batch_tokens) + 1) if batch_tokens % size == 0]
        return min(size for half in small for size in (half, batch_tokens // half) if size >= smallest)

    @property
    def num_groups(self) -> int:
        """Token groups per global batch."""
        return self.train.batch_tokens // self.group_tokens

    @property
    def missing_texts(self) -> Problem | None:
        """Problem if the corpus is synthetic, which can be planned but not trained."""
        if not isinstance(self.data, SyntheticSpec):
            return None
        return Problem("not_applicable", "data.corpus", self.data.corpus, "has random tokens, only for planning",
                       "use packages or documents, or only plan it: shardyard plan")  # fmt: skip

    @property
    def missing_folder(self) -> Problem | None:
        """Problem if the job names no model folder for its adapter's base or chat template; it can be planned but not
        trained."""
        if not isinstance(self.model, LanguageModelSpec) or self.model.from_folder is not None:
            return None
        if self.model.adapter is not None:
            rule = "is required with an adapter, which needs pretrained weights"
            remedy = "name a model's folder, omit adapter, or only plan it: shardyard plan"
            return Problem("missing", "model.from", None, rule, remedy)
        if isinstance(self.data, ConversationsSpec):
            rule = f"is required for the corpus {self.data.corpus}, which needs its chat template"
            remedy = "name the folder of a model with a chat template, or only plan it: shardyard plan"
            return Problem("missing", "model.from", None, rule, remedy)
        return None

    @property
    def label_smoothing(self) -> float:
        """`train.label_smoothing`, or its default for the kind of model."""
        if self.train.label_smoothing is not None:
            return self.train.label_smoothing
        return 0.0 if isinstance(self.model, LanguageModelSpec) else 0.1

    @property
    def preference_beta(self) -> float:
        """`train.preference_beta`, or its default for the loss."""
        if self.train.preference_beta is not None:
            return self.train.preference_beta
        return 2.0 if self.train.preference_loss == "simpo" else 0.1

    @property
    def preference_margin(self) -> float:
        """`train.preference_margin`, or its default."""
        return 1.0 if self.train.preference_margin is None else self.train.preference_margin

    @property
    def label_weights(self) -> tuple[float, float]:
        """Factors of the losses of desirable and undesirable answers."""
        weights = self.train.desirable_weight, self.train.undesirable_weight
        return tuple(1.0 if weight is None else weight for weight in weights)  # type: ignore[return-value]

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares with a reference model, which takes a forward pass of its own."""
        return self._has_preferences and self.train.preference_loss in LOSSES_WITH_REFERENCE

    @property
    def _has_preferences(self) -> bool:
        return isinstance(self.data, PreferenceSpec | UnpairedPreferenceSpec)

    @property
    def estimates_kl(self) -> bool:
        """Whether the loss takes an estimate of the KL divergence from the reference model, from prompts with the
        completions of other records."""
        return isinstance(self.data, UnpairedPreferenceSpec) and self.train.preference_loss == "kto"

    @property
    def num_extra_passes(self) -> int:
        """Forward passes of a step without a backward pass: the reference model's, and for a KL estimate one of each
        model."""
        return int(self.has_reference) + 2 * int(self.estimates_kl)

    @property
    def has_frozen_reference(self) -> bool:
        """Whether that reference model is a frozen copy of the initial weights, as there is no adapter to leave out."""
        return self.has_reference and getattr(self.model, "adapter", None) is None

    @property
    def resolved(self) -> "JobSpec":
        """The job with its parts' defaults written out; equal for jobs with equal meaning."""
        train_fields: dict[str, Any] = {
            "label_smoothing": self.label_smoothing, "optimizer": self.train.optimizer.resolved,
        }  # fmt: skip
        if isinstance(self.data, UnpairedPreferenceSpec):
            desirable, undesirable = self.label_weights
            train_fields |= {"desirable_weight": desirable, "undesirable_weight": undesirable}
        if self._has_preferences:
            train_fields["preference_beta"] = self.preference_beta
            if self.train.preference_loss == "simpo":
                train_fields["preference_margin"] = self.preference_margin
        update: dict[str, Any] = {"train": self.train.model_copy(update=train_fields)}
        if self.model.moe is not None:
            update["model"] = self.model.model_copy(update={"moe": self.model.moe.resolved})
        return self.model_copy(update=update)

    @classmethod
    def parse(cls, plain: Any, *, accepted: bool = False) -> "JobSpec":
        """Parse plain data. Raises SpecError with every problem.

        `accepted`: a stored job, without the rules for new jobs, and with what its release did by default.
        """
        if not accepted and isinstance(plain, dict) and "sweep" in plain:
            raise spec_error("not_allowed", "sweep", None, "makes a family of jobs, not one",
                             "use shardyard sweep FILE or POST /v1/sweeps, or remove it")  # fmt: skip
        fields = with_former_defaults(plain) if accepted else with_group(plain)
        try:
            job = cls.model_validate(fields, context=None if accepted else _NEW)
            if not accepted and fields is not plain and job.model.moe is not None:
                # Keep it unset: if the sequence length changes, so must the default.
                job.model.moe.model_fields_set.discard("group_tokens")
            return job
        except ValidationError as error:
            is_top_level = isinstance(plain, dict) and plain.get("adapter") is not None
            raise SpecError(_as_written(problems_of(error)) if is_top_level else problems_of(error)) from None


def _as_written(problems: list[Problem]) -> list[Problem]:
    """Change the paths of an adapter's problems to the top level, where it was written."""
    inside = "model.adapter"
    return [
        replace(problem, path=problem.path.removeprefix("model."))
        if problem.path == inside or problem.path.startswith(f"{inside}.")
        else problem
        for problem in problems
    ]


def _problems_of_tracking(job: JobSpec) -> Iterator[Problem]:
    return job.track.problems(job.labels, has_experts=job.model.moe is not None)


def _problems_across_parts(job: JobSpec) -> list[Problem]:
    """Conflicts between parts of a job."""
    if isinstance(job.model, ModuleModelSpec) or isinstance(job.data, ModuleDataSpec):
        return [
            *problems_of_module(job.model, job.data, job.train, job.checkpoint, job.parallel),
            *_problems_of_tracking(job),
        ]
    problems = [
        *problems_of_freezing(job.model, job.train),
        *problems_of_optimizer(job.model, job.train),
        *problems_of_evaluation(job.model, job.train),
        *problems_without_evaluation(job.data, job.train, job.checkpoint),
        *problems_of_graphs(job.model, job.data, job.train, job.resources),
        *_problems_of_tracking(job),
    ]
    moe, batch_tokens = job.model.moe, job.train.batch_tokens
    groups_are_sequences = isinstance(job.model, LanguageModelSpec) and job.group_tokens == job.data.max_tokens
    if moe is not None and not groups_are_sequences and batch_tokens % moe.group_tokens:
        lower = max(1, batch_tokens // moe.group_tokens) * moe.group_tokens
        problems.append(Problem("not_divisible", "model.moe.group_tokens", moe.group_tokens,
                                f"must divide train.batch_tokens (={batch_tokens})",
                                f"use batch_tokens {lower} or {lower + moe.group_tokens}"))  # fmt: skip
    of_sequences = isinstance(job.data, SyntheticSpec | SequencesSpec)
    if isinstance(job.model, LanguageModelSpec) != of_sequences:
        sequences = "packages, documents, chat, preference or unpaired_preference"
        fits = "catalogs, jsonl or text" if of_sequences else sequences
        problems.append(Problem("not_applicable", "data.corpus", job.data.corpus,
                                f"does not apply to a {job.model.kind} model", f"use {fits}"))  # fmt: skip
        return problems
    if isinstance(job.model, LanguageModelSpec):
        problems += problems_of_preferences(job.model, job.data, job.train)
        problems += problems_of_stream(job.data, job.num_groups)
        return problems + problems_of_sequences(job.data, job.train, job.group_tokens) + _problems_of_degrees(job)
    smallest = 2 * job.data.max_tokens
    group_tokens = moe.group_tokens if moe is not None else batch_tokens
    if group_tokens < smallest:
        path = "model.moe.group_tokens" if moe is not None else "train.batch_tokens"
        problems.append(
            Problem(
                "out_of_range",
                path,
                group_tokens,
                f"must hold one pair of the longest sequences, 2 x data.max_tokens (={smallest})",
                f"use {smallest} or more, or a data.max_tokens of at most {group_tokens // 2}",
            )
        )
    return problems + _problems_of_degrees(job)


def _problems_from_scratch(job: JobSpec) -> list[Problem]:
    """Problems that matter only with new weights: pretrained routers need not learn."""
    has_weights = isinstance(job.model, LanguageModelSpec) and (
        job.model.from_folder is not None or job.model.adapter is not None
    )
    from_scratch = job.start_from is None and not has_weights
    if not from_scratch or job.model.moe is None or (never := job.model.moe.routing.never_trained()) is None:
        return []
    return [replace(never, path=f"model.moe.{never.path}")]


def _problems_of_degrees(job: JobSpec) -> list[Problem]:
    """Problems of degrees of `parallel` that do not fit the model or the workers."""
    problems, moe = [], job.model.moe
    expert = job.parallel.expert
    if expert is not None and moe is None and expert > 1:
        problems.append(Problem("out_of_range", "parallel.expert", expert, "must be 1 for a model without experts",
                                "omit it, or add model.moe"))  # fmt: skip
    if expert is not None and moe is not None and moe.num_experts % expert:
        fits = [degree for degree in range(1, moe.num_experts + 1) if moe.num_experts % degree == 0]
        next_multiple = -(-moe.num_experts // expert) * expert
        problems.append(Problem("not_divisible", "model.moe.num_experts", moe.num_experts,
                                f"must be divisible by parallel.expert (={expert})",
                                f"use {next_multiple} experts or an expert degree of "
                                f"{_choices_in_words(fits)}"))  # fmt: skip
    data = job.parallel.data
    if expert is not None and data is not None:
        min_workers, max_workers = job.resources.min_num_workers, job.resources.max_num_workers
        optional = {"expert_tensor": job.parallel.expert_tensor or 1, "pipeline": job.parallel.pipeline or 1}
        degrees = {"expert": expert, "data": data, **{axis: degree for axis, degree in optional.items() if degree > 1}}
        num_ranks = prod(degrees.values())
        if not min_workers <= num_ranks <= max_workers:
            workers = f"{max_workers}" if min_workers == max_workers else f"{min_workers} to {max_workers}"
            problems.append(Problem("mismatch", "parallel",
                                    " x ".join(f"{axis} {degree}" for axis, degree in degrees.items()),
                                    f"must multiply to the number of workers (={workers}), not {num_ranks}",
                                    f"use resources.num_workers {num_ranks}, or omit one degree"))  # fmt: skip
    if not isinstance(job.model, ModuleModelSpec):
        problems += problems_of_stages(job.model, job.parallel.stages)
        problems += problems_of_context(job.model, job.data, job.parallel)
    return problems


def _choices_in_words(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    texts = [str(number) for number in numbers]
    if len(texts) > 8:
        texts = [*texts[:6], "...", texts[-1]]
    return ", ".join(texts[:-1]) + " or " + texts[-1]
