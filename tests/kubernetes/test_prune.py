"""What stays of watched objects."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.control.kubernetes import EVENTS, PODS, RAY_CLUSTERS, RAY_JOBS, WATCHED, WORKLOADS, Resource
from service.control.kubernetes.prune import prune
from service.control.kubernetes.watched import SUBMISSION_ANNOTATION, SUBMISSION_LABEL, WATCHED_KUEUE
from service.control.launcher.kuberay import names
from service.control.launcher.kuberay.facts import EventFacts, PodFacts, RayClusterFacts, RayJobFacts, WorkloadFacts
from tests.kubernetes import resources, test_any_facts

FIELDS = {entry.resource: entry.fields for entry in (*WATCHED, WATCHED_KUEUE)}
NUMBERS = st.integers(0, 9)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=3),
    lambda part: st.lists(part, max_size=3) | st.dictionaries(st.sampled_from("abc"), part, max_size=3),
    max_leaves=12,
)
TREES = st.recursive(st.none(), lambda tree: st.dictionaries(st.sampled_from("abc"), tree, max_size=3), max_leaves=8)


CLUSTERS = st.builds(resources.ray_cluster, st.sampled_from(["", "ready", "failed"]), test_any_facts.CONDITIONS)
WORKLOADS_OF_KUEUE = st.builds(resources.workload, test_any_facts.CONDITIONS)


@pytest.mark.parametrize(
    ("resource", "facts", "values"),
    [
        (RAY_JOBS, RayJobFacts, test_any_facts.JOBS.filter(bool)),
        (RAY_CLUSTERS, RayClusterFacts, CLUSTERS),
        (PODS, PodFacts, test_any_facts.PODS),
        (EVENTS, EventFacts, test_any_facts.EVENTS),
        (WORKLOADS, WorkloadFacts, WORKLOADS_OF_KUEUE),
    ],
    ids=lambda value: getattr(value, "plural", ""),
)
@given(data=st.data())
def test_nothing_that_an_observation_reads_is_pruned(
    resource: Resource, facts: Any, values: Any, data: st.DataObject
) -> None:
    value = data.draw(values)
    assert facts.parse(prune(value, FIELDS[resource])) == facts.parse(value)


def test_labels_are_those_of_the_launcher() -> None:
    assert (SUBMISSION_LABEL, SUBMISSION_ANNOTATION) == (names.SUBMISSION_LABEL, names.SUBMISSION_ANNOTATION)
    selectors = {f"{label}={value}" for label, value in names.PART_OF.items()}
    assert {entry.label_selector for entry in WATCHED} - {""} == selectors


@given(st.dictionaries(st.sampled_from("abc"), JSON), st.dictionaries(st.sampled_from("abc"), TREES))
def test_a_pruned_object_has_the_named_fields_alone(value: dict[str, object], fields: dict[str, object]) -> None:
    assert prune(value, fields) == slowly_pruned(value, fields)


def slowly_pruned(value: object, fields: object) -> object:
    if isinstance(value, list):
        return [slowly_pruned(item, fields) for item in value]
    if isinstance(value, dict) and isinstance(fields, dict):
        return {name: slowly_pruned(value[name], fields[name]) for name in value if name in fields}
    return value


def test_equal_parts_are_one_object_in_memory() -> None:
    first, second = (prune({"metadata": {"name": name, "labels": {"a": "b"}}}, FIELDS[PODS]) for name in "xy")
    assert first["metadata"]["labels"] is second["metadata"]["labels"]
