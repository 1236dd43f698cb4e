"""Uploads over real sockets: resumed after kills, checked by hash, read by a job."""

import hashlib
import json
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.client import ApiError, Client, ClientError
from service.client.uploads import local_files
from service.control.store.clock import now_us
from service.wire.uploads import MAX_PART_BYTES
from tests.processes import DEADLINE_S, await_that
from tests.service.control_plane import ControlPlane, spec
from tests.service.databases import BOTH_DATABASES
from tests.unit.data_corpora import sentences, write_jsonl

PART = {"content-type": "application/octet-stream"}


def _file(content: bytes) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(content).hexdigest(), "size_bytes": len(content)}


def _patch(plane: ControlPlane, content: bytes, part: bytes, offset: int, **headers: str) -> httpx.Response:
    lengths = {"upload-offset": str(offset), "upload-length": str(len(content))}
    path = f"/v1/uploads/files/{hashlib.sha256(content).hexdigest()}"
    return plane.http.patch(path, content=part, headers={**PART, **lengths, **headers})


def test_an_upload_goes_on_after_its_control_plane_was_killed(own_plane: ControlPlane) -> None:
    """Also: wrong offsets, a wrong hash, foreign pages, and contents that are there under another name."""
    plane = own_plane.start(max_upload_bytes=100, max_uploads_bytes=150)
    content = bytes(range(90))
    body = {"files": {"a/b.jsonl": _file(content)}}
    begun = plane.http.post("/v1/uploads", json=body).json()
    assert begun["offsets"] == {_file(content)["sha256"]: 0}
    assert not begun["complete"]
    assert _patch(plane, content, content[:40], 0).json()["offset"] == 40
    plane.kill()
    plane.start()
    assert plane.http.post("/v1/uploads", json=body).json()["offsets"] == {_file(content)["sha256"]: 40}
    refused = _patch(plane, content, content[40:], 10)
    assert (refused.status_code, refused.headers["upload-offset"]) == (409, "40")
    assert _patch(plane, content, content, 40).status_code == 422
    assert _patch(plane, content, content[40:], 40, **{"sec-fetch-site": "cross-site"}).status_code == 403
    assert _patch(plane, content, content[40:], 40, **{"content-type": "text/plain"}).status_code == 415
    wrong = _patch(plane, content, bytes(50), 40)
    assert (wrong.status_code, wrong.json()["errors"][0]["path"]) == (422, "sha256")
    assert plane.http.post("/v1/uploads", json=body).json()["offsets"] == {_file(content)["sha256"]: 0}
    assert _patch(plane, content, content, 0).json()["complete"]
    stored = plane.http.post("/v1/uploads", json=body).json()
    assert stored["complete"]
    assert plane.http.post("/v1/uploads", json={"files": {"c": _file(content)}}).json()["complete"]
    files = plane.http.get(f"/v1/uploads/{stored['digest']}").json()["files"]
    assert files == [{"name": "a/b.jsonl", **_file(content)}]
    on_disk = plane.folder / "state/storage/.uploads/folders" / stored["digest"] / "a/b.jsonl"
    assert on_disk.read_bytes() == content
    assert plane.http.post("/v1/uploads", json={"files": {"big": _file(bytes(101))}}).status_code == 422
    assert plane.http.post("/v1/uploads", json={"files": {"more": _file(bytes(61))}}).status_code == 507
    for name in ("../x", "/x", "a//b", ".x", "a/../b", "a\\b", "%2e%2e/x", "a\nb", "x" * 300, "", "*"):
        answer = plane.http.post("/v1/uploads", json={"files": {name: _file(content)}})
        assert (answer.status_code, answer.json()["errors"][0]["path"]) == (422, "files"), name
    removed = plane.http.delete(f"/v1/uploads/{stored['digest']}")
    assert removed.status_code == 200
    assert not on_disk.exists()
    assert len(plane.http.get("/v1/uploads").json()["items"]) == 1


def send(url: str, folder: Path) -> dict[str, Any]:
    with Client(url) as client:
        return client.uploads.send(folder)


def test_a_killed_client_resumes_and_a_job_trains_on_the_upload(own_plane: ControlPlane, tmp_path: Path) -> None:
    plane = own_plane.start()
    folder = tmp_path / "corpus"
    folder.mkdir()
    write_jsonl(folder / "pairs.jsonl", sentences(200))
    large = folder / "large.bin"
    large.write_bytes(bytes(MAX_PART_BYTES * 3))
    program = "import sys; from service.client import Client; Client(sys.argv[1]).uploads.send(sys.argv[2])"
    client = subprocess.Popen([sys.executable, "-c", program, plane.url, str(folder)])
    parts = plane.folder / "state/storage/.uploads/parts"
    await_that(lambda: any(path.name[0].isdecimal() for path in parts.glob("*/*")) or client.poll() is not None)
    client.kill()
    client.wait()
    with ThreadPoolExecutor(2) as pool:  # two clients with the same content at once
        first, second = pool.map(lambda _: send(plane.url, folder), range(2))
    assert first == second
    assert not list(parts.glob("*"))
    named = f"{first['url']}/pairs.jsonl"
    job = plane.post(data={"corpus": "jsonl", "paths": [named]})
    assert first["digest"] in json.dumps(plane.job(job["id"])["spec"])
    assert plane.await_state(job["id"], "succeeded", "failed")["state"] == "succeeded"
    waiting = plane.post(data={"corpus": "jsonl", "paths": [named]}, resources={"num_workers": 1000})
    with Client(plane.url) as client_of_plane, pytest.raises(ApiError, match=waiting["id"]):
        client_of_plane.uploads.remove(first["url"])
    plane.act(waiting["id"], "cancel")
    plane.await_state(waiting["id"], "cancelled")
    with Client(plane.url) as client_of_plane:
        assert client_of_plane.uploads.remove(first["url"])["digest"] == first["digest"]
    for name in (named, "upload://nothing/x.jsonl"):
        answer = plane.http.post("/v1/jobs", json=spec(data={"corpus": "jsonl", "paths": [name]}))
        problem = answer.json()["errors"][0]
        assert (answer.status_code, problem["path"], problem["value"]) == (422, "data.paths[0]", name)


NUM_ROUNDS = 12


@BOTH_DATABASES
def test_of_a_job_and_the_removal_of_its_upload_one_succeeds(own_plane: ControlPlane, tmp_path: Path) -> None:
    plane = own_plane.start()
    folder = tmp_path / "pairs"
    folder.mkdir()
    write_jsonl(folder / "pairs.jsonl", sentences(20))
    outcomes = set()
    for number in range(NUM_ROUNDS):
        upload = send(plane.url, folder)
        data = {"corpus": "jsonl", "paths": [f"{upload['url']}/pairs.jsonl"]}
        body = spec(name=f"round-{number}", data=data, resources={"num_workers": 1000})
        start = threading.Barrier(2)

        def post(body: dict[str, Any], start: threading.Barrier) -> httpx.Response:
            start.wait(DEADLINE_S)
            return httpx.post(f"{plane.url}/v1/jobs", json=body, timeout=DEADLINE_S)

        def remove(digest: str, start: threading.Barrier) -> httpx.Response:
            start.wait(DEADLINE_S)
            return httpx.delete(f"{plane.url}/v1/uploads/{digest}", timeout=DEADLINE_S)

        with ThreadPoolExecutor(2) as pool:
            posting = pool.submit(post, body, start)
            removing = pool.submit(remove, upload["digest"], start)
        posted, removed = posting.result(), removing.result()
        outcomes.add((posted.status_code, removed.status_code))
        is_there = (plane.folder / "state/storage/.uploads/folders" / upload["digest"] / "pairs.jsonl").exists()
        assert (posted.status_code == 201) == (removed.status_code == 409) == is_there, (posted.text, removed.text)
        if posted.status_code == 201:
            plane.act(posted.json()["id"], "cancel")
    assert outcomes <= {(201, 409), (422, 200), (409, 200)}


def test_a_removal_that_a_killed_control_plane_began_is_ended_before_the_next_upload(
    own_plane: ControlPlane, tmp_path: Path
) -> None:
    plane = own_plane.start()
    folder = tmp_path / "pairs"
    folder.mkdir()
    write_jsonl(folder / "pairs.jsonl", sentences(20))
    upload = send(plane.url, folder)
    plane.kill()
    with closing(sqlite3.connect(plane.database)) as database, database:
        database.execute("INSERT INTO removed_uploads VALUES (?, 1, ?)", (upload["digest"], now_us()))
    plane.start()
    assert plane.http.get(f"/v1/uploads/{upload['digest']}").status_code == 404
    data = {"corpus": "jsonl", "paths": [f"{upload['url']}/pairs.jsonl"]}
    assert plane.http.post("/v1/jobs", json=spec(data=data)).status_code == 422
    assert send(plane.url, folder)["digest"] == upload["digest"]
    assert plane.http.post("/v1/jobs", json=spec(data=data)).status_code == 201


def test_a_link_to_a_folder_is_refused_and_a_hidden_one_left_out(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "corpus", tmp_path / "elsewhere"
    for parent in (folder, elsewhere):
        parent.mkdir()
        (parent / "pairs.jsonl").write_text("{}\n")
    (folder / ".cache").symlink_to(elsewhere)
    (folder / "linked.jsonl").symlink_to(elsewhere / "pairs.jsonl")
    assert local_files(folder) == {name: folder / name for name in ("linked.jsonl", "pairs.jsonl")}
    (folder / "part").symlink_to(elsewhere)
    with pytest.raises(ClientError, match=str(folder / "part")):
        local_files(folder)
