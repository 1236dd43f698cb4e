"""The `sweep` of a job file: which fields take which values, and how many jobs run how far."""

import json
from math import prod
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from moe.spec.base import Count, CountOrZero, Positive, Spec, Text
from moe.spec.errors import Problem, RuleError, SpecError, spec_error

MAX_MEMBERS = 256
"""Most jobs of a sweep: each is planned, and its folder written, before the request is answered."""
DEFAULT_FACTOR = 3
MAX_NUMBER = 1e100
"""Largest end of a range: differences and quotients of such ends are finite."""
MIN_UNIT = 1e-100
_METRIC = r"^(loss|nll|aux_loss|tokens_per_s|step_s|held_out(\..+)?|numbers\..+)$"


def _number(value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RuleError("wrong_type", "must be a number", "write it as digits, without quotes")
    if not -MAX_NUMBER <= value <= MAX_NUMBER:
        raise RuleError("out_of_range", f"must lie between -{MAX_NUMBER:g} and {MAX_NUMBER:g}", "use a smaller range")
    return value


Number = Annotated[int | float, PlainValidator(_number), WithJsonSchema({"type": "number"})]
"""A number that stays an integer if it was written as one."""


class SweepFieldSpec(Spec):
    """Values of one field: a list, or a range."""

    values: tuple[Any, ...] | None = Field(default=None, min_length=1, max_length=MAX_MEMBERS)
    min: Number | None = None
    """Lower end of a range. Values are whole numbers if both ends are."""
    max: Number | None = None
    scale: Literal["linear", "log"] = "linear"
    """`log`: as many values between 1 and 10 as between 10 and 100."""
    num_values: Annotated[Count, Field(ge=2, le=MAX_MEMBERS)] | None = None
    """For a grid over a range: number of values, evenly spaced on the scale, both ends included."""
    multiple_of: Annotated[Positive, Field(ge=MIN_UNIT)] | None = None
    """Values of a range are multiples of this number."""

    @model_validator(mode="after")
    def _check_kind(self) -> "SweepFieldSpec":
        if self.values is not None:
            for name in ("min", "max", "num_values", "multiple_of"):
                if (value := getattr(self, name)) is not None:
                    raise spec_error("conflict", name, value, "does not apply to a list of values",
                                     "omit it, or omit values")  # fmt: skip
            texts = [json.dumps(value, sort_keys=True) for value in self.values]
            for text in texts:
                if texts.count(text) > 1:
                    raise spec_error("duplicate", "values", json.loads(text), "occurs twice", "remove one of the two")
            return self
        if self.min is None or self.max is None:
            raise RuleError("missing", "must have values, or min and max", "add them")
        self._check_range(self.min, self.max)
        return self

    def _check_range(self, low: float, high: float) -> None:
        if low >= high:
            raise spec_error("out_of_range", "min", low, f"must be below max (={high:g})", "lower it, or raise max")
        if self.scale == "log" and low <= 0:
            raise spec_error("out_of_range", "min", low, "must be above 0 on a logarithmic scale",
                             "raise it, or use scale: linear")  # fmt: skip
        if self.multiple_of is not None and high // self.multiple_of * self.multiple_of < low:
            raise spec_error("out_of_range", "multiple_of", self.multiple_of,
                             f"has no multiple between min (={low:g}) and max (={high:g})", "lower it")  # fmt: skip

    @property
    def is_range(self) -> bool:
        return self.values is None

    @property
    def ends(self) -> tuple[int | float, int | float]:
        """Ends of a range."""
        if self.min is None or self.max is None:
            raise AssertionError("asked of a list of values")
        return self.min, self.max


class SweepSpec(Spec):
    """A family of jobs that differ in the values of some fields."""

    method: Literal["grid", "random", "successive_halving"]
    """`grid`: every combination of values. `random`: `num_jobs` combinations drawn by `seed`. `successive_halving`
    (arXiv 1502.07943): jobs pause at each rung, and only the best go on from there."""
    fields: dict[Text, SweepFieldSpec] = Field(min_length=1, max_length=16)
    """Values by field of the job, as `train.optimizer.peak_lr`."""
    num_jobs: Count | None = None
    """Number of jobs of `random` and `successive_halving`; the latter takes every combination of listed values
    without it."""
    seed: CountOrZero = 0
    """Seed of the drawn values; the training seed is the job's `train.seed`."""
    metric: Annotated[Text, Field(pattern=_METRIC, max_length=300)] | None = None
    """Value that jobs are compared by, at the last step with one: `loss`, `nll`, `aux_loss`, `tokens_per_s`, `step_s`,
    `held_out` (mean over all held-out sets), `held_out.NAME` (one of them) or `numbers.NAME` (a module's). Default:
    `held_out` for a job with periodic evaluation, else `loss`."""
    mode: Literal["min", "max"] = "min"
    """Whether lower or higher values are better."""
    max_parallel: Count | None = None
    """Most jobs that are queued or run at a time. Default: all, as the cluster has room."""
    min_steps: Count | None = None
    """For `successive_halving`: step of the first rung; each further one is at `factor` times as many steps."""
    factor: Annotated[Count, Field(ge=2, le=100)] | None = None
    """For `successive_halving`: the best 1/`factor` of a rung's jobs go on, at least one. Default: 3."""
    rungs: Annotated[Count, Field(le=32)] | None = None
    """For `successive_halving`: number of rungs before the last step. Default: as many as leave more than one job to
    choose from."""

    @model_validator(mode="after")
    def _check_method(self) -> "SweepSpec":
        problems = [*self._foreign_fields(), *self._missing_fields(), *self._overlapping_fields()]
        if problems:
            raise SpecError(problems)
        if self.num_members > MAX_MEMBERS:
            raise spec_error("too_large", "num_jobs" if self.num_jobs else "fields", self.num_members,
                             f"must make at most {MAX_MEMBERS} jobs",
                             "lower it" if self.num_jobs else "remove values, or use method: random with num_jobs",
                             )  # fmt: skip
        if self.is_drawn and not self._has_combinations():
            raise spec_error("out_of_range", "num_jobs", self.num_jobs, "exceeds the combinations of values",
                             "lower it, or use method: grid")  # fmt: skip
        if self.method == "successive_halving" and self.num_members < 2:
            raise spec_error("out_of_range", "num_jobs" if self.num_jobs else "fields", self.num_members,
                             "must make at least two jobs to choose from", "add values")  # fmt: skip
        return self

    @property
    def is_drawn(self) -> bool:
        """Whether values are drawn, rather than combined in a grid."""
        return self.num_jobs is not None

    @property
    def num_members(self) -> int:
        if self.num_jobs is not None:
            return self.num_jobs
        return prod(len(field.values) if field.values else field.num_values or 1 for field in self.fields.values())

    @property
    def halving_factor(self) -> int:
        return self.factor or DEFAULT_FACTOR

    def _foreign_fields(self) -> list[Problem]:
        foreign = [] if self.method == "successive_halving" else ["min_steps", "factor", "rungs"]
        if self.method == "grid":
            foreign.append("num_jobs")
        problems = [
            Problem("not_applicable", name, value, f"does not apply to the method {self.method}", "omit it")
            for name in foreign if (value := getattr(self, name)) is not None
        ]  # fmt: skip
        return problems + [
            Problem("not_applicable", f"fields.{path}.num_values", field.num_values, "does not apply to drawn values",
                    "omit it, or use method: grid")
            for path, field in self.fields.items() if self.is_drawn and field.num_values is not None
        ]  # fmt: skip

    def _missing_fields(self) -> list[Problem]:
        problems = []
        if self.method == "random" and self.num_jobs is None:
            problems.append(Problem("missing", "num_jobs", None, "is required for the method random", "add it"))
        if self.method == "successive_halving" and self.min_steps is None:
            rule = "is required for the method successive_halving: the step of its first rung"
            problems.append(Problem("missing", "min_steps", None, rule, "add it"))
        if not self.is_drawn and self.method != "random":
            remedy = "add it" if self.method == "grid" else "add it, or num_jobs to draw values"
            problems += [
                Problem("missing", f"fields.{path}.num_values", None, "is required for a grid over a range", remedy)
                for path, field in self.fields.items() if field.is_range and field.num_values is None
            ]  # fmt: skip
        return problems

    def _overlapping_fields(self) -> list[Problem]:
        problems = []
        for path in self.fields:
            if not all(path.split(".")):
                problems.append(Problem("invalid_value", f"fields.{path}", None, "is not the path of a field",
                                        "write it as train.optimizer.peak_lr"))  # fmt: skip
            if path.split(".")[0] in _FORBIDDEN:
                problems.append(Problem("not_allowed", f"fields.{path}", None, "must not differ in a sweep",
                                        "omit it: members are named and labelled by the sweep"))  # fmt: skip
            if self.method == "successive_halving" and path in ("train", "train.num_steps"):
                problems.append(Problem("not_allowed", f"fields.{path}", None,
                                        "must not differ between jobs that are compared at the same steps",
                                        "use method: grid or random"))  # fmt: skip
            problems += [
                Problem("conflict", f"fields.{path}", None, f"contains the field {inner}", "remove one of the two")
                for inner in self.fields if inner.startswith(f"{path}.")
            ]  # fmt: skip
        return problems

    def _has_combinations(self) -> bool:
        """Whether lists of values have enough combinations for `num_jobs`; ranges always count as enough."""
        if any(field.is_range for field in self.fields.values()):
            return True
        return prod(len(field.values or ()) for field in self.fields.values()) >= self.num_members


_FORBIDDEN = frozenset({"name", "labels", "storage", "sweep"})
