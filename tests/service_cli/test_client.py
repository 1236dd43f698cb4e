"""The client: its requests over HTTP, and what it makes of each response."""

import json
import pickle
from pathlib import Path

import pytest

from moe.spec import JobSpec, SpecError
from service.client import ApiError, Client, ClientError, NotShardyard, Patience, Unreachable
from tests.processes import DEADLINE_S
from tests.service_cli.contract_server import JOB_ID, Script, serving

SPEC = {
    "name": "x", "model": {"preset": "gshard-tiny"}, "data": {"corpus": "catalogs"},
    "train": {"num_steps": 10, "batch_tokens": 1024},
}  # fmt: skip
JOB = {"id": JOB_ID, "name": "x", "state": "queued", "reason": "", "step": 0, "num_steps": 10}
PROBLEM = {
    "title": "The spec cannot run", "status": 422, "detail": "1 problem",
    "errors": [{"code": "out_of_range", "path": "train.num_steps", "value": 0, "rule": "must be positive",
                "remedy": "raise it"}],
}  # fmt: skip


def test_a_dict_a_spec_and_a_file_are_submitted_alike(tmp_path: Path) -> None:
    script = Script()
    script.answer("POST", "/v1/jobs", 201, JOB)
    yaml, as_json = tmp_path / "job.yaml", tmp_path / "job.json"
    yaml.write_text("name: x\nmodel: {preset: gshard-tiny}\ndata: {corpus: catalogs}\n"
                    "train: {num_steps: 10, batch_tokens: 1024}\n")  # fmt: skip
    as_json.write_text(json.dumps(SPEC))
    with serving(script) as url, Client(url) as client:
        jobs = [client.submit(source) for source in (SPEC, JobSpec.parse(SPEC), yaml, str(as_json))]
        client.submit(SPEC, idempotency_key="mine")
        yaml.write_text("name: x\nmodel: {preset: [}\n")
        with pytest.raises(SpecError, match="line 2, column 18"):  # before anything is sent
            client.submit(yaml)
    assert {job.id for job in jobs} == {JOB_ID}
    assert [JobSpec.parse(json.loads(body)) for *_, body in script.requests] == [JobSpec.parse(SPEC)] * 5
    keys = [headers["idempotency-key"] for _, _, headers, _ in script.requests]
    assert len(set(keys)) == 5, "each submission is one of its own"
    assert keys[-1] == "mine"
    assert all(headers["content-type"] == "application/json" for _, _, headers, _ in script.requests)


def test_the_token_comes_from_the_argument_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(job=JOB)
    monkeypatch.setenv("SHARDYARD_TOKEN", "from-the-environment")
    with serving(script) as url:
        monkeypatch.setenv("SHARDYARD_URL", url)
        with Client() as client:
            client.job(JOB_ID)
        with Client(url, token="from-the-argument") as client:
            client.job(JOB_ID)
    tokens = [headers["authorization"] for _, _, headers, _ in script.requests]
    assert tokens == ["Bearer from-the-environment", "Bearer from-the-argument"]


def test_problems_are_carried_and_read_like_the_librarys_own() -> None:
    script = Script()
    script.answer("POST", "/v1/jobs", 422, PROBLEM)
    with serving(script) as url, Client(url) as client, pytest.raises(ApiError) as error:
        client.submit(SPEC)
    assert error.value.status == 422
    assert error.value.problems[0].path == "train.num_steps"
    assert str(error.value) == "train.num_steps (=0) must be positive; raise it"


def test_jobs_are_fetched_page_by_page_and_no_further_than_asked() -> None:
    script = Script()
    script.answer("GET", "/v1/jobs", 200, {"items": [JOB] * 200, "next_cursor": "c2"})
    script.answer("GET", "/v1/jobs", 200, {"items": [JOB] * 50, "next_cursor": None})
    with serving(script) as url, Client(url) as client:
        assert len(list(client.jobs(state="queued", label="team=research"))) == 250
    first, second = (path for _, path, _, _ in script.requests)
    assert first == "/v1/jobs?state=queued&label=team%3Dresearch&limit=200"
    assert second.endswith("&cursor=c2")

    script = Script()
    script.answer("GET", "/v1/jobs", 200, {"items": [JOB] * 5, "next_cursor": "more"})
    with serving(script) as url, Client(url) as client:
        assert len(list(client.jobs(limit=5))) == 5
    assert len(script.requests) == 1


def test_requests_of_a_job_and_a_refusal() -> None:
    script = Script(job={**JOB, "state": "running"})
    script.answer("POST", f"/v1/jobs/{JOB_ID}/pause", 202, {})
    script.answer("POST", f"/v1/jobs/{JOB_ID}/cancel", 409, {"title": "Conflict", "detail": "it has ended"})
    with serving(script) as url, Client(url) as client:
        job = client.job(JOB_ID)
        script.job["state"] = "pausing"
        assert job.pause().state == "pausing"
        with pytest.raises(ApiError, match="it has ended") as error:
            job.cancel()
    assert error.value.status == 409


def test_an_id_never_becomes_another_path() -> None:
    script = Script()
    with serving(script) as url, Client(url) as client, pytest.raises(ApiError):
        client.job("../cluster?x=#y")
    assert script.requests[0][1] == "/v1/jobs/..%2Fcluster%3Fx%3D%23y"


def test_wait_rides_out_an_absence_and_gives_up_in_time() -> None:
    script = Script(job={**JOB, "state": "succeeded"})
    script.answer("GET", f"/v1/jobs/{JOB_ID}", 200, {**JOB, "state": "running"})
    script.answer("GET", f"/v1/jobs/{JOB_ID}", 200, {**JOB, "state": "running"})
    script.answer("GET", f"/v1/jobs/{JOB_ID}", 200, {**JOB, "state": "succeeded"})
    with serving(script) as url, Client(url) as client:
        assert client.job(JOB_ID).wait(timeout_s=DEADLINE_S).state == "succeeded"
    with serving(Script(job={**JOB, "state": "running"})) as url, Client(url) as client:
        job = client.job(JOB_ID)
        with pytest.raises(TimeoutError, match=f"{JOB_ID} is still running"):
            job.wait(timeout_s=0)
    impatient = Client(url, patience=Patience(away_s=0))
    job._connection, job._patience = impatient._connection, impatient._patience
    with impatient, pytest.raises(Unreachable):
        job.wait()


@pytest.mark.parametrize(
    ("status", "content_type", "body"),
    [(200, "text/html", b"<html>router</html>"), (404, "text/html", b"no"), (200, "application/json", b"{"),
     (500, "application/json", b"{}")],
)  # fmt: skip
def test_another_program_at_the_port_is_told_from_a_control_plane(status: int, content_type: str, body: bytes) -> None:
    script = Script()
    script.answer("GET", "/v1/cluster", status, body, content_type)
    with serving(script) as url, Client(url) as client, pytest.raises(NotShardyard, match="check the URL"):
        client.cluster()


def test_a_malformed_url_is_refused() -> None:
    for url in (
        "127.0.0.1:8321",
        "ftp://host",
        "http://",
        "nonsense",
        "http://[::1",
        "http://host:abc",
        "http://bü..c",
    ):
        with pytest.raises(ClientError, match="is not a control plane's URL"):
            Client(url)


def test_a_proxy_in_the_environment_does_not_stand_before_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    with serving(Script(job=JOB)) as url, Client(url) as client:
        assert client.job(JOB_ID).id == JOB_ID


def test_errors_cross_process_boundaries() -> None:
    for error in (
        ClientError("said"), Unreachable("http://x", "silent", is_refused=True),
        NotShardyard("http://x", 404, "text/html"), ApiError.from_problem(422, PROBLEM),
    ):  # fmt: skip
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))
