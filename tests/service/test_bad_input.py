"""Bad input is refused with its exact path, value, rule and remedy, and nothing is stored."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.spec import Problem
from tests.grid import num_cases
from tests.refusals import Summary, check
from tests.service.control_plane import ControlPlane, spec

BAD_SPECS: dict[str, tuple[dict[str, Any], Summary]] = {
    "unknown key": ({"nmae": "x"}, ("unknown_key", "nmae", "x")),
    "unknown key, deep": (
        {"train": {"num_steps": 1, "batch_tokens": 1024, "optimizer": {"name": "adamw", "lr": 1}}},
        ("unknown_key", "train.optimizer.lr", 1),
    ),
    "wrong type": (
        {"train": {"num_steps": "many", "batch_tokens": 1024}}, ("wrong_type", "train.num_steps", "many"),
    ),
    "no steps": ({"train": {"num_steps": 0, "batch_tokens": 1024}}, ("out_of_range", "train.num_steps", 0)),
    "degrees and workers": (
        {"parallel": {"expert": 2, "data": 2}, "resources": {"num_workers": 2}},
        ("mismatch", "parallel", "expert 2 x data 2"),
    ),
    "a degree that does not divide the workers": (
        {"parallel": {"expert": 2}, "resources": {"num_workers": 3}}, ("mismatch", "parallel", "expert 2"),
    ),
    "numbers beyond planning": (
        {"model": {"preset": "gshard-tiny", "moe": {"hidden_dim": 2**50}}},
        ("does_not_fit", "model", "5e+18 weights"),
    ),
    "corpus": ({"data": {"corpus": "wikipedia"}}, ("not_a_choice", "data.corpus", "wikipedia")),
    "storage elsewhere": ({"storage": "/etc/shardyard"}, ("not_allowed", "storage", "/etc/shardyard")),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_SPECS)
@pytest.mark.parametrize("route", ["/v1/jobs", "/v1/plans"])
def test_a_wrong_spec_is_refused(plane: ControlPlane, route: str, case: str) -> None:
    changes, expected = BAD_SPECS[case]
    answer = plane.http.post(route, json=spec(**changes))
    assert answer.status_code == 422, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert (problem["status"], problem["type"]) == (422, "urn:shardyard:problem:invalid-spec")
    [error] = problem["errors"]
    assert set(error) == {"code", "path", "value", "rule", "remedy"}
    assert problem["detail"] == str(Problem(**error))
    check([error], [expected])
    assert plane.http.get("/v1/jobs").json()["items"] == []
    assert plane.launcher.launches() == []


NOT_RUNNABLE: dict[str, dict[str, Any]] = {
    "side by side under FSDP": {"parallel": {"overlap": True, "expert": 2, "fsdp": 2, "sharding": "parameters"}},
    "fp8": {"train": {"num_steps": 1, "batch_tokens": 2048, "dtype": "fp8"}},
}


@pytest.mark.parametrize("feature", NOT_RUNNABLE)
@pytest.mark.parametrize("route", ["/v1/jobs", "/v1/plans"])
def test_what_nothing_executes_is_refused_before_anything_starts(plane: ControlPlane, route: str, feature: str) -> None:
    train = {"num_steps": 1, "batch_tokens": 2048}
    body = spec(**{"resources": {"num_workers": 2}, "train": train, **NOT_RUNNABLE[feature]})
    answer = plane.http.post(route, json=body)
    assert answer.status_code == 422, answer.text
    check(answer.json()["errors"], [("not_runnable", "parallel", None)])
    assert plane.http.get("/v1/jobs").json()["items"] == []
    cluster = {"num_nodes": 1, "devices_per_node": 2, "device": "h100"}
    plan = plane.http.post("/v1/plans", json={"spec": body, "cluster": cluster})
    assert any(feature in entry for entry in plan.json()["not_yet"])


def test_a_language_without_pairs_names_those_that_are_like_it(plane: ControlPlane) -> None:
    answer = plane.http.post("/v1/jobs", json=spec(data={"corpus": "catalogs", "languages": ["pt_XX"]}))
    assert answer.status_code == 422
    [error] = answer.json()["errors"]
    assert (error["path"], error["value"]) == ("data.languages[0]", "pt_XX")
    assert "pt_BR" in error["remedy"]


@pytest.fixture
def with_pairs(own_plane: ControlPlane) -> tuple[ControlPlane, Path]:
    """A control plane that may read a file of pairs in its folder."""
    folder = own_plane.folder
    own_plane.start(data_roots=[str(folder)])
    return own_plane, folder / "pairs.jsonl"


GOOD = '{"source": "Haus", "target": "house", "lang": "de"}\n'


def test_data_that_cannot_be_read(with_pairs: tuple[ControlPlane, Path]) -> None:
    plane, pairs = with_pairs
    pairs.write_text(GOOD)
    missing, files = f"{pairs}-not", [{"source": f"{pairs}.de", "target": f"{pairs}.en", "lang": "de"}]
    for data, path, value in (
        ({"corpus": "jsonl", "paths": [missing]}, "data.paths[0]", missing),
        ({"corpus": "jsonl", "paths": [str(pairs)], "source_column": "text"}, "data.source_column", "text"),
        ({"corpus": "text", "files": files}, "data.files[0].source", f"{pairs}.de"),
    ):
        answer = plane.http.post("/v1/jobs", json=spec(data=data))
        assert answer.status_code == 422, answer.text
        check(answer.json()["errors"], [("not_found", path, value)])
    assert plane.list_jobs() == []


def test_every_kind_of_bad_record_is_answered_at_once(with_pairs: tuple[ControlPlane, Path]) -> None:
    plane, pairs = with_pairs
    bad = ["{\n", '{"source": 1, "target": "x", "lang": "de"}\n', '{"source": "x"}\n']
    pairs.write_text(GOOD * 60_000 + "".join(bad * 2) + GOOD)
    data = {"corpus": "jsonl", "paths": [str(pairs)]}
    answer = plane.http.post("/v1/jobs", json=spec(data=data), timeout=60)
    assert answer.status_code == 422
    problems = answer.json()["errors"]
    assert [problem["path"] for problem in problems] == ["data.paths[0]"] * 2 + ["data.lang_column", "data"]
    assert problems[0]["value"] == f"{pairs}, line 60001"
    assert plane.list_jobs() == []
    answer = plane.http.post("/v1/jobs", json=spec(data={**data, "on_bad": "skip"}), timeout=60)
    assert answer.status_code == 201, answer.text


def test_a_body_may_begin_with_a_byte_order_mark(plane: ControlPlane) -> None:
    body = b"\xef\xbb\xbf" + json.dumps(spec()).encode()
    for kind in ("json", "yaml"):
        answer = plane.http.post("/v1/plans", content=body, headers={"content-type": f"application/{kind}"})
        assert answer.status_code != 400, answer.text


BAD_BODIES: dict[str, tuple[bytes, str, int, list[Summary]]] = {
    "broken JSON": (
        b'{"name": "x",\n "model": }', "json", 400, [("invalid_syntax", "body, line 2, column 11", None)]
    ),
    "broken YAML": (b"name: x\nmodel: [", "yaml", 400, [("invalid_syntax", "body, line 2, column 9", None)]),
    "not UTF-8": (b'{"name": "\xff"}', "json", 400, []),
    "no body": (b"", "json", 400, [("invalid_syntax", "body, line 1, column 1", None)]),
    "a list": (b"[]", "json", 422, [("wrong_type", "the spec", [])]),
    "too deep": (b"[" * 100_000, "json", 400, [("too_large", "body", None)]),
    "a number without end": (
        b'{"name": ' + b"9" * 100_000 + b"}", "json", 400, [("too_large", "body", None)]
    ),
    "another content type": (b"name: x", "plain", 415, []),
    "too large": (b" " * 1_000_001, "json", 413, []),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_BODIES)
def test_a_body_that_cannot_be_read(plane: ControlPlane, case: str) -> None:
    body, subtype, status, errors = BAD_BODIES[case]
    content_type = "text/plain" if subtype == "plain" else f"application/{subtype}"
    answer = plane.http.post("/v1/jobs", content=body, headers={"content-type": content_type})
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
    assert answer.json()["detail"]
    check(answer.json().get("errors", []), errors)


def test_a_body_that_does_not_say_how_long_it_is_is_cut_off(plane: ControlPlane) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * 100_000

    answer = plane.http.post("/v1/jobs", content=endless(), headers={"content-type": "application/json"})
    assert answer.status_code == 413


def test_a_list_of_more_files_than_anybody_has(plane: ControlPlane) -> None:
    """Refused before any file is looked up."""
    for data, place in (
        ({"corpus": "jsonl", "paths": ["/data/*.jsonl"] * 1001}, "data.paths"),
        ({"corpus": "text", "files": [{"source": "/a", "target": "/b", "lang": "de"}] * 1001}, "data.files"),
        ({"corpus": "catalogs", "languages": ["de"] * 1001}, "data.languages"),
    ):
        [error] = plane.http.post("/v1/jobs", json=spec(data=data)).json()["errors"]
        assert (error["path"], error["rule"]) == (place, "must have at most 1000 entries")


def test_more_values_than_any_spec_has(plane: ControlPlane) -> None:
    for body in ({str(number): 1 for number in range(70_000)}, [[1] * 100] * 200):
        answer = plane.http.post("/v1/jobs", json=body)
        assert (answer.status_code, "at most 10,000 keys and values" in answer.json()["detail"]) == (400, True)


@settings(max_examples=num_cases(30), deadline=None)
@given(st.integers(21, 4000), st.integers(0, 80))
def test_an_answer_is_short_however_much_is_wrong(plane: ControlPlane, num_keys: int, length: int) -> None:
    wrong = {f"{number}{'x' * length}": "y" * length for number in range(num_keys)}
    answer = plane.http.post("/v1/plans", json=spec(**wrong))
    assert answer.status_code == 422
    assert len(answer.content) < 100_000
    assert answer.json()["detail"].endswith(f"and {num_keys - 20:,} more")
    assert len(answer.json()["errors"]) == min(num_keys, 100)


def test_a_key_of_a_megabyte_is_not_sent_back(plane: ControlPlane) -> None:
    answer = plane.http.post("/v1/plans", json=spec(**{"x" * 900_000: 1}))
    assert answer.status_code == 422
    assert len(answer.content) < 2000


BAD_QUERIES: dict[str, Summary] = {
    "jobs?state=dead": ("not_a_choice", "query.state", "dead"),
    "jobs?limit=0": ("out_of_range", "query.limit", "0"),
    "jobs?limit=many": ("wrong_type", "query.limit", "many"),
    "jobs?cursor=%00": ("invalid_value", "query.cursor", "\x00"),
    "jobs/{id}/metrics?max_points=9&limit=9": ("conflict", "query.max_points", 9),
    "jobs/{id}/metrics?cursor=%00&limit=9": ("invalid_value", "query.cursor", "\x00"),
    "jobs/{id}/metrics?name=": ("empty", "query.name", ""),
}


@pytest.mark.parametrize("query", BAD_QUERIES)
def test_a_query_that_makes_no_sense(plane: ControlPlane, query: str) -> None:
    answer = plane.http.get(f"/v1/{query.format(id=plane.post()['id'])}")
    assert answer.status_code == 422
    check(answer.json()["errors"], [BAD_QUERIES[query]])


def test_a_parameter_that_is_missing_is_to_be_added(plane: ControlPlane) -> None:
    answer = plane.http.post(f"/v1/jobs/{plane.post()['id']}/move")
    assert answer.status_code == 422
    check(answer.json()["errors"], [("missing", "query.to", None)])


@pytest.mark.parametrize(
    "job_id", ["job-aaaaaaaaaaaa", "job-x", "nonsense", "job-AAAAAAAAAAAA", "%00", "☃", "a" * 5000]
)
def test_an_unknown_id(plane: ControlPlane, job_id: str) -> None:
    parts = [("GET", part) for part in ("", "/plan", "/metrics", "/events", "/logs", "/checkpoints", "/nothing")]
    for method, part in (*parts, ("POST", "/cancel"), ("POST", "/pause"), ("POST", "/resume")):
        answer = plane.http.request(method, f"/v1/jobs/{job_id}{part}")
        assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json"), part


def test_numbers_that_json_cannot_hold_are_refused_by_their_place(plane: ControlPlane) -> None:
    for value in ("NaN", "Infinity", "1e999", "9" * 400):
        body = json.dumps(spec()).replace("1024", value).encode()
        answer = plane.http.post("/v1/jobs", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 422, value
        assert answer.json()["errors"][0]["path"] == "train.batch_tokens", answer.text
