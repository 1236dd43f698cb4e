"""Fields of `resources` for Kubernetes: stored as given, or refused before a cluster is asked."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.spec import JobSpec, SpecError
from tests.kubernetes.templates import junk
from tests.refusals import expect_problem
from tests.unit.test_spec import job

LEVELS = 40


def resources(**fields: Any) -> JobSpec:
    return JobSpec.parse(job(resources={"num_workers": 1, **fields}))


def test_fields_survive_storing() -> None:
    template = {"metadata": {"labels": {"team": "a"}}, "spec": {"tolerations": [{"key": "spot"}]}}
    spec = resources(cluster="own", queue="team-a", priority="high.v2", pod_template=template)
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec
    assert spec.resources.pod_template == template


def nested(depth: int) -> dict[str, Any]:
    template: dict[str, Any] = {}
    for _ in range(depth):
        template = {"a": template}
    return template


@pytest.mark.parametrize(
    ("field", "value", "code", "path"),
    [
        ("cluster", "mine", "not_a_choice", "cluster"),
        ("queue", "Team A", "invalid_value", "queue"),
        ("queue", "", "invalid_value", "queue"),
        ("priority", "x" * 64, "too_large", "priority"),
        ("pod_template", [], "wrong_type", "pod_template"),
        ("pod_template", {"a": [float("nan")]}, "not_finite", "pod_template.a[0]"),
        ("pod_template", {"a": {"b": "\ud800"}}, "invalid_encoding", "pod_template.a.b"),
        ("pod_template", {"a": {1: 2}}, "wrong_type", "pod_template.a"),
        ("pod_template", {"a": 2**70}, "out_of_range", "pod_template.a"),
        ("pod_template", nested(LEVELS), "too_large", "pod_template" + ".a" * 33),
    ],
)
def test_what_is_refused(field: str, value: Any, code: Any, path: str) -> None:
    with expect_problem(code, f"resources.{path}"):
        resources(**{field: value})


@given(st.dictionaries(st.text(max_size=4), junk, max_size=3))
def test_any_template_is_stored_exactly_or_refused(template: dict[str, Any]) -> None:
    try:
        spec = resources(pod_template=template)
    except SpecError as error:
        (problem,) = error.problems
    else:
        assert JobSpec.model_validate_json(spec.model_dump_json()) == spec
        return
    assert problem.path.startswith("resources.pod_template")
