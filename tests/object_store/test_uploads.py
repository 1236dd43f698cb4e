"""Uploads and downloads of a control plane whose only storage is an object store, which is slow and fails meanwhile."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.client import Client
from service.wire.uploads import MAX_PART_BYTES
from tests.object_store.conftest import Store
from tests.object_store.proxy import Proxy, Refusal, Request
from tests.service.control_plane import ControlPlane
from tests.unit.data_corpora import sentences, write_jsonl

pytestmark = pytest.mark.slow


@pytest.fixture
def plane(store: Store, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ControlPlane]:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    plane = ControlPlane(tmp_path, storage_roots=[f"{store.scheme}://bucket/jobs"]).start()
    yield plane
    proxy.answer = lambda _request: None
    plane.close()


def _file(content: bytes) -> dict[str, object]:
    return {"sha256": hashlib.sha256(content).hexdigest(), "size_bytes": len(content)}


def test_a_job_trains_on_an_upload_and_its_files_are_read_in_parts(
    plane: ControlPlane, proxy: Proxy, store: Store, tmp_path: Path
) -> None:
    """Each request to the store takes a tenth of a second."""
    proxy.delay_s = 0.1
    folder = tmp_path / "corpus"
    folder.mkdir()
    write_jsonl(folder / "pairs.jsonl", sentences(200))
    (folder / "large.bin").write_bytes(bytes(MAX_PART_BYTES + 1))
    with Client(plane.url) as client:
        stored = client.uploads.send(folder)
        assert client.uploads.send(folder)["digest"] == stored["digest"]
    assert store.list_keys("jobs/.uploads/parts/") == []
    (key,) = [key for key in store.list_keys("jobs/.uploads/folders/") if key.endswith("/large.bin")]
    assert stored["digest"] in key
    job = plane.post(
        labels={"trains": "yes"}, data={"corpus": "jsonl", "paths": [f"{stored['url']}/pairs.jsonl"]},
        train={"num_steps": 2, "batch_tokens": 512, "evaluation": {"max_pairs": 4}},
    )  # fmt: skip
    ended = plane.await_state(job["id"], "succeeded", "failed")
    assert ended["state"] == "succeeded", ended["reason"]
    path = f"/v1/jobs/{job['id']}/files/spec.json"
    content = plane.http.get(path).content
    assert json.loads(content)["name"] == job["name"]
    for range, part in (("bytes=1-2", content[1:3]), ("bytes=5-", content[5:]), ("bytes=-7", content[-7:])):
        answer = plane.http.get(path, headers={"range": range})
        assert (answer.status_code, answer.content) == (206, part)
    assert plane.http.get(path, headers={"range": f"bytes={len(content)}-"}).status_code == 416
    with Client(plane.url) as client:
        client.uploads.remove(stored["url"])
    assert not store.list_keys("jobs/.uploads/folders/")


def test_a_part_that_the_store_refused_is_sent_again(plane: ControlPlane, proxy: Proxy, store: Store) -> None:
    content = bytes(range(200))
    body = {"files": {"a.bin": _file(content)}}
    sha256 = str(body["files"]["a.bin"]["sha256"])
    assert plane.http.post("/v1/uploads", json=body).json()["offsets"] == {sha256: 0}
    headers = {"content-type": "application/octet-stream", "upload-offset": "0", "upload-length": "200"}
    part = f"/v1/uploads/files/{sha256}"

    def refuse_writes(request: Request) -> Refusal | None:
        return store.denial if request.method in ("PUT", "POST") else None

    proxy.answer = refuse_writes
    refused = plane.http.patch(part, content=content, headers=headers)
    assert (refused.status_code, "refuses access" in refused.json()["detail"]) == (503, True)
    proxy.answer = lambda _request: None
    assert plane.http.post("/v1/uploads", json=body).json()["offsets"] == {sha256: 0}
    assert plane.http.patch(part, content=content, headers=headers).json()["complete"]
    assert plane.http.post("/v1/uploads", json=body).json()["complete"]
