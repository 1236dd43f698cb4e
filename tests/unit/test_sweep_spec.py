"""Sweeps of a file: how many members, with which values, and what is refused."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from moe.spec import JobSpec, SpecError
from moe.spec.sweep import MAX_MEMBERS, SweepFieldSpec, SweepRequest, SweepSpec
from moe.spec.sweep.values import combinations, value_at
from tests.unit.test_spec import job

SWEEP = "sweep-aaaaaaaaaaaa"


def request(sweep: Any, **changes: Any) -> SweepRequest:
    return SweepRequest.parse(job(**changes) | {"sweep": sweep}, SWEEP)


def grid(**fields: Any) -> dict[str, Any]:
    return {"method": "grid", "fields": {name.replace("__", "."): field for name, field in fields.items()}}


def test_members_of_a_grid_are_jobs_with_names_labels_and_values() -> None:
    sweep = request(grid(train__seed={"values": [1, 2]}, train__clip_norm={"values": [None, 0.5]}), name="small")
    assert [dict(member.values) for member in sweep.members] == [
        {"train.seed": seed, "train.clip_norm": norm} for seed in (1, 2) for norm in (None, 0.5)
    ]
    assert [member.spec.name for member in sweep.members] == ["small-1", "small-2", "small-3", "small-4"]
    assert {member.spec.labels["sweep"] for member in sweep.members} == {SWEEP}
    assert [member.spec.train.clip_norm for member in sweep.members] == [None, 0.5, None, 0.5]
    assert all(JobSpec.parse(member.spec.model_dump(mode="json")) == member.spec for member in sweep.members)


def test_long_names_leave_room_for_the_number() -> None:
    sweep = request(grid(train__seed={"values": list(range(12))}), name="a" * 63)
    assert {len(member.spec.name) for member in sweep.members} == {63}
    assert len({member.spec.name for member in sweep.members}) == 12


def test_a_grid_over_ranges_has_both_ends() -> None:
    sweep = SweepSpec(**grid(train__optimizer__peak_lr={"min": 1e-4, "max": 1e-2, "scale": "log", "num_values": 3},
                             train__seed={"min": 1, "max": 3, "num_values": 3}))  # fmt: skip
    values = combinations(sweep)
    assert sorted({row["train.optimizer.peak_lr"] for row in values}) == [1e-4, 1e-3, 1e-2]
    assert sorted({row["train.seed"] for row in values}) == [1, 2, 3]


RANGES = st.tuples(
    st.one_of(st.integers(1, 1000), st.floats(1e-6, 1000)), st.one_of(st.integers(1, 1000), st.floats(1e-6, 1000))
).filter(lambda ends: ends[0] < ends[1])


@given(RANGES, st.sampled_from(["linear", "log"]), st.floats(0, 1, exclude_max=True))
def test_drawn_values_lie_in_their_range(ends: tuple[float, float], scale: str, fraction: float) -> None:
    field = SweepFieldSpec(min=ends[0], max=ends[1], scale=scale)
    value = value_at(field, fraction)
    assert ends[0] <= value <= ends[1]
    assert isinstance(value, int) == all(isinstance(end, int) for end in ends)


NUMBERS = st.one_of(st.integers(-(10**400), 10**400), st.integers(-99, 99), st.floats(allow_nan=True))
UNITS = st.none() | st.floats(0, exclude_min=True) | st.integers(1, 9)


@given(NUMBERS, NUMBERS, UNITS, st.sampled_from(["linear", "log"]))
def test_any_range_is_refused_or_has_values_within(low: float, high: float, unit: float | None, scale: str) -> None:
    field = {"min": low, "max": high, "scale": scale, "num_values": 4, "multiple_of": unit}
    try:
        sweep = SweepSpec.model_validate(grid(train__seed=field))
    except ValidationError:
        return
    assert all(low <= values["train.seed"] <= high for values in combinations(sweep))


@given(st.integers(1, 64), st.integers(1, 20), st.floats(0, 1, exclude_max=True))
def test_multiples(unit: int, count: int, fraction: float) -> None:
    field = SweepFieldSpec(min=unit, max=unit * (count + 1) + 1, multiple_of=unit)
    value = value_at(field, fraction)
    assert value % unit == 0
    assert unit <= value <= unit * (count + 1)


@given(st.integers(1, 40), st.integers(0, 2**40))
def test_drawn_members_are_as_many_as_requested_and_all_different(num_jobs: int, seed: int) -> None:
    fields = {"train.seed": {"min": 0, "max": 10**6}, "train.clip_norm": {"values": [0.5, 1.0, 2.0]}}
    sweep = SweepSpec(method="random", fields=fields, num_jobs=num_jobs, seed=seed)
    values = combinations(sweep)
    assert len({json.dumps(row) for row in values}) == num_jobs
    assert combinations(sweep) == values


def test_draws_do_not_depend_on_other_fields_or_the_number_of_jobs() -> None:
    one = SweepSpec(method="random", num_jobs=3, fields={"train.seed": {"min": 0, "max": 10**6}})
    fields = {"train.clip_norm": {"min": 0.1, "max": 1.0}, "train.seed": {"min": 0, "max": 10**6}}
    both = SweepSpec(method="random", num_jobs=5, fields=fields)
    assert [row["train.seed"] for row in combinations(one)] == [row["train.seed"] for row in combinations(both)][:3]


@given(st.lists(st.sampled_from([0.5, 1.0, -1.0, 2.0, "x", None]), unique_by=repr, min_size=1, max_size=6),
       st.lists(st.integers(-1, 3), unique=True, min_size=1, max_size=4))  # fmt: skip
def test_every_member_is_valid_or_all_are_refused(norms: list[Any], seeds: list[int]) -> None:
    """Each mistake is named once, with the values of a member that has it."""
    sweep = grid(train__clip_norm={"values": norms}, train__seed={"values": seeds})
    wrong = [norm for norm in norms if norm in (-1.0, "x")], [seed for seed in seeds if seed < 0]
    if not any(wrong):
        assert len(request(sweep).members) == len(norms) * len(seeds)
        return
    with pytest.raises(SpecError) as refusal:
        request(sweep)
    problems = refusal.value.problems
    assert sorted(repr(problem.value) for problem in problems) == sorted(map(repr, [*wrong[0], *wrong[1]]))
    assert {problem.path for problem in problems} <= {"train.clip_norm", "train.seed"}
    for problem in problems:
        assert f"{problem.path}={json.dumps(problem.value)}" in problem.rule


HALVING = {"method": "successive_halving", "fields": {"train.seed": {"values": list(range(9))}}, "min_steps": 10}


@pytest.mark.parametrize(
    ("num_steps", "changes", "rungs"),
    [
        (100, {}, (10, 30)),
        (100, {"rungs": 1}, (10,)),
        (100, {"factor": 2}, (10, 20, 40)),  # then one is left
        (30, {"factor": 2}, (10, 20)),
        (1000, {}, (10, 30)),
        (11, {}, (10,)),
    ],
)
def test_rungs(num_steps: int, changes: dict[str, Any], rungs: tuple[int, ...]) -> None:
    assert request({**HALVING, **changes}, train={"num_steps": num_steps, "batch_tokens": 1024}).rungs == rungs


LOG = {"min": 1, "max": 2, "scale": "log"}
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no method": ({"fields": {"train.seed": {"values": [1]}}}, "missing", "sweep.method"),
    "no fields": (grid(), "empty", "sweep.fields"),
    "unknown key": ({**grid(train__seed={"values": [1]}), "trials": 3}, "unknown_key", "sweep.trials"),
    "random without a number": ({"method": "random", "fields": {"train.seed": LOG}}, "missing", "sweep.num_jobs"),
    "grid over a range without a number": (grid(train__seed=LOG), "missing", "sweep.fields.train.seed.num_values"),
    "a number for a grid": ({**grid(train__seed={"values": [1]}), "num_jobs": 3}, "not_applicable", "sweep.num_jobs"),
    "log scale from 0": (
        grid(train__seed={**LOG, "min": 0, "num_values": 2}), "out_of_range", "sweep.fields.train.seed.min"),
    "ends in the wrong order": (
        grid(train__seed={"min": 2, "max": 1, "num_values": 2}), "out_of_range", "sweep.fields.train.seed.min"),
    "one end": (grid(train__seed={"min": 2}), "missing", "sweep.fields.train.seed"),
    "values and a range": (grid(train__seed={"values": [1], "max": 2}), "conflict", "sweep.fields.train.seed.max"),
    "a value twice": (grid(train__seed={"values": [1, 1]}), "duplicate", "sweep.fields.train.seed.values"),
    "text for a number": (
        grid(train__seed={"min": "1", "max": 2, "num_values": 2}), "wrong_type", "sweep.fields.train.seed.min"),
    "no multiple in the range": (
        grid(train__seed={"min": 5, "max": 7, "multiple_of": 4.0, "num_values": 2}), "out_of_range",
        "sweep.fields.train.seed.multiple_of"),
    "too many": (
        grid(train__seed={"min": 1, "max": 999, "num_values": 20}, train__clip_norm={**LOG, "num_values": 20}),
        "too_large", "sweep.fields"),
    "too many at random": (
        {"method": "random", "fields": {"train.seed": LOG}, "num_jobs": MAX_MEMBERS + 1}, "too_large",
        "sweep.num_jobs"),
    "more draws than combinations": (
        {"method": "random", "fields": {"train.seed": {"values": [1, 2]}}, "num_jobs": 3}, "out_of_range",
        "sweep.num_jobs"),
    "more draws than a range of whole numbers": (
        {"method": "random", "fields": {"train.seed": {"min": 1, "max": 2}}, "num_jobs": 3}, "out_of_range",
        "sweep.num_jobs"),
    "the name": (grid(name={"values": ["a"]}), "not_allowed", "sweep.fields.name"),
    "the storage": (grid(storage={"values": ["/a"]}), "not_allowed", "sweep.fields.storage"),
    "a label": (grid(labels__team={"values": ["a"]}), "not_allowed", "sweep.fields.labels.team"),
    "no path": (grid(train__={"values": [1]}), "invalid_value", "sweep.fields.train."),
    "a part and its field": (
        grid(train__optimizer={"values": [{"name": "muon"}]}, train__optimizer__peak_lr={"values": [0.1]}), "conflict",
        "sweep.fields.train.optimizer"),
    "an unknown field": (grid(train__sead={"values": [1]}), "unknown_key", "sweep.fields.train.sead"),
    "an unknown part": (grid(trian__seed={"values": [1]}), "unknown_key", "sweep.fields.trian.seed"),
    "a field of a number": (grid(train__seed__low={"values": [1]}), "wrong_type", "train.seed"),
    "an odd metric": ({**grid(train__seed={"values": [1]}), "metric": "bleu"}, "invalid_value", "sweep.metric"),
    "nothing evaluated": ({**HALVING, "metric": "held_out"}, "requires", "sweep.metric"),
    "halving without steps": ({**HALVING, "min_steps": None}, "missing", "sweep.min_steps"),
    "halving beyond the end": ({**HALVING, "min_steps": 10**6}, "out_of_range", "sweep.min_steps"),
    "too many rungs": ({**HALVING, "rungs": 20}, "out_of_range", "sweep.min_steps"),
    "halving over steps": (
        {**HALVING, "fields": {"train.num_steps": {"values": [50, 60]}}}, "not_allowed",
        "sweep.fields.train.num_steps"),
    "halving of one": ({**HALVING, "fields": {"train.seed": {"values": [1]}}}, "out_of_range", "sweep.fields"),
    "steps for a grid": ({**grid(train__seed={"values": [1]}), "min_steps": 5}, "not_applicable", "sweep.min_steps"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    sweep, code, path = REFUSED[case]
    with pytest.raises(SpecError) as refusal:
        request(sweep, train={"num_steps": 100, "batch_tokens": 1024})
    assert [(problem.code, problem.path) for problem in refusal.value.problems] == [(code, path)]
    assert all(problem.remedy for problem in refusal.value.problems)


def test_rungs_are_at_evaluations() -> None:
    train = {"num_steps": 100, "batch_tokens": 1024, "evaluation": {"every_steps": 4}}
    with pytest.raises(SpecError) as refusal:
        request(HALVING, train=train)
    assert [(problem.code, problem.path) for problem in refusal.value.problems] == [
        ("not_divisible", "sweep.min_steps")
    ]
    assert request({**HALVING, "min_steps": 8}, train=train).metric == "held_out"
    assert request({**HALVING, "metric": "loss"}, train=train).metric == "loss"


def test_a_label_of_the_sweep_is_taken() -> None:
    with pytest.raises(SpecError) as refusal:
        request(grid(train__seed={"values": [1]}), labels={"sweep": "mine"})
    assert refusal.value.problems[0].path == "labels.sweep"


def test_a_job_has_no_sweep() -> None:
    with pytest.raises(SpecError) as refusal:
        JobSpec.parse(job() | {"sweep": HALVING})
    assert (refusal.value.problems[0].code, refusal.value.problems[0].path) == ("not_allowed", "sweep")
