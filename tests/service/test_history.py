"""Events in pages, newest first; differences of two specs."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from service.wire.spec_difference import spec_difference
from tests.service.control_plane import ControlPlane, spec
from tests.service.databases import BOTH_DATABASES
from tests.service.silent_run import Run, checkpoint, metric

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)


@BOTH_DATABASES
def test_pages_of_events_are_all_events_newest_first(run: Run) -> None:
    run.send(0, metric(1), checkpoint(1), metric(2), checkpoint(2))
    run.end()
    events = [event.id for event in run.plane.events(run.id) if event.kind != "metric"]
    ids, cursor = [], None
    while True:
        query = {"limit": 2} | ({"cursor": cursor} if cursor else {})
        page = run.plane.http.get(f"/v1/jobs/{run.id}/history", params=query).json()
        ids += [event["id"] for event in page["items"]]
        if (cursor := page["next_cursor"]) is None:
            break
    assert ids == sorted(events, reverse=True)
    states = run.plane.http.get(f"/v1/jobs/{run.id}/history", params={"kind": "state"}).json()["items"]
    assert [states[-1]["data"]["state"], states[0]["data"]["state"]] == ["queued", "cancelled"]
    assert {event["kind"] for event in states} == {"state"}
    refusal = run.plane.http.get(f"/v1/jobs/{run.id}/history", params={"kind": "nonsense"})
    assert refusal.status_code == 422


@BOTH_DATABASES
def test_specs_differ_field_by_field(plane: ControlPlane) -> None:
    first = plane.post()
    second = plane.submit(spec(name="other", train={"num_steps": 7, "batch_tokens": 1024}))
    answer = plane.http.get(f"/v1/jobs/{first['id']}/difference", params={"other": second["id"]})
    differences = {entry["path"]: (entry["value"], entry["other"]) for entry in answer.json()["items"]}
    assert differences == {"name": ("small", "other"), "train.num_steps": (5, 7)}
    missing = plane.http.get(f"/v1/jobs/{first['id']}/difference", params={"other": "job-aaaaaaaaaaaa"})
    assert missing.status_code == 404


@given(JSON, JSON)
def test_specs_without_differences_are_equal(spec: Any, other: Any) -> None:
    assert spec_difference(spec, spec) == []
    differences = spec_difference({"top": spec}, {"top": other})
    assert (differences == []) == (repr(spec) == repr(other) or _same(spec, other))
    assert spec_difference({"top": other}, {"top": spec}) != [] or differences == []


def _same(one: Any, two: Any) -> bool:
    """Equality in which True is not 1, and the order of keys does not matter."""
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(_same(one[key], two[key]) for key in one)
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(map(_same, one, two))
    return type(one) is type(two) and one == two
