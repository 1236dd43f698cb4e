"""HTTP by its standards: HEAD as well as GET, `Allow`, no ignored parameter, a complete OpenAPI document."""

import re
import socket
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.processes import await_that
from tests.service.control_plane import ControlPlane, spec

ABSENT = "/v1/jobs/job-aaaaaaaaaaaa"
READ = ["/v1/jobs", "/v1/schema", "/v1/cluster", "/healthz", "/readyz", "/docs", "/openapi.json", ABSENT]


@pytest.mark.parametrize("path", READ)
def test_head_answers_as_get_does_without_the_body(plane: ControlPlane, path: str) -> None:
    got, head = plane.http.get(path), plane.http.head(path)
    assert (head.status_code, head.content) == (got.status_code, b"")
    volatile_headers = {"date", "transfer-encoding"}
    assert {k: v for k, v in head.headers.items() if k not in volatile_headers} == {
        k: v for k, v in got.headers.items() if k not in volatile_headers
    }


@pytest.mark.parametrize("stream", ["events", "logs?follow=true"])
def test_the_head_of_a_stream_ends(plane: ControlPlane, stream: str) -> None:
    job = plane.post(resources={"num_workers": 900})
    for _ in range(2):  # on one connection: the first must leave it in order
        head = plane.http.head(f"/v1/jobs/{job['id']}/{stream}")
        assert (head.status_code, head.content) == (200, b"")
    await_that(lambda: "shardyard_event_streams 0.0" in plane.http.get("/metrics").text, lambda: "its writer goes on")


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("DELETE", "/v1/jobs", "HEAD, GET, POST"),
        ("PUT", "/v1/schema", "HEAD, GET"),
        ("GET", f"{ABSENT}/cancel", "POST"),
        ("HEAD", f"{ABSENT}/cancel", "POST"),
    ],
)
def test_allow_names_every_method_of_a_path(plane: ControlPlane, method: str, path: str, allow: str) -> None:
    answer = plane.http.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allow)


UNKNOWN = [
    ("GET", "/v1/jobs?sate=queued", "query.sate"),
    ("GET", f"{ABSENT}?x=1", "query.x"),
    ("GET", f"{ABSENT}/metrics?max_point=1&since=2", "query.since"),
    ("GET", f"{ABSENT}/events?last=3", "query.last"),
    ("POST", f"{ABSENT}/cancel?force=true", "query.force"),
    ("GET", "/healthz?deep", "query.deep"),
]


@pytest.mark.parametrize(("method", "path", "parameter"), UNKNOWN)
def test_an_unknown_parameter_is_refused(plane: ControlPlane, method: str, path: str, parameter: str) -> None:
    answer = plane.http.request(method, path)
    assert answer.status_code == 422
    assert parameter in [error["path"] for error in answer.json()["errors"]]
    assert "is not a parameter of " in answer.json()["detail"]


_HOSTS = st.sampled_from(["127.0.0.1", "localhost", "[::1]", "LOCALHOST.", "evil.example"])
_AROUND = st.text("@:/?#[]. a1", max_size=3)


@given(before=_AROUND, name=_HOSTS, after=_AROUND)
@example("a@", "127.0.0.1", "")
@example("a:b@", "127.0.0.1", ":1")
@example("", "127.0.0.1", ":1:2")
@example("", "[", "")
@example("", "", "")
def test_a_host_is_one_of_ours_and_a_port_or_refused(plane: ControlPlane, before: str, name: str, after: str) -> None:
    host = f"{before}{name}{after}"
    is_ours = re.fullmatch(r"((127\.0\.0\.1|localhost)\.?|\[::1\])(:\d*)?", host.strip().lower())
    with socket.create_connection(("127.0.0.1", plane.port)) as connection:
        # Raw socket: an HTTP client would normalize the host, or not send it.
        connection.sendall(f"GET /v1/jobs HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        status = connection.recv(100).split()[1]
    assert status in ((b"200",) if is_ours else (b"400", b"421"))


# The document matches the behaviour

JSON, TEXT = {"content-type": "application/json"}, {"content-type": "text/plain"}
REFUSALS: list[tuple[str, str, str, int, dict[str, Any]]] = [
    ("GET", "/v1/jobs", "/v1/jobs", 401, {"headers": {"authorization": ""}}),
    ("GET", "/v1/jobs", "/v1/jobs", 403, {"headers": {"origin": "https://evil.example"}}),
    ("GET", "/v1/jobs", "/v1/jobs", 421, {"headers": {"host": "evil.example"}}),
    ("GET", "/v1/jobs", "/v1/jobs", 422, {"params": {"limit": 0}}),
    ("GET", "/v1/jobs/{job_id}", ABSENT, 404, {}),
    ("GET", "/v1/jobs/{job_id}/events", f"{ABSENT}/events", 404, {}),
    ("GET", "/v1/jobs/{job_id}/logs", f"{ABSENT}/logs", 404, {}),
    ("GET", "/v1/jobs/{job_id}/plan", f"{ABSENT}/plan", 404, {}),
    ("GET", "/v1/jobs/{job_id}/metrics", f"{ABSENT}/metrics", 404, {}),
    ("GET", "/v1/jobs/{job_id}/checkpoints", f"{ABSENT}/checkpoints", 404, {}),
    ("POST", "/v1/jobs/{job_id}/pause", f"{ABSENT}/pause", 404, {}),
    ("POST", "/v1/jobs/{job_id}/resume", "{queued}/resume", 409, {}),
    ("POST", "/v1/jobs", "/v1/jobs", 409, {"json": spec(name="b"), "headers": {"idempotency-key": "document"}}),
    ("POST", "/v1/jobs", "/v1/jobs", 400, {"content": b"{", "headers": JSON}),
    ("POST", "/v1/plans", "/v1/plans", 413, {"content": b" " * 1_000_001, "headers": JSON}),
    ("POST", "/v1/plans", "/v1/plans", 415, {"content": b"x", "headers": TEXT}),
    ("POST", "/v1/plans", "/v1/plans", 422, {"json": {}}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "route", "path", "status", "options"), REFUSALS, ids=[f"{c[0]} {c[1]} {c[3]}" for c in REFUSALS]
)
def test_each_refusal_is_in_the_document(
    token_plane: ControlPlane, method: str, route: str, path: str, status: int, options: dict[str, Any]
) -> None:
    document = token_plane.http.get("/openapi.json").json()
    waiting_job = token_plane.post(resources={"num_workers": 900})
    key_header = {"idempotency-key": "document"}
    assert token_plane.http.post("/v1/jobs", json=spec(name="a"), headers=key_header).status_code in (200, 201)
    answer = token_plane.http.request(method, path.format(queued=f"/v1/jobs/{waiting_job['id']}"), **options)
    assert answer.status_code == status
    content = document["paths"][route][method.lower()]["responses"][str(status)]["content"]
    assert list(content) == [answer.headers["content-type"]]
    jsonschema.validate(answer.json(), document["components"]["schemas"]["Problem"])


def test_the_document_says_how_to_authenticate(token_plane: ControlPlane, plane: ControlPlane) -> None:
    document = token_plane.http.get("/openapi.json").json()
    [(name, scheme)] = document["components"]["securitySchemes"].items()
    assert (scheme["type"], scheme["scheme"]) == ("http", "bearer")
    assert document["security"] == [{name: []}]
    for path, operations in document["paths"].items():
        for operation in operations.values():
            is_open = operation.get("security") == []
            assert token_plane.http.get(path, headers={"authorization": ""}).status_code != 401 or not is_open
            assert ("401" in operation["responses"]) is not is_open
            assert {"400", "403", "421", "422", "500", "503"} <= set(operation["responses"])
    assert "HTTPValidationError" not in str(document)
    assert plane.http.get("/openapi.json").json()["security"] == []


def test_a_replayed_post_is_in_the_document(plane: ControlPlane) -> None:
    responses = plane.http.get("/openapi.json").json()["paths"]["/v1/jobs"]["post"]["responses"]
    assert {"200", "201", "409", "507"} <= set(responses)
