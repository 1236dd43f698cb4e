"""What bad input gets: the exact place, value, rule and remedy, and nothing stored."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.service.control_plane import ControlPlane, spec

_KNOWN = {"preset": "gshard-tiny"}

BAD_SPECS: list[tuple[str, dict[str, Any], str]] = [
    (
        "unknown key",
        {"nmae": "x"},
        "nmae (='x') is not a known key; remove it, or check its spelling",
    ),
    (
        "unknown key, deep",
        {"train": {"num_steps": 1, "batch_tokens": 1024, "optimizer": {"name": "adamw", "lr": 1}}},
        "train.optimizer.lr (=1) is not a known key; remove it, or check its spelling",
    ),
    (
        "wrong type",
        {"train": {"num_steps": "many", "batch_tokens": 1024}},
        "train.num_steps (='many') must be a whole number; write it as digits, without quotes",
    ),
    (
        "no steps",
        {"train": {"num_steps": 0, "batch_tokens": 1024}},
        "train.num_steps (=0) must be greater than 0; raise it",
    ),
    (
        "negative tokens",
        {"train": {"num_steps": 1, "batch_tokens": -1}},
        "train.batch_tokens (=-1) must be greater than 0; raise it",
    ),
    (
        "experts and degree",
        {
            "model": {**_KNOWN, "moe": {"num_experts": 63}},
            "parallel": {"expert": 8},
            "resources": {"num_workers": 8},
        },
        "model.moe.num_experts (=63) must be divisible by parallel.expert (=8); "
        "use 64 experts or an expert degree of 1, 3, 7, 9, 21 or 63",
    ),
    (
        "degrees and workers",
        {"parallel": {"expert": 2, "data": 2}, "resources": {"num_workers": 2}},
        "parallel (='expert 2 x data 2') must multiply to the number of workers (=2), not 4; "
        "use resources.num_workers 4, or leave one degree out",
    ),
    (
        "a degree that does not divide the workers",
        {"parallel": {"expert": 2}, "resources": {"num_workers": 3}},
        "parallel (='expert 2') must multiply to the number of workers (=3); use expert 1 x data 3",
    ),
    (
        "group and batch",
        {"train": {"num_steps": 1, "batch_tokens": 1000}},
        "model.moe.group_tokens (=512) must divide train.batch_tokens (=1000); use batch_tokens 512 or 1024",
    ),
    (
        "numbers beyond planning",
        {"model": {"preset": "gshard-tiny", "moe": {"hidden_dim": 2**50}}},
        "model (='5e+18 weights') is too large to plan; use smaller numbers",
    ),
    (
        "corpus",
        {"data": {"corpus": "wikipedia"}},
        "data.corpus (='wikipedia') must be one of 'catalogs', 'jsonl', 'text', 'synthetic', 'packages', "
        "'documents', 'chat', 'preference', 'module'; use one of them",
    ),
    (
        "storage elsewhere",
        {"storage": "/etc/shardyard"},
        "storage (='/etc/shardyard') must be under a storage root of this service; "
        "use a folder under {roots}, or omit it",
    ),
]


@pytest.mark.parametrize(
    ("changes", "said"), [case[1:] for case in BAD_SPECS], ids=[case[0] for case in BAD_SPECS]
)
@pytest.mark.parametrize("route", ["/v1/jobs", "/v1/plans"])
def test_a_wrong_spec_is_refused_in_words(
    plane: ControlPlane, route: str, changes: dict[str, Any], said: str
) -> None:
    answer = plane.http.post(route, json=spec(**changes))
    assert answer.status_code == 422, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["detail"] == said.format(roots=plane.folder / "state" / "storage")
    assert (problem["status"], problem["type"]) == (422, "urn:shardyard:problem:invalid-spec")
    error = problem["errors"][0]
    assert set(error) == {"code", "path", "value", "rule", "remedy"}
    assert said.startswith(f"{error['path']} (={error['value']!r})")
    assert plane.http.get("/v1/jobs").json()["items"] == []
    assert plane.launcher.launches() == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"parallel": {"context": 2}}, "context ranks"),
        ({"parallel": {"pipeline": 2}}, "pipeline stages"),
        ({"parallel": {"virtual_stages": 2}}, "pipeline stages"),
        ({"parallel": {"sharding": "optimizer", "fsdp": 2}}, "sharding of optimizer alone"),
        ({"parallel": {"sharding": "gradients", "fsdp": 2}}, "sharding of gradients alone"),
        ({"parallel": {"overlap": True, "expert": 2}}, "micro-batches side by side"),
        ({"train": {"num_steps": 1, "batch_tokens": 2048, "dtype": "fp8"}}, "fp8"),
    ],
    ids=str,
)
@pytest.mark.parametrize("route", ["/v1/jobs", "/v1/plans"])
def test_what_nothing_executes_is_refused_before_anything_starts(
    plane: ControlPlane, route: str, changes: dict[str, Any], told: str
) -> None:
    asked = {"resources": {"num_workers": 2}, "train": {"num_steps": 1, "batch_tokens": 2048}, **changes}
    answer = plane.http.post(route, json=spec(**asked))
    assert answer.status_code == 422, answer.text
    (error,) = answer.json()["errors"]
    assert error["remedy"]
    assert told in error["rule"]
    assert plane.http.get("/v1/jobs").json()["items"] == []
    cluster = {"num_nodes": 1, "devices_per_node": 2, "device": "h100"}
    planned = plane.http.post("/v1/plans", json={"spec": spec(**asked), "cluster": cluster})
    assert any(told in each for each in planned.json()["not_yet"])


def test_a_language_without_pairs_names_those_that_are_like_it(plane: ControlPlane) -> None:
    answer = plane.http.post("/v1/jobs", json=spec(data={"corpus": "catalogs", "languages": ["pt_XX"]}))
    assert answer.status_code == 422
    [error] = answer.json()["errors"]
    assert (error["path"], error["value"]) == ("data.languages[0]", "pt_XX")
    assert "pt_BR" in error["remedy"]


BAD_DATA: list[tuple[str, dict[str, Any], str]] = [
    (
        "a file that is not there",
        {"corpus": "jsonl", "paths": ["{folder}/no-such.jsonl"]},
        "data.paths[0] (='{folder}/no-such.jsonl') does not exist; check its spelling",
    ),
    (
        "a column that is not there",
        {"corpus": "jsonl", "paths": ["{folder}/pairs.jsonl"], "source_column": "text"},
        "data.source_column (='text') is not a column of {folder}/pairs.jsonl, line 1, which has 'source', 'target', "
        "'lang'; use one of those",
    ),
    (
        "a side that is not there",
        {"corpus": "text", "files": [{"source": "{folder}/no.de", "target": "{folder}/no.en", "lang": "de"}]},
        "data.files[0].source (='{folder}/no.de') does not exist; check its spelling",
    ),
]


@pytest.mark.parametrize(
    ("data", "said"), [case[1:] for case in BAD_DATA], ids=[case[0] for case in BAD_DATA]
)
def test_data_that_is_not_there(tmp_path: Path, data: dict[str, Any], said: str) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"source": "Haus", "target": "house", "lang": "de"}\n')
    own = ControlPlane(tmp_path, data_roots=[str(tmp_path)]).start()
    try:
        answer = own.http.post("/v1/jobs", json=spec(data=_in(str(tmp_path), data)))
        assert answer.status_code == 422, answer.text
        assert answer.json()["detail"].replace(str(tmp_path), "{folder}") == said
        assert own.http.get("/v1/jobs").json()["items"] == []
    finally:
        own.close()


def test_every_kind_of_bad_record_is_answered_at_once(tmp_path: Path) -> None:
    good = '{"source": "Haus", "target": "house", "lang": "de"}\n'
    bad = ["{\n", '{"source": 1, "target": "x", "lang": "de"}\n', '{"source": "x"}\n']
    (tmp_path / "pairs.jsonl").write_text(good * 60_000 + "".join(bad * 2) + good)
    data = {"corpus": "jsonl", "paths": [f"{tmp_path}/pairs.jsonl"]}
    own = ControlPlane(tmp_path, data_roots=[str(tmp_path)]).start()
    try:
        answer = own.http.post("/v1/jobs", json=spec(data=data), timeout=60)
        assert answer.status_code == 422
        problems = answer.json()["errors"]
        assert [problem["path"] for problem in problems] == [
            "data.paths[0]",
            "data.paths[0]",
            "data.lang_column",
            "data",
        ]
        assert problems[0]["value"] == f"{tmp_path}/pairs.jsonl, line 60001"
        assert own.http.get("/v1/jobs").json()["items"] == []
        (tmp_path / "pairs.jsonl").write_text(good * 60_000 + "".join(bad * 2) + good)
        answer = own.http.post("/v1/jobs", json=spec(data={**data, "on_bad": "skip"}), timeout=60)
        assert answer.status_code == 201, answer.text
    finally:
        own.close()


def test_a_body_may_begin_with_a_byte_order_mark(plane: ControlPlane) -> None:
    body = b"\xef\xbb\xbf" + json.dumps(spec()).encode()
    for kind in ("json", "yaml"):
        answer = plane.http.post("/v1/plans", content=body, headers={"content-type": f"application/{kind}"})
        assert answer.status_code != 400, answer.text


def _in(folder: str, data: Any) -> Any:
    """`data` with the folder's name in place of `{folder}`."""
    return json.loads(json.dumps(data).replace("{folder}", folder))


BAD_BODIES: list[tuple[str, bytes, str, int, str]] = [
    (
        "broken JSON",
        b'{"name": "x",\n "model": }',
        "application/json",
        400,
        "body, line 2, column 11 is not valid JSON: expected a value; correct the syntax there",
    ),
    (
        "broken YAML",
        b"name: x\nmodel: [",
        "application/yaml",
        400,
        "body, line 2, column 9 is not valid YAML: expected node content; correct the syntax there",
    ),
    (
        "not UTF-8",
        b'{"name": "\xff"}',
        "application/json",
        400,
        "the body is not valid UTF-8: invalid byte at offset 10",
    ),
    (
        "no body",
        b"",
        "application/json",
        400,
        "body, line 1, column 1 is not valid JSON: expected a value; correct the syntax there",
    ),
    (
        "a list",
        b"[]",
        "application/json",
        422,
        "the spec (=[]) must be a mapping of fields; write its fields below it",
    ),
    (
        "too deep",
        b"[" * 100_000,
        "application/json",
        400,
        "body is nested too deeply; use fewer levels",
    ),
    (
        "a number without end",
        b'{"name": ' + b"9" * 100_000 + b"}",
        "application/json",
        400,
        "body contains a number with too many digits; shorten it",
    ),
    (
        "another content type",
        b"name: x",
        "text/plain",
        415,
        "the body must be application/json or application/yaml, not 'text/plain'",
    ),
    (
        "too large",
        b" " * 1_000_001,
        "application/json",
        413,
        "a body of 1000001 bytes is too large; send at most 1,000,000 bytes",
    ),
]


@pytest.mark.parametrize(
    ("body", "content_type", "status", "said"),
    [case[1:] for case in BAD_BODIES],
    ids=[case[0] for case in BAD_BODIES],
)
def test_a_body_that_cannot_be_read(
    plane: ControlPlane, body: bytes, content_type: str, status: int, said: str
) -> None:
    answer = plane.http.post("/v1/jobs", content=body, headers={"content-type": content_type})
    assert (answer.status_code, answer.json()["detail"]) == (status, said)
    assert answer.headers["content-type"] == "application/problem+json"


def test_a_body_that_does_not_say_how_long_it_is_is_cut_off(plane: ControlPlane) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * 100_000

    answer = plane.http.post("/v1/jobs", content=endless(), headers={"content-type": "application/json"})
    assert answer.status_code == 413


def test_a_list_of_more_files_than_anybody_has(plane: ControlPlane) -> None:
    """Each would be looked up."""
    for data, place in (
        ({"corpus": "jsonl", "paths": ["/data/*.jsonl"] * 1001}, "data.paths"),
        ({"corpus": "text", "files": [{"source": "/a", "target": "/b", "lang": "de"}] * 1001}, "data.files"),
        ({"corpus": "catalogs", "languages": ["de"] * 1001}, "data.languages"),
    ):
        answer = plane.http.post("/v1/jobs", json=spec(data=data))
        assert answer.status_code == 422
        [error] = answer.json()["errors"]
        assert (error["path"], error["rule"]) == (place, "must have at most 1000 entries")
        assert error["remedy"]


def test_more_values_than_any_spec_has(plane: ControlPlane) -> None:
    for body in ({str(number): 1 for number in range(70_000)}, [[1] * 100] * 200):
        answer = plane.http.post("/v1/jobs", json=body)
        assert (answer.status_code, answer.json()["detail"]) == (
            400,
            "body must have at most 10,000 keys and values; refer to data by path instead of including it",
        )


@settings(max_examples=30, deadline=None)
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


BAD_QUERIES = [
    ("state=dead", "query.state (='dead') is not a job state; use one of queued, starting, running, recovering, "
                   "pausing, paused, succeeded, failed, cancelled, deleting"),
    ("limit=0", "query.limit (='0') must be greater than or equal to 1; correct it or omit it"),
    ("limit=many", "query.limit (='many') must be a whole number; "
                   "correct it or omit it"),
    ("cursor=%00", "query.cursor (='\\x00') is not a cursor of this service; use the next_cursor of a page"),
]  # fmt: skip


@pytest.mark.parametrize(("query", "said"), BAD_QUERIES)
def test_a_query_that_makes_no_sense(plane: ControlPlane, query: str, said: str) -> None:
    answer = plane.http.get(f"/v1/jobs?{query}")
    assert (answer.status_code, answer.json()["detail"]) == (422, said)


BAD_METRICS = [
    ("max_points=9&limit=9", "query.max_points (=9) selects fewer steps; limit and cursor page through all of them; "
                             "omit it, or omit limit and cursor"),
    ("cursor=%00&limit=9", "query.cursor (='\\x00') is not a cursor of this service; use the next_cursor of a page"),
    ("name=", "query.name (='') must have at least 1 character; correct it or omit it"),
]  # fmt: skip


@pytest.mark.parametrize(("query", "said"), BAD_METRICS)
def test_a_query_of_metrics_that_makes_no_sense(plane: ControlPlane, query: str, said: str) -> None:
    answer = plane.http.get(f"/v1/jobs/{plane.post()['id']}/metrics?{query}")
    assert (answer.status_code, answer.json()["detail"]) == (422, said)


def test_a_parameter_that_is_missing_is_to_be_added(plane: ControlPlane) -> None:
    answer = plane.http.post(f"/v1/jobs/{plane.post()['id']}/move")
    assert (answer.status_code, answer.json()["detail"]) == (422, "query.to is required; add it")


@pytest.mark.parametrize("path", ["", "/plan", "/metrics", "/events", "/logs", "/checkpoints"])
@pytest.mark.parametrize(
    "job_id", ["job-aaaaaaaaaaaa", "job-x", "nonsense", "job-AAAAAAAAAAAA", "%00", "☃", "a" * 5000]
)
def test_an_unknown_id(plane: ControlPlane, job_id: str, path: str) -> None:
    answer = plane.http.get(f"/v1/jobs/{job_id}{path}")
    assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json")


@pytest.mark.parametrize("action", ["cancel", "pause", "resume"])
def test_nothing_can_be_asked_of_an_unknown_job(plane: ControlPlane, action: str) -> None:
    answer = plane.http.post(f"/v1/jobs/job-aaaaaaaaaaaa/{action}")
    assert (answer.status_code, answer.json()["detail"]) == (404, "there is no job job-aaaaaaaaaaaa")


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/nothing", 404), ("DELETE", "/v1/jobs", 405)]
)
def test_what_is_not_served(plane: ControlPlane, method: str, path: str, status: int) -> None:
    answer = plane.http.request(method, path)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")


def test_values_that_json_cannot_hold_are_shown_all_the_same(plane: ControlPlane) -> None:
    body = json.dumps(spec()).replace('"small"', '"\\ud800"').encode()
    answer = plane.http.post("/v1/jobs", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400  # no UTF-8 text
    assert answer.json()["errors"][0]["path"] == "name"
    for value in ("NaN", "Infinity", "1e999", "9" * 400):
        body = json.dumps(spec()).replace("1024", value).encode()
        answer = plane.http.post("/v1/jobs", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 422, value
        assert answer.json()["errors"][0]["path"] == "train.batch_tokens", answer.text


def test_storage_that_cannot_be_written(own_plane: ControlPlane) -> None:
    blocked = own_plane.folder / "blocked"
    blocked.write_text("a file where a folder should be")
    own_plane.settings["storage_roots"] = [str(own_plane.folder)]
    own_plane.start()
    [error] = own_plane.http.post("/v1/jobs", json=spec(storage=str(blocked))).json()["errors"]
    assert error["path"] == "storage"
    assert error["rule"].startswith("cannot be written: ")
    assert own_plane.http.get("/v1/jobs").json()["items"] == []
