"""Specs with anything put in them: answered in words, never a failure of the service."""

import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from moe.spec import JobSpec
from tests.service.control_plane import ControlPlane, spec

_ODD = st.sampled_from(
    [None, True, -1, 0, 1, 2**40, 2**53 - 1, 2**63, 10**30, 0.5, -0.0, 1e308, "", "x", "é" * 300, "\0", "..", [], {},
     [1], {"a": 1}, ["pt_BR"], "auto", "0"]
)  # fmt: skip


def _places(given: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, value in given.items():
        yield (*here, key)
        if isinstance(value, dict):
            yield from _places(value, (*here, key))


_WHOLE = JobSpec.parse(spec(resources={"min_workers": 1, "max_workers": 2})).model_dump(mode="json")
_PLACES = sorted(_places(_WHOLE), key=str)


@given(st.lists(st.tuples(st.sampled_from(_PLACES), _ODD), min_size=1, max_size=3))
def test_no_spec_makes_the_service_fail(plane: ControlPlane, changes: list[tuple[tuple[Any, ...], Any]]) -> None:
    body = json.loads(json.dumps(_WHOLE))
    for place, value in changes:
        inner = body
        for key in place[:-1]:
            inner = inner.get(key) if isinstance(inner, dict) else None
        if isinstance(inner, dict):
            inner[place[-1]] = deepcopy(value)  # a later change may reach into it
    answer = plane.http.post("/v1/plans", json=body)
    assert answer.status_code in (200, 422), (changes, answer.text)
    if answer.status_code == 422:
        errors = answer.json()["errors"]
        assert errors
        assert all(error["path"] and error["rule"] for error in errors), errors
