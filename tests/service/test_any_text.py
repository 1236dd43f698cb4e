"""Any text in any string of a request is answered or refused with a problem; the service never fails."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote_from_bytes

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe.spec import JobSpec
from tests.processes import DEADLINE_S, await_that
from tests.service.control_plane import ControlPlane, spec

ODD = st.sampled_from(
    ["\ud800", "a\udfff", "/x/\udcff/y", "\ud83d", "\0", "a\0b", "\u202e", "\u2066x", "\ufeff", "\u2028", "ü", "/ü/ä",
     "日本", "😀", "e\u0301", "\x1b[31m", "\r\n", "\x7f", "../..", "~", "~nobody/x", "%00", "%ed%a0%80", "file:///ü",
     "s3://ü/\0", "/" + "x/" * 3000, "x" * 5000, "ü" * 300, "\ud800" * 300, " ", "", "-", "a::b", "://", "\\",
     "job-\ud800",
     "{}", "{{x}}", "{0.__class__}", "$HOME", "None", "nan", "-0", "1e999", "'; drop table jobs; --"]
)  # fmt: skip
TEXT = st.one_of(
    ODD,
    st.text(st.characters(codec=None), max_size=40),
    st.text(st.characters(categories=["Cs", "Cc", "Cf"]), max_size=6),
)
_MODELS: list[dict[str, Any]] = [
    JobSpec.parse(spec(resources={"min_workers": 1, "max_workers": 2})).model_dump(mode="json"),
    spec(
        labels={"team": "a"},
        storage="/storage",
        data={"corpus": "jsonl", "files": {"de": ["/data/de.jsonl"]}},
        start_from={"job": "job-aaaaaaaaaaaa"},
    ),
    spec(model={"kind": "language", "preset": "mixtral-8x7b"}, data={"corpus": "documents", "files": ["/data/a.txt"],
         "tokenizer": "/data/tokenizer.json"}),
    spec(model={"kind": "language", "from": "/models/a", "adapter": {"rank": 4}},
         data={"corpus": "conversations", "files": ["/data/a.jsonl"]}),
    spec(model={"kind": "module", "build": "users.module:build", "arguments": {"a": "b"}}),
    {"spec": spec(), "cluster": {"device": "h100", "num_nodes": 1}, "software": "x", "profile": "y", "goal": "time"},
    {"prompt": "a text", "stop": ["b"], "seed": 1, "checkpoint": "step-1"},
    {"messages": [{"role": "user", "content": "a"}], "template_arguments": {"a": "b"}},
]  # fmt: skip
_POST_PATHS = ["/v1/jobs", "/v1/plans", "/v1/jobs/{job}/generate", "/internal/v1/jobs/{job}/records"]
_PATHS = [
    "/v1/jobs/{text}", "/v1/jobs/{text}/events", "/v1/jobs/{text}/logs", "/v1/jobs/{text}/metrics",
    "/v1/jobs/{job}/files/{text}", "/v1/jobs/{job}/files/logs/{text}", "/v1/jobs/{job}/files/checkpoints/{text}/x",
    "/v1/{text}", "/{text}", "/docs/{text}",
]  # fmt: skip
_QUERIES = {
    "/v1/jobs": ["state", "label", "name", "cursor", "limit", "count"],
    "/v1/jobs/{job}/logs": ["worker", "since", "grep", "attempt", "tail", "follow"],
    "/v1/jobs/{job}/metrics": ["name", "cursor", "since_step", "limit", "max_points"],
    "/v1/jobs/{job}/files": ["kind", "cursor", "limit"],
    "/v1/jobs/{job}/events": ["last_event_id"],
    "/v1/jobs/{job}/checkpoints": ["x"],
}
_HEADERS = ["idempotency-key", "last-event-id", "range", "authorization", "content-type", "accept", "origin",
            "sec-fetch-site", "host", "user-agent", "cookie"]  # fmt: skip
CLIENT_ERRORS = range(400, 500)
Place = tuple[str | int, ...]


def _places(value: Any, prefix: Place = ()) -> Iterator[Place]:
    """Places of all values."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in parts:
        yield (*prefix, key)
        yield from _places(inner, (*prefix, key))


def _replace_value(body: Any, place: Place, value: Any, *, is_key: bool) -> Any:
    copy = json.loads(json.dumps(body))
    inner = copy
    for part in place[:-1]:
        inner = inner[part]
    if is_key and isinstance(inner, dict):
        inner[value] = inner.pop(place[-1])
    else:
        inner[place[-1]] = value
    return copy


ODD_VALUES = st.sampled_from(
    [None, True, -1, 0, 1, 2**40, 2**53 - 1, 2**63, 10**30, 0.5, -0.0, 1e308, [], {}, [1], {"a": 1}, ["pt_BR"]]
)


@st.composite
def _bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    """A body with a text or another value at any place, or a text as any key."""
    model = draw(st.sampled_from(_MODELS))
    place = draw(st.sampled_from(list(_places(model))))
    is_key = draw(st.booleans())
    value = draw(TEXT if is_key else st.one_of(TEXT, ODD_VALUES))
    body = _replace_value(model, place, value, is_key=is_key)
    return draw(st.sampled_from(_POST_PATHS)), json.dumps(body).encode()


@pytest.fixture(scope="module")
def job(plane: ControlPlane) -> str:
    job = plane.post()
    plane.await_state(job["id"], "succeeded")
    return str(job["id"])


def _check(answer: httpx.Response, subject: object) -> None:
    assert answer.status_code < 400 or answer.status_code in CLIENT_ERRORS, (subject, answer.status_code, answer.text)
    if answer.status_code in CLIENT_ERRORS:
        assert answer.headers["content-type"] == "application/problem+json", (subject, answer.text)
        assert answer.json()["detail"], subject
        assert all(error["path"] and error["rule"] for error in answer.json().get("errors", [])), (subject, answer.text)


NO_DEADLINE = settings(deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.slow
@NO_DEADLINE
@given(post=_bodies())
def test_in_any_place_of_a_body(plane: ControlPlane, job: str, post: tuple[str, bytes]) -> None:
    path, body = post
    answer = plane.http.post(path.format(job=job), content=body, headers={"content-type": "application/json"})
    _check(answer, post)


@NO_DEADLINE
@given(path=st.sampled_from(_PATHS), text=TEXT, method=st.sampled_from(["GET", "HEAD", "POST", "DELETE", "PUT"]))
def test_in_any_part_of_a_path(plane: ControlPlane, job: str, path: str, text: str, method: str) -> None:
    target = path.format(job=job, text=quote_from_bytes(text.encode(errors="surrogatepass"), safe="/"))[:8000]
    answer = _raw(plane, method, target)
    if method != "HEAD":
        _check(answer, (method, target))
    assert answer.status_code < 500


@NO_DEADLINE
@given(place=st.sampled_from([(path, name) for path, names in _QUERIES.items() for name in names]), text=TEXT)
def test_in_any_parameter(plane: ControlPlane, job: str, place: tuple[str, str], text: str) -> None:
    path, name = place
    value = quote_from_bytes(text.encode(errors="surrogatepass"), safe="")[:8000]
    for query in (f"{name}={value}", f"{value}={name}"):
        _check(_raw(plane, "GET", f"{path.format(job=job)}?{query}"), (path, query))


@NO_DEADLINE
@given(name=st.sampled_from(_HEADERS), value=st.binary(max_size=300), text=TEXT, path=st.sampled_from(
    ["/v1/jobs", "/v1/jobs/{job}/files/spec.json", "/v1/jobs/{job}/events", "/readyz"]))  # fmt: skip
def test_in_any_header(plane: ControlPlane, job: str, name: str, value: bytes, text: str, path: str) -> None:
    for raw in (value, text.encode(errors="surrogatepass")):
        clean = bytes(byte for byte in raw if byte >= 32 and byte != 127)[:2000].strip()
        answer = _raw(plane, "GET", path.format(job=job), {name: clean})
        assert answer.status_code < 500, (name, clean, answer.text)


@pytest.mark.parametrize(("body", "path"), [
    ('{"name": "\\ud800"}', "name"), ('{"data": {"files": ["/data/\\udfff"]}}', "data.files[0]"),
    ('{"\\ud800": 1}', "\\ud800"), ('["\\ud800"]', "[0]"), ('"\\ud800"', "body"),
    ('{"storage": "/\\uDBFF"}', "storage"), ('{"prompt": "\\ud800"}', "prompt"),
    ('{"prompt": "a", "stop": ["\\udc00"]}', "stop[0]"),
    ('name: "\\ud800"', "body, line 1, column 10"), ('name: "\\U0000d800"', "body, line 1, column 10"),
])  # fmt: skip
@pytest.mark.parametrize("route", ["/v1/jobs", "/v1/plans", "/v1/jobs/{job}/generate"])
def test_half_a_surrogate_pair_is_refused(plane: ControlPlane, job: str, route: str, body: str, path: str) -> None:
    """JSON cannot hold it, so the answer is 400 on every route."""
    kind = "application/json" if body.startswith(("{", "[", '"')) else "application/yaml"
    answer = plane.http.post(route.format(job=job), content=body, headers={"content-type": kind})
    assert answer.status_code == 400, answer.text
    assert [error["path"] for error in answer.json()["errors"]] == [path]


def test_both_halves_of_a_surrogate_pair_are_a_character(plane: ControlPlane) -> None:
    body = json.dumps(spec(storage=f"{plane.folder}/state/storage/\U0001f600"))
    assert "\\ud83d\\ude00" in body
    answer = plane.http.post("/v1/plans", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text


@pytest.fixture(scope="module")
def ascii_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane of a process whose file names are ASCII."""
    plane = ControlPlane(tmp_path_factory.mktemp("ascii"))
    data = plane.folder / "data"
    data.mkdir()
    plane.settings["data_roots"] = [str(data)]
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    with (plane.folder / "control-plane.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", "import sys; assert sys.getfilesystemencoding() == 'ascii'\n"
             "from tests.service.control_plane import main; main()", json.dumps(plane.settings),
             str(plane.launcher.folder)], env=environment, stdout=log, stderr=log,
        )  # fmt: skip
    try:

        def answers() -> bool:
            assert process.poll() is None, (plane.folder / "control-plane.log").read_text()
            try:
                return plane.http.get("/readyz").status_code == 200
            except httpx.TransportError:
                return False

        await_that(answers)
        yield plane
    finally:
        process.terminate()
        process.wait(DEADLINE_S)
        plane.close()


@pytest.mark.slow
@settings(NO_DEADLINE)
@given(post=_bodies())
def test_in_any_body_where_file_names_are_ascii(ascii_plane: ControlPlane, post: tuple[str, bytes]) -> None:
    path, body = post
    answer = ascii_plane.http.post(
        path.format(job="job-aaaaaaaaaaaa"), content=body, headers={"content-type": "application/json"}
    )
    _check(answer, post)


@pytest.mark.parametrize(
    "changes",
    [
        {"storage": "/ü"},
        {"storage": "{state}/storage/ü"},
        {"data": {"corpus": "jsonl", "files": {"de": "{data}/ü.jsonl"}}},
        {"model": {"kind": "language", "from": "{data}/ü"}},
    ],
)
def test_a_name_that_the_file_system_cannot_hold_is_refused(ascii_plane: ControlPlane, changes: dict[str, Any]) -> None:
    text = json.dumps(spec(**changes)).replace("{state}", str(ascii_plane.folder / "state"))
    body = text.replace("{data}", str(ascii_plane.folder / "data"))
    for path in ("/v1/jobs", "/v1/plans"):
        answer = ascii_plane.http.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code in (400, 422), (path, answer.text)


@pytest.mark.slow
def test_a_command_prints_what_its_locale_cannot(plane: ControlPlane) -> None:
    job = plane.post(storage=f"{plane.folder}/state/storage/ü")
    command = [sys.executable, "-m", "service.cli.main", "show", job["id"]]
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "SHARDYARD_URL": plane.url}
    for arguments in (command, [*command, "--json"]):
        result = subprocess.run(
            arguments, env={**os.environ, **ascii_only}, capture_output=True, timeout=DEADLINE_S, check=False
        )
        assert (result.returncode, result.stderr) == (0, b"")
        assert result.stdout.isascii()


def _raw(plane: ControlPlane, method: str, target: str, headers: dict[str, bytes] | None = None) -> httpx.Response:
    """A request whose target and headers go out as they are."""
    url = httpx.URL(plane.url).copy_with(raw_path=target.encode())
    with plane.http.stream(method, url, headers=headers) as answer:
        if answer.headers.get("content-type", "").startswith("text/event-stream"):
            return httpx.Response(answer.status_code, headers=answer.headers)
        answer.read()
        return answer
