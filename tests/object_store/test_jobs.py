"""Jobs whose storage is a real S3 server: trained, killed, resumed, listed, downloaded, exported and deleted, with a
store that is slow, refuses and comes back.

The driver trains for real in one process, without Ray, whose start takes half a minute.
"""

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.client import Client
from tests.object_store.proxy import EXPIRED, SLOW_DOWN, Proxy, Refusal, Request
from tests.object_store.s3_server import S3Server
from tests.processes import DEADLINE_S, await_that
from tests.service.control_plane import ControlPlane

pytestmark = pytest.mark.slow

ROOT = "s3://bucket/jobs"
TRAINS: dict[str, Any] = {
    "labels": {"trains": "yes"},
    "data": {"corpus": "catalogs", "languages": ["de"]},
    "train": {"num_steps": 12, "batch_tokens": 512, "evaluation": {"max_pairs": 4}},
    "checkpoint": {"every_steps": 3, "keep": 2},
}

SMALLEST = {
    "model": {"preset": "gshard-tiny"},
    "data": {"corpus": "catalogs"},
    "train": {"num_steps": 1, "batch_tokens": 512},
}


@pytest.fixture
def proxy(s3_proxy: Proxy) -> Proxy:
    return s3_proxy


@pytest.fixture
def plane(s3: S3Server, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ControlPlane]:
    """A control plane whose only storage is the S3 server behind the proxy."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")  # a store that stays away is told in seconds, not minutes
    plane = ControlPlane(tmp_path, storage_roots=[ROOT]).start()
    yield plane
    proxy.answer = lambda _request: None
    plane.close()


def test_a_job_is_trained_killed_resumed_read_and_deleted(plane: ControlPlane, s3: S3Server, tmp_path: Path) -> None:
    job_id = plane.post(**{**TRAINS, "labels": {"trains": "yes", "die_at": "8"}}, retry={"max_failures": 1})["id"]
    job = plane.await_state(job_id, "succeeded", "failed", "paused")
    assert (job["state"], job["attempt"]) == ("succeeded", 2), job["reason"]
    assert sorted(plane.losses(job_id)) == list(range(1, 13))
    resumed = [event.data for event in plane.events(job_id) if event.data.get("record") == "resumed"]
    assert [data["step"] for data in resumed if data["checkpoint"]] in ([3], [6])  # saves end some steps later
    checkpoints = plane.http.get(f"/v1/jobs/{job_id}/checkpoints").json()["items"]
    assert [(checkpoint["step"], checkpoint["fault"]) for checkpoint in checkpoints] == [(9, None), (12, None)]
    assert s3.num_open_uploads() == 0

    with Client(plane.url) as client:
        download = client.job(job_id).download(tmp_path / "copy")
    for path in ("spec.json", f"checkpoints/{checkpoints[-1]['name']}/__0_0.distcp"):
        stored = s3.client.get_object(Bucket="bucket", Key=f"jobs/{job_id}/{path}")["Body"].read()
        assert hashlib.sha256((download.folder / path).read_bytes()).digest() == hashlib.sha256(stored).digest()

    exported = tmp_path / "exported"
    command = [sys.executable, "-m", "service.cli.main", "export", job_id, exported, "--url", plane.url]
    subprocess.run(command, check=True, timeout=DEADLINE_S, stdout=subprocess.DEVNULL)
    assert (exported / "model.safetensors").stat().st_size > 1 << 20

    assert plane.http.delete(f"/v1/jobs/{job_id}").status_code in (200, 202)
    await_that(lambda: s3.list_keys() == [], lambda: f"{s3.list_keys()}")


def test_a_lost_database_is_recovered_from_the_bucket(plane: ControlPlane, tmp_path: Path) -> None:
    job_id = plane.post(**TRAINS)["id"]
    plane.await_state(job_id, "succeeded")
    plane.kill()
    for path in tmp_path.glob("state/shardyard.db*"):
        path.unlink()
    plane.start()
    await_that(lambda: plane.job(job_id).get("state") == "succeeded")  # recovered after the service is ready
    assert (plane.job(job_id)["name"], plane.job(job_id)["step"]) == ("small", 12)


def test_another_job_starts_from_a_checkpoint_in_the_bucket(plane: ControlPlane, s3: S3Server) -> None:
    first = plane.post(**TRAINS)["id"]
    plane.await_state(first, "succeeded")
    longer = {**TRAINS, "train": {**TRAINS["train"], "num_steps": 15}}
    second = plane.post(**longer, start_from={"job": first, "step": 12})["id"]
    assert plane.await_state(second, "succeeded", "failed")["state"] == "succeeded", plane.job(second)["reason"]
    assert sorted(plane.losses(second)) == [13, 14, 15]


def test_training_goes_on_while_the_store_is_slow(plane: ControlPlane, proxy: Proxy) -> None:
    proxy.delay_s = 0.5
    job_id = plane.post(**TRAINS)["id"]
    job = plane.await_state(job_id, "succeeded", "failed", "paused")
    assert job["state"] == "succeeded", job["reason"]
    events = [event for event in plane.events(job_id) if event.kind in ("metric", "checkpoint")]
    assert [event.data["step"] for event in events if event.kind == "checkpoint"][-1] == 12


@pytest.mark.parametrize("refusal", [SLOW_DOWN, EXPIRED])
def test_failed_saves_are_told_in_words_and_later_ones_succeed(
    plane: ControlPlane, proxy: Proxy, refusal: Refusal
) -> None:
    """From the second checkpoint on, until the control plane has said so."""

    def refuse_tensors(request: Request) -> Refusal | None:
        is_refused = (
            request.method in ("PUT", "POST") and "step-" in request.path and "step-00000003" not in request.path
        )
        return refusal if is_refused else None

    proxy.answer = refuse_tensors
    job_id = plane.post(**{**TRAINS, "train": {**TRAINS["train"], "num_steps": 100_000}})["id"]
    await_that(lambda: plane.job(job_id)["checkpoints_failing"], lambda: f"{plane.job(job_id)}\n{plane.log_text()}")
    reason = plane.job(job_id)["reason"]
    assert ("overloaded" if refusal == SLOW_DOWN else "refuses access") in reason
    assert "s3://bucket/jobs/" in reason or "resume from step 3" in reason
    proxy.answer = lambda _request: None
    await_that(lambda: not plane.job(job_id)["checkpoints_failing"], lambda: f"{plane.job(job_id)}")
    plane.act(job_id, "pause")
    job = plane.await_state(job_id, "paused", "failed")
    assert job["state"] == "paused", job["reason"]
    newest = plane.http.get(f"/v1/jobs/{job_id}/checkpoints").json()["items"][-1]
    assert (newest["step"], newest["fault"]) == (job["step"], None)


def test_what_is_answered_while_the_store_refuses(plane: ControlPlane, proxy: Proxy) -> None:
    """Each request fails in words, and nothing half made is left."""
    job_id = plane.post(**TRAINS)["id"]
    plane.await_state(job_id, "succeeded")
    proxy.answer = lambda _request: EXPIRED
    posted = plane.http.post("/v1/jobs", json=SMALLEST)
    assert posted.status_code == 422
    assert [(error["code"], error["path"]) for error in posted.json()["errors"]] == [("not_writable", "storage")]
    for path in ("files", "checkpoints", "logs"):
        answer = plane.http.get(f"/v1/jobs/{job_id}/{path}")
        assert (answer.status_code, "refuses access" in answer.json()["detail"]) == (503, True), answer.text
    assert "Traceback" not in plane.log_text()
    proxy.answer = lambda _request: SLOW_DOWN
    posted = plane.http.post("/v1/jobs", json=SMALLEST)
    assert (posted.status_code, "overloaded" in posted.json()["detail"]) == (503, True), posted.text
    proxy.answer = lambda _request: None
    assert json.loads(plane.http.get("/v1/jobs").text)["items"][0]["id"] == job_id


def test_a_deletion_waits_for_the_store(plane: ControlPlane, proxy: Proxy, s3: S3Server) -> None:
    job_id = plane.post(**TRAINS)["id"]
    plane.await_state(job_id, "succeeded")
    proxy.answer = lambda request: EXPIRED if request.method in ("DELETE", "POST") else None
    plane.http.delete(f"/v1/jobs/{job_id}")
    await_that(lambda: "refuses access" in plane.log_text())
    assert f"jobs/{job_id}/spec.json" in s3.list_keys()
    proxy.answer = lambda _request: None
    await_that(lambda: s3.list_keys() == [], lambda: f"{s3.list_keys()}")
