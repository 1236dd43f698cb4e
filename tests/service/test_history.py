"""Events in pages, newest first; differences of two specs."""

from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.web.pages.compare import Row, spec_rows
from service.wire.spec_difference import spec_difference
from tests.service.control_plane import ControlPlane, spec
from tests.service.databases import BOTH_DATABASES
from tests.service.silent_run import Run, checkpoint, metric

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.0, 1.0, 1.5]) | st.sampled_from(["", "1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", "options"]), inner),
    max_leaves=8,
)
SCALARS = {"false": False, "0": 0, "0.0": 0.0, "true": True, "1": 1, "1.0": 1.0, '"1"': "1", "null": None}


@st.composite
def json_pairs(draw: st.DrawFn) -> tuple[Any, Any]:
    """Two values, often alike: of the second, some scalars are others of those that Python takes for the same."""
    value = draw(JSON)
    return value, draw(JSON) if draw(st.booleans()) else _with_other_scalars(draw, value)


def _with_other_scalars(draw: st.DrawFn, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_other_scalars(draw, element) for key, element in value.items()}
    if isinstance(value, list):
        return [_with_other_scalars(draw, element) for element in value]
    return draw(st.sampled_from([other for other in SCALARS.values() if other == value] or [value]))


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


@given(json_pairs())
def test_specs_without_differences_mean_the_same(pair: tuple[Any, Any]) -> None:
    spec, other = pair
    assert spec_difference(spec, spec) == []
    differences = spec_difference({"top": spec}, {"top": other})
    assert (differences == []) == (_meaning(spec) == _meaning(other))
    assert len(spec_difference({"top": other}, {"top": spec})) == len(differences)


def _meaning(value: Any, is_own: bool = False) -> str:
    """The same text for values that mean the same: numbers of a spec's fields as floats, those in `options` as they
    stand, mappings in order of their keys."""
    if isinstance(value, dict):
        return repr({key: _meaning(value[key], is_own or key == "options") for key in sorted(value)})
    if isinstance(value, list):
        return f"[{','.join(_meaning(element, is_own) for element in value)}]"
    return repr(value if is_own or type(value) is not int else float(value))


@pytest.mark.parametrize("path", ["train.evaluation.every_steps", "model.options.size"])
@pytest.mark.parametrize(("one", "two"), [*combinations(SCALARS, 2)])
def test_a_comparison_marks_what_differs(path: str, one: str, two: str) -> None:
    part, section, field = path.split(".")
    specs = [{part: {section: {field: SCALARS[text]}}} for text in (one, two, one)]
    is_same = {one, two} in ({"0", "0.0"}, {"1", "1.0"}) and section != "options"
    expected = [] if is_same else [Row(path, [(one, False), (two, True), (one, False)])]
    assert spec_rows(specs) == expected
