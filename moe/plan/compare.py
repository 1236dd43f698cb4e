"""Comparison of two plans, as numbers and in sentences."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import fsum
from typing import Generic, NamedTuple, TypeVar

from moe.plan.causes import Causes
from moe.plan.money import format_amount
from moe.plan.plan import MadeFor, Plan
from moe.plan.quantities import format_bytes, format_seconds, time_kind_name
from moe.plan.speed import describe_speed

T = TypeVar("T")
Value = bool | int | str | None

MAX_TIME_KINDS = 5
"""Most kinds of time listed one by one."""
MIN_TIME_SHARE = 0.02
"""Share of the slower step below which kinds of time are summed."""


@dataclass(frozen=True)
class ValuePair(Generic[T]):
    """Values of one field in two plans."""

    first: T
    second: T


@dataclass(frozen=True)
class CostTerm:
    """Seconds or bytes of one kind in two plans."""

    first: float
    second: float

    @property
    def difference(self) -> float:
        return self.second - self.first


@dataclass(frozen=True)
class Comparison:
    """Two plans, term by term."""

    layout: Mapping[str, ValuePair[Value]]
    """Degrees and options that differ; of modules, axes of the mesh."""
    priced_for: Mapping[str, ValuePair[Value]]
    """Profile, software, devices, pool, workers and tokens per step, where they differ."""
    made_for: Mapping[str, ValuePair[str | None]]
    """Digests of planner inputs that differ; None if a plan has none."""
    time: Mapping[str, CostTerm]
    """Step seconds by kind."""
    hidden: CostTerm
    """Seconds of overlapped collectives; not part of the step."""
    memory: Mapping[str, CostTerm]
    limit: CostTerm

    @property
    def step(self) -> CostTerm:
        return CostTerm(*(fsum(getattr(term, side) for term in self.time.values()) for side in ("first", "second")))

    @property
    def total(self) -> CostTerm:
        """Bytes on the fullest device, allowance included."""
        return _sum_of(self.memory)

    @property
    def job_memory(self) -> Mapping[str, CostTerm]:
        """Bytes by kind, without the allowance."""
        return {kind: term for kind, term in self.memory.items() if kind != "allowance"}

    @property
    def job_bytes(self) -> CostTerm:
        return _sum_of(self.job_memory)

    @property
    def free(self) -> CostTerm:
        """Device bytes that the job leaves free."""
        usage = self.job_bytes
        return CostTerm(*(max(0, getattr(self.limit, side) - getattr(usage, side)) for side in ("first", "second")))


def _sum_of(terms: Mapping[str, CostTerm]) -> CostTerm:
    return CostTerm(*(sum(getattr(term, side) for term in terms.values()) for side in ("first", "second")))


class Names(NamedTuple):
    """Names of the two plans in sentences."""

    first: str = "the first"
    second: str = "the second"


def compare(first: Plan, second: Plan) -> Comparison:
    """Compare two plans."""
    digests = [{} if plan.made_for is None else vars(plan.made_for) for plan in (first, second)]
    made_for = {part: ValuePair(*(by_part.get(part) for by_part in digests)) for part in MadeFor.model_fields}
    return Comparison(
        layout=_differing(_layout(first), _layout(second)),
        priced_for=_differing(_priced_for(first), _priced_for(second)),
        made_for={part: pair for part, pair in made_for.items() if pair.first != pair.second},
        time=_terms(first.predicted.by_kind(), second.predicted.by_kind()),
        hidden=CostTerm(first.predicted.hidden_s, second.predicted.hidden_s),
        memory=_terms(first.memory.by_kind(), second.memory.by_kind()),
        limit=CostTerm(first.memory.limit, second.memory.limit),
    )  # fmt: skip


_PRICED_FOR = ("profile", "software", "device_type", "num_workers", "tokens_per_step", "pool")


def _priced_for(plan: Plan) -> dict[str, Value]:
    return {name: getattr(plan, name) for name in _PRICED_FOR}


def _layout(plan: Plan) -> dict[str, Value]:
    if plan.module is not None:
        return dict(plan.module.mesh)
    layout: dict[str, Value] = {**vars(plan.degrees), **vars(plan.options)}
    if not plan.candidate.is_sharded:
        layout["sharding"] = None
    return layout


def _differing(first: Mapping[str, Value], second: Mapping[str, Value]) -> dict[str, ValuePair[Value]]:
    pairs = {name: ValuePair(first.get(name), second.get(name)) for name in {**first, **second}}
    return {name: pair for name, pair in pairs.items() if pair.first != pair.second}


def _terms(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, CostTerm]:
    return {kind: CostTerm(first[kind], second[kind]) for kind in first}


def sentences(first: Plan, second: Plan, names: Names = Names(), ranks_per_node: int | None = None) -> tuple[str, ...]:
    """Say why the first plan is predicted to be faster or slower: the largest time differences first, with causes,
    then memory and other differences. `ranks_per_node`: of their common cluster, if known."""
    comparison, first_s, second_s = compare(first, second), first.predicted.step_s, second.predicted.step_s
    lines = [_headline(first, second, names)]
    causes = Causes(first, second, ranks_per_node or first.options.ranks_per_node or second.options.ranks_per_node)
    min_s, rest = MIN_TIME_SHARE * max(first_s, second_s), 0.0
    largest = sorted(comparison.time, key=lambda kind: -abs(comparison.time[kind].difference))
    for place, kind in enumerate(largest):
        seconds = -comparison.time[kind].difference
        if place < MAX_TIME_KINDS and abs(seconds) >= min_s and seconds:
            cause = causes.cause(kind, seconds > 0)
            lines.append(f"{time_kind_name(kind)}: {_more_seconds(seconds)}{f': {cause}' if cause else ''}")
        else:
            rest += seconds
    if len(lines) > 1 and abs(rest) >= min_s / 10:
        lines.append(f"all others: {_more_seconds(rest)} in total")
    if memory := _memory_line(comparison):
        lines.append(memory)
    if first.money != second.money:
        prices = [
            "not given" if plan.money is None else format_amount(plan.money.per_million_tokens)
            for plan in (first, second)
        ]
        lines.append(f"price per million tokens: {prices[0]} for {names.first}, {prices[1]} for {names.second}")
    for name, plan in zip(names, (first, second), strict=True):
        if plan.not_yet:
            lines.append(f"{name} cannot be run yet: {', '.join(plan.not_yet)}")
    return (*lines, *_pricing_differences(comparison, names))


def _headline(first: Plan, second: Plan, names: Names) -> str:
    first_s, second_s = first.predicted.step_s, second.predicted.step_s
    first_words, second_words, per_token = f"{format_seconds(first_s)} per step", format_seconds(second_s), ""
    if first.tokens_per_step != second.tokens_per_step:  # steps of different sizes are not comparable
        first_s, second_s, per_token = 1 / first.tokens_per_s, 1 / second.tokens_per_s, " per token"
        first_words, second_words = f"{first.tokens_per_s:,.0f} tokens/s", f"{second.tokens_per_s:,.0f}"
    if first_s == second_s:
        return f"{names.first} is predicted as fast{per_token} as {names.second}: {first_words}"
    than = f"{describe_speed(first_s, second_s)}{per_token}"
    return f"{names.first} is predicted {than}: {first_words}, {names.second} {second_words}"


def _more_seconds(seconds: float) -> str:
    return f"{format_seconds(abs(seconds))} {'more' if seconds > 0 else 'less'}"


def _memory_line(comparison: Comparison) -> str:
    """Sentence about the fullest device, naming the kind with the largest difference."""
    num_bytes = -comparison.job_bytes.difference
    if not num_bytes:
        return ""
    kinds = {kind: -term.difference for kind, term in comparison.job_memory.items()}
    largest = max(kinds, key=lambda kind: kinds[kind] * (1 if num_bytes > 0 else -1))
    return f"memory: {_more_bytes(num_bytes)} on the fullest device; {_more_bytes(kinds[largest])} for {largest}"


def _more_bytes(num_bytes: float) -> str:
    return f"{format_bytes(int(abs(num_bytes)))} {'more' if num_bytes > 0 else 'less'}"


def _pricing_differences(comparison: Comparison, names: Names) -> Iterator[str]:
    """Sentences on differences in what the plans were priced for, which make them hard to compare."""
    for name, pair in comparison.priced_for.items():
        first, second = ("not given" if value is None else value for value in (pair.first, pair.second))
        yield f"{_PRICING_WORDS[name]}: {first} for {names.first}, {second} for {names.second}"


_PRICING_WORDS = {"profile": "executor", "software": "host times and rates", "device_type": "devices",
          "num_workers": "workers", "tokens_per_step": "tokens per step", "pool": "pool"}  # fmt: skip


def describe_inputs(first: Plan, second: Plan, names: Names = Names()) -> str:
    """Say whether two plans were made for the same inputs."""
    unrecorded = [name for name, plan in zip(names, (first, second), strict=True) if plan.made_for is None]
    if unrecorded:
        return f"not recorded by {' and '.join(unrecorded)}"
    different = compare(first, second).made_for
    return f"a different {' and a different '.join(different)}" if different else "the same"
