"""Users' modules at the control plane: what the operator has not named is refused, and nothing is imported there."""

from typing import Any

import pytest

from tests.refusals import check
from tests.service.control_plane import ControlPlane

CODE = "a_users_module"


def module_spec(**changes: Any) -> dict[str, Any]:
    return {
        "model": {"kind": "module", "build": f"{CODE}:build"},
        "data": {"corpus": "module", "batches": f"{CODE}:batch"},
        "train": {"num_steps": 2},
        **changes,
    }


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/plans"])
def test_without_the_operators_word_no_function_is_taken(plane: ControlPlane, path: str) -> None:
    answer = plane.http.post(path, json=module_spec())
    assert (answer.status_code, answer.json()["type"]) == (422, "urn:shardyard:problem:invalid-spec")
    expected = [("not_allowed", "model.build", f"{CODE}:build"), ("not_allowed", "data.batches", f"{CODE}:batch")]
    check(answer.json()["errors"], expected)


def test_a_plan_for_another_cluster_is_refused_alike(plane: ControlPlane) -> None:
    body = {"spec": module_spec(), "cluster": {"num_nodes": 1, "devices_per_node": 2}}
    answer = plane.http.post("/v1/plans", json=body)
    assert (answer.status_code, len(answer.json()["errors"])) == (422, 2)


def test_one_that_is_allowed_allows_no_other(own_plane: ControlPlane) -> None:
    own_plane.settings["allowed_code"] = [f"{CODE}:build"]
    answer = own_plane.start().http.post("/v1/jobs", json=module_spec())
    (error,) = answer.json()["errors"]
    assert (error["path"], error["value"]) == ("data.batches", f"{CODE}:batch")
    assert error["remedy"] == f"ask the operator to add it to SHARDYARD_ALLOWED_CODE, or use one of {CODE}:build"
