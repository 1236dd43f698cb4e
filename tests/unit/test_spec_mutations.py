"""Mutations of valid specs and plans: each problem has a path, a rule and a remedy."""

import copy
import json
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from moe.plan import Plan, TimeEstimate
from moe.spec import JobSpec, SpecError
from moe.spec.routers import ROUTERS
from tests.parity.trajectory import Degrees

JUNK: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 0.0, 1.5, -0.5, float("nan"), float("inf"), 2**53, 2**70,
    "", "x", "3", "auto", "x" * 300, "\ud800", "a\x00b", b"\xff",
    [], {}, [1], ["x"], [{}], [[]], {"a": 1}, {"name": "x"}, {1: 2}, (1,), {"x"}, object(),
]  # fmt: skip
KEYS: list[Any] = ["x", "", "a.b", 3, None, True, "\ud800", (1,)]
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


def specs() -> Iterator[dict[str, Any]]:
    """Specs with every kind of data, model, router and optimizer, as posted and with every field."""
    small = {"data": {"corpus": "catalogs"}, "train": {"num_steps": 10, "batch_tokens": 1024}}
    files = [{"source": "a", "target": "b", "lang": "de"}]
    requests = [yaml.safe_load(path.read_text()) for path in EXAMPLES]
    # Some files have a job and the facts of a cluster, or a sweep, whose jobs are made from the rest.
    requests = [request.get("spec", request) for request in requests]
    requests = [{key: value for key, value in request.items() if key != "sweep"} for request in requests]
    # A request with a folder becomes a spec only after reading the folder.
    requests = [request for request in requests if "from" not in request["model"]]
    for router in ROUTERS:
        consent = {"later_tokens_choose_too": "accepted"} if router == "expert_choice" else {}
        requests.append({**small, "model": {"preset": "gshard-tiny", "moe": {"router": router, **consent}}})
    model = {"preset": "gshard-tiny-dense"}
    requests.append({**small, "model": model, "data": {"corpus": "jsonl", "paths": ["/a"]}, "labels": {"a": "b"}})
    requests.append({**small, "model": model, "data": {"corpus": "text", "files": files}, "start_from": {"job": "a"}})
    adafactor = {**small["train"], "optimizer": {"name": "adafactor"}, "schedule": {"decay": "linear"}}
    resources = {"min_workers": 1, "max_workers": 4}
    requests.append({**small, "model": model, "train": adafactor, "resources": resources})
    for preset in ("qwen3-next-80b-a3b", "kimi-k2"):
        data, train = {"corpus": "synthetic"}, {"num_steps": 1, "batch_tokens": 8192}
        requests.append({"model": {"preset": preset}, "data": data, "train": train})
    options = {"width": 8, "names": ["a", {"b": None}]}
    model = {"kind": "module", "build": "mypackage.model:build", "options": options}
    data = {"corpus": "module", "batches": "mypackage.model:batch"}
    requests.append({"model": model, "data": data, "train": {"num_steps": 1}})
    for request in requests:
        yield request
        yield JobSpec.parse(request).model_dump(mode="json")


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values below the top."""
    if path:
        yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def mutate(draws: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    """A copy with one to three parts removed, replaced, wrapped or added."""
    fields = copy.deepcopy(fields)
    for _ in range(draws.randint(1, 3)):
        *parents, last = draws.choice(list(places(fields)) or [("x",)])
        parent: Any = fields
        for key in parents:
            parent = parent[key]
        match draws.choice(["leave out", "add", "wrap", "replace", "replace"]):
            case "leave out":
                parent.pop(last, None) if isinstance(parent, dict) else parent.pop(last)
            case "add" if isinstance(parent, dict):
                parent[draws.choice(KEYS)] = copy.deepcopy(draws.choice(JUNK))
            case "wrap" if last in parent or isinstance(parent, list):
                parent[last] = [parent[last]]
            case _:
                parent[last] = copy.deepcopy(draws.choice(JUNK))
    return fields


def assert_told(error: SpecError) -> None:
    assert error.problems
    for problem in error.problems:
        assert problem.path, problem
        assert problem.rule, problem
        assert problem.remedy, problem
    str(error).encode()  # any terminal can show it


def test_every_problem_of_a_wrong_spec_has_a_place_a_rule_and_a_remedy() -> None:
    draws, valid, num_refused = random.Random(0), list(specs()), 0
    for _ in range(4000):
        try:
            JobSpec.parse(mutate(draws, draws.choice(valid)))
        except SpecError as error:
            assert_told(error)
            num_refused += 1
    assert num_refused > 3000


@pytest.mark.parametrize("value", JUNK, ids=lambda value: type(value).__name__)
def test_what_is_no_mapping_is_told_so(value: Any) -> None:
    with pytest.raises(SpecError) as error:
        JobSpec.parse(value)
    assert_told(error.value)


FLAT = json.loads((Path(__file__).parents[1] / "golden/version-2/translate-100-to-english.json").read_text())
"""A plan of an earlier release."""


def plans() -> Iterator[dict[str, Any]]:
    plan = Degrees(expert=2).plan(8).model_dump(mode="json")
    trial = {"layout": {"expert": 2}, "predicted_step_s": 1.0, "measured_step_s": 2.0}
    yield plan
    yield {**plan, "predicted": TimeEstimate()}
    yield {**FLAT, "version": 1, "predicted": {"arithmetic_s": 1.0}}
    yield {**plan, "made_for": {"spec": "a", "cluster": "b", "planner": "c"}, "tried": [trial]}


def test_a_malformed_plan_is_told_so_and_nothing_else() -> None:
    draws, valid = random.Random(0), list(plans())
    for _ in range(1500):
        fields = mutate(draws, draws.choice(valid))
        if draws.random() < 0.2:
            fields["version"] = draws.choice([True, 1, 1.0, "1", None, [1]])
        try:
            Plan.model_validate(fields)
        except ValidationError:
            if all(isinstance(key, str) for key in fields):
                with pytest.raises(SpecError) as error:
                    Plan(**fields)
                assert_told(error.value)


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_malformed_field_of_any_release_is_told_so_and_nothing_else(version: int) -> None:
    valid = next(plans()) if version == 3 else {**FLAT, "version": version}
    for field in valid:
        for junk in JUNK:
            with suppress(ValidationError):
                Plan.model_validate({**valid, field: copy.deepcopy(junk)})


@pytest.mark.parametrize("prediction", [TimeEstimate(), {}, None, "soon"])
def test_true_is_no_version_of_a_plan(prediction: Any) -> None:
    fields = {**next(plans()), "version": True, "predicted": prediction}
    with pytest.raises(SpecError, match=r"^version \(=True\) must be 3; use one of them"):
        Plan(**fields)
