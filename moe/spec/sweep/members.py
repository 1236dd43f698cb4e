"""Members of a posted sweep: jobs with plain specs, all valid, or every problem with the values that cause it."""

import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import ValidationError

from moe.spec.base import Frozen
from moe.spec.errors import Problem, SpecError, spec_error
from moe.spec.job import JobSpec
from moe.spec.problems import problems_of
from moe.spec.sweep.spec import SweepSpec
from moe.spec.sweep.values import combinations

T = TypeVar("T")
LABEL = "sweep"
"""Label of each member, with the sweep's id."""
MAX_NAME = 63


@dataclass(frozen=True)
class SweepMember:
    """One job of a sweep."""

    number: int
    """From 1, in the order of the values."""
    values: Mapping[str, Any]
    """Values by field."""
    spec: JobSpec


@dataclass(frozen=True)
class SweepRequest:
    """A posted sweep: a job with `sweep`, checked."""

    sweep: SweepSpec
    name: str
    metric: str
    """`sweep.metric`, or its default for the job."""
    members: tuple[SweepMember, ...]
    rungs: tuple[int, ...]
    """Steps at which the best are chosen, in order; none unless by successive halving."""

    @classmethod
    def parse(cls, plain: Any, sweep_id: str, expand: Callable[[Any], Any] = lambda job: job) -> "SweepRequest":
        """Parse a job with `sweep` into members labelled with `sweep_id`. `expand`: fills in a job before parsing.
        Raises SpecError with the problems of all members."""
        if not isinstance(plain, Mapping) or "sweep" not in plain:
            raise spec_error("missing", "sweep", None, "is required", "add it, or post the job to /v1/jobs")
        try:
            sweep = _WithSweep.model_validate({"sweep": plain["sweep"]}).sweep
        except ValidationError as error:
            raise SpecError(problems_of(error)) from None
        base = {name: value for name, value in plain.items() if name != "sweep"}
        if isinstance(labels := base.get("labels"), Mapping) and LABEL in labels:
            raise spec_error("not_allowed", f"labels.{LABEL}", labels[LABEL], "is set by the sweep", "remove it")
        tries = combinations(sweep)
        specs = _parse_members(sweep, base, tries, sweep_id, expand)
        members = tuple(
            SweepMember(number, values, spec)
            for number, (values, spec) in enumerate(zip(tries, specs, strict=True), start=1)
        )
        metric = sweep.metric or ("held_out" if specs[0].train.evaluation.every_steps else "loss")
        rungs = rung_steps(sweep, specs[0].train.num_steps, len(specs))
        if problems := _problems_of_metric(metric, rungs, members):
            raise SpecError(problems)
        return cls(sweep, str(base.get("name", specs[0].name.rpartition("-")[0])), metric, members, rungs)

    def for_all(self, make: Callable[[SweepMember], T]) -> list[T]:
        """Results of `make` for all members. Raises SpecError with the problems of all of them."""
        tries = [member.values for member in self.members]
        return _for_all(self.sweep, tries, lambda number: make(self.members[number - 1]))


class _WithSweep(Frozen):
    sweep: SweepSpec


def assign(spec: dict[str, Any], path: str, value: Any) -> None:
    """Set a field of a plain spec, with the parts above it where they are missing. Raises KeyError with the path of a
    part that has no fields."""
    *parents, last = path.split(".")
    place: Any = spec
    for depth, key in enumerate(parents, start=1):
        if place.get(key) is None:
            place[key] = {}
        place = place[key]
        if not isinstance(place, dict):
            raise KeyError(".".join(parents[:depth]))
    place[last] = value


def rung_steps(sweep: SweepSpec, num_steps: int, num_members: int) -> tuple[int, ...]:
    """Steps at which the best are chosen. Raises SpecError if the last is not before the end of training."""
    if sweep.method != "successive_halving":
        return ()
    assert sweep.min_steps is not None, "checked by SweepSpec"
    factor = sweep.halving_factor
    steps: list[int] = []
    left = num_members
    while sweep.rungs is None or len(steps) < sweep.rungs:
        step = sweep.min_steps * factor ** len(steps)
        if step >= num_steps:
            break
        if sweep.rungs is None and left < 2:
            break
        steps.append(step)
        left = max(1, left // factor)
    if not steps or (sweep.rungs is not None and len(steps) < sweep.rungs):
        num_rungs = sweep.rungs or 1
        last_step = sweep.min_steps * factor ** (num_rungs - 1)
        raise spec_error("out_of_range", "sweep.min_steps", sweep.min_steps,
                         f"puts rung {num_rungs} at step {last_step}, not before the end of training, train.num_steps "
                         f"(={num_steps})", "lower it or sweep.rungs, or raise train.num_steps")  # fmt: skip
    return tuple(steps)


def _parse_members(
    sweep: SweepSpec, base: Mapping[str, Any], tries: Sequence[Mapping[str, Any]], sweep_id: str,
    expand: Callable[[Any], Any],
) -> list[JobSpec]:  # fmt: skip
    """Specs of all members. Raises SpecError with each problem once, and the values that cause it."""

    def parse(number: int) -> JobSpec:
        plain = _plain_member(base, tries[number - 1], number, len(tries), sweep_id)
        return JobSpec.parse(expand(plain))

    return _for_all(sweep, tries, parse)


def _for_all(sweep: SweepSpec, tries: Sequence[Mapping[str, Any]], make: Callable[[int], T]) -> list[T]:
    """Results of `make` for the numbers of all members. Raises SpecError with the problems of all of them."""
    results: list[T] = []
    faults: dict[str, tuple[Problem, list[int]]] = {}
    for number in range(1, len(tries) + 1):
        try:
            results.append(make(number))
        except SpecError as error:
            for problem in error.problems:
                faults.setdefault(repr(problem), (problem, []))[1].append(number)
    if faults:
        problems = [_with_values(sweep, problem, numbers, tries) for problem, numbers in faults.values()]
        raise SpecError({repr(problem): problem for problem in problems}.values())
    return results


def _plain_member(
    base: Mapping[str, Any], values: Mapping[str, Any], number: int, num_members: int, sweep_id: str
) -> dict[str, Any]:
    plain = deepcopy(dict(base))
    for path, value in values.items():
        try:
            assign(plain, path, deepcopy(value))
        except KeyError as error:
            parent = error.args[0]
            raise spec_error("wrong_type", f"sweep.fields.{path}", None, f"is a field of {parent}, which has no fields",
                             f"sweep over {parent} as a whole, or write it as a mapping") from None  # fmt: skip
    if isinstance(labels := plain.get("labels", {}), dict):
        plain["labels"] = {**labels, LABEL: sweep_id}
    if isinstance(name := plain.get("name", "job"), str):
        suffix = f"-{number:0{len(str(num_members))}}"
        plain["name"] = (name if len(name) > MAX_NAME else name[: MAX_NAME - len(suffix)].rstrip("-._")) + suffix
    return plain


def _with_values(
    sweep: SweepSpec, problem: Problem, numbers: Sequence[int], tries: Sequence[Mapping[str, Any]]
) -> Problem:
    """The problem with the values of its members, unless all have it whatever their values."""
    for path in sweep.fields:
        if problem.code == "unknown_key" and f"{path}.".startswith(f"{problem.path}."):
            return Problem("unknown_key", f"sweep.fields.{path}", None, "is not a field of this job",
                           "check its spelling")  # fmt: skip
    is_of_field = any(f"{problem.path}.".startswith(f"{path}.") for path in sweep.fields)
    if (len(numbers) == len(tries) and not is_of_field) or problem.path.startswith("sweep."):
        return problem
    values = ", ".join(f"{path}={json.dumps(value)}" for path, value in tries[numbers[0] - 1].items())
    more_text = f" and {len(numbers) - 1} more" if len(numbers) > 1 else ""
    return replace(problem, rule=f"{problem.rule} (in member {numbers[0]}: {values}{more_text})")


def _problems_of_metric(metric: str, rungs: Sequence[int], members: Sequence[SweepMember]) -> list[Problem]:
    """Problems of a metric that jobs do not record, or not at their rungs."""
    if not metric.startswith("held_out"):
        return []
    problems = []
    for member in members:
        every_steps = member.spec.train.evaluation.every_steps
        if every_steps is None:
            return [Problem("requires", "sweep.metric", metric, "requires periodic evaluation",
                            "set train.evaluation.every_steps, or use the metric loss")]  # fmt: skip
        if late := [step for step in rungs if step % every_steps]:
            problems.append(
                Problem("not_divisible", "sweep.min_steps", rungs[0],
                        f"puts a rung at step {late[0]}, at which nothing is evaluated "
                        f"(train.evaluation.every_steps is {every_steps})",
                        f"use a multiple of {every_steps}, or evaluate more often")
            )  # fmt: skip
    return problems[:1]
