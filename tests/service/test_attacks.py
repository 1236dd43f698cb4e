"""Requests that must be refused: from other web pages and host names, for other folders, with other jobs' tokens."""

import json
import os
import socket
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from pydantic import ValidationError

from service.control.jobs.roots import StorageRoots
from service.control.jobs.stored_jobs import read_result
from service.settings import Settings
from tests.service.checkpoints import commit
from tests.service.control_plane import TOKEN, ControlPlane, spec
from tests.service.local_launcher import launches
from tests.service.test_streams import write_log

FOREIGN = [
    ("pages of another origin may not use this service", {"origin": "https://evil.example"}, 403),
    ("a page without an origin", {"origin": "null"}, 403),
    ("another port of this machine", {"origin": "http://127.0.0.1:1"}, 403),
    ("another scheme's page", {"origin": "file://"}, 403),
    ("an origin that is no URL", {"origin": "http://["}, 403),
    ("a form, as browsers mark it", {"sec-fetch-site": "cross-site"}, 403),
    ("a neighbouring site", {"sec-fetch-site": "same-site"}, 403),
    ("a name made to point here", {"host": "evil.example"}, 421),
    ("a name made to point here, its own page", {"host": "evil.example", "origin": "http://evil.example"}, 421),
    ("a name that begins like ours", {"host": "127.0.0.1.evil.example"}, 421),
    ("a name with a user in it", {"host": "127.0.0.1@evil.example"}, 421),
    ("a form's content type", {"content-type": "application/x-www-form-urlencoded"}, 415),
    ("plain text, as forms can send", {"content-type": "text/plain"}, 415),
    ("no content type", {"content-type": ""}, 415),
]


@pytest.mark.parametrize(("headers", "status"), [case[1:] for case in FOREIGN], ids=[case[0] for case in FOREIGN])
def test_no_web_page_posts_a_job(plane: ControlPlane, headers: dict[str, str], status: int) -> None:
    answer = plane.http.post("/v1/jobs", json=spec(), headers=headers)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
    assert "access-control-allow-origin" not in answer.headers
    assert plane.list_jobs() == []


def test_no_web_page_reads_jobs_or_acts_without_a_body(plane: ControlPlane) -> None:
    page = {"origin": "https://evil.example"}
    for method, path, headers, status in (
        ("POST", "/v1/jobs/job-aaaaaaaaaaaa/cancel", page, 403),
        ("GET", "/v1/jobs", page, 403),
        ("GET", "/v1/jobs", {"host": "evil.example:8321"}, 421),
        ("OPTIONS", "/v1/jobs", page, 403),
    ):
        assert plane.http.request(method, path, headers=headers).status_code == status


def test_a_request_with_two_hosts_is_refused(plane: ControlPlane) -> None:
    with socket.create_connection(("127.0.0.1", plane.port)) as connection:
        connection.sendall(b"GET /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400")


def test_own_pages_are_let_in(plane: ControlPlane) -> None:
    own_page = {"origin": plane.url, "sec-fetch-site": "same-origin"}
    assert plane.http.post("/v1/plans", json=spec(), headers=own_page).status_code == 200
    for host in (f"localhost:{plane.port}", "localhost", f"[::1]:{plane.port}"):
        assert plane.http.get("/v1/jobs", headers={"host": host}).status_code == 200


def test_answers_say_how_browsers_should_treat_them(plane: ControlPlane) -> None:
    headers = plane.http.get("/v1/jobs").headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert "default-src 'none'" in headers["content-security-policy"]


def test_the_page_for_people_runs_nothing(plane: ControlPlane) -> None:
    page = plane.http.get("/docs")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "<code>POST /v1/jobs/{job_id}/cancel</code>" in page.text
    assert "<script" not in page.text
    assert "//" not in page.text  # nothing from elsewhere


PATHS = ["..%2f..%2fetc%2fpasswd", "%2e%2e/%2e%2e/etc/passwd", "job-aaaaaaaaaaaa%2f..%2f..", "..", "job-aaaaaaaaaaa/"]


@pytest.mark.parametrize("path", PATHS)
def test_an_id_with_path_parts_reaches_no_file(plane: ControlPlane, path: str) -> None:
    for rest in ("", "/logs", "/checkpoints"):
        with socket.create_connection(("127.0.0.1", plane.port)) as connection:
            # Raw socket: an HTTP client would normalize the path.
            connection.sendall(f"GET /v1/jobs/{path}{rest} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            head = connection.recv(4000)
        assert head.split()[1] in (b"400", b"404", b"307"), head
        assert b"root:" not in head


def test_a_worker_name_with_path_parts_reaches_no_file(token_plane: ControlPlane) -> None:
    job = token_plane.post()
    for writer in ("a1.driver", "a1.g0.rank-0"):
        write_log(Path(job["storage"]), writer, 0, "a line\n")
    logs = f"/v1/jobs/{job['id']}/logs"
    assert token_plane.http.get(logs, params={"worker": "g0.rank-0"}).text == "a line\n"
    for worker in ("../../../spec.json", "a1.g0/../..", "../a1.driver", "g0.rank-0/../../a1.driver", "*", "."):
        assert token_plane.http.get(logs, params={"worker": worker}).status_code == 404


def test_links_in_a_log_folder_lead_to_no_file(token_plane: ControlPlane) -> None:
    job = token_plane.post()
    storage, other_folder = Path(job["storage"]), token_plane.folder / "outside"
    logs = storage / "logs"
    write_log(other_folder, "a9.driver", 0, "of another folder\n")
    write_log(storage, "a9.g0.rank-0", 0, "a line\n")
    (logs / "a9.g0.rank-0/segment-00000001.log").symlink_to(token_plane.folder / "state/attempt.key")
    os.mkfifo(logs / "a9.g0.rank-0/segment-00000002.log")
    (logs / "a9.driver").symlink_to(other_folder / "logs/a9.driver")
    answer = token_plane.http.get(f"/v1/jobs/{job['id']}/logs", params={"attempt": 9})
    assert (answer.status_code, answer.text) == (200, "a9.g0.rank-0 | a line\n")
    logs.rename(other_folder / "moved")
    logs.symlink_to(other_folder / "moved")
    assert token_plane.http.get(f"/v1/jobs/{job['id']}/logs").text == ""


@pytest.mark.slow
@pytest.mark.parametrize("place", ["the job's folder", "one above it"])
def test_nothing_is_read_where_a_folder_was_swapped_for_a_link(confined_plane: ControlPlane, place: str) -> None:
    job = confined_plane.finished_job(storage=str(confined_plane.folder / "root/team/a"))
    storage = Path(job["storage"])
    write_log(storage, "a1.driver", 0, "a line\n")
    commit(storage, 5)
    path = f"/v1/jobs/{job['id']}"
    assert confined_plane.http.get(f"{path}/logs").text == "a1.driver | a line\n"
    assert len(confined_plane.http.get(f"{path}/checkpoints").json()["items"]) == 1
    folder = storage if place == "the job's folder" else storage.parent
    aside = folder.rename(confined_plane.folder / "aside")
    folder.symlink_to(aside)
    try:
        assert confined_plane.http.get(f"{path}/logs").text == ""
        assert confined_plane.http.get(f"{path}/checkpoints").status_code == 503
        assert confined_plane.http.get(f"{path}/files").json()["items"] == []
        with pytest.raises(OSError, match="Not a directory"):
            read_result(StorageRoots([str(confined_plane.folder / "root")]).folder(str(storage)), 1)
    finally:
        folder.unlink()
        aside.rename(folder)


STORAGE = [
    "/etc", "/", "relative", "~/x", "{root}/../elsewhere", "{root}/%2e%2e/elsewhere", "{root}-elsewhere",
    "{root}/link-out", "{root}/link-out/deeper", "file:///etc", "file://{root}/../elsewhere", "local:///etc",
    "FILE:///etc", "s3://bucket/x", "memory://x", "http://127.0.0.1:1/x", "simplecache::file://{root}",
    "zip://x::{root}/a.zip", "dir::{root}", "{root}/a\x00b", "{root}/a\nb", "{root}/\u202egpj.exe",
    "{root}/a\u200bb", "{root}/*", "",
]  # fmt: skip


@pytest.mark.parametrize("storage", STORAGE)
def test_storage_lies_under_a_root(confined_plane: ControlPlane, storage: str) -> None:
    root = confined_plane.folder / "root"
    answer = confined_plane.http.post("/v1/jobs", json=spec(storage=storage.format(root=root)))
    assert answer.status_code == 422, answer.text
    assert answer.json()["errors"][0]["path"] == "storage"
    assert not (confined_plane.folder / "elsewhere").exists()
    assert list((confined_plane.folder / "outside").iterdir()) == []


@pytest.mark.sample(2)
@pytest.mark.parametrize("storage", ["{root}", "{root}/team/a", "file://{root}/b", "{root}/link-in"])
def test_storage_under_a_root_is_taken_and_each_job_has_its_own_folder(
    confined_plane: ControlPlane, storage: str
) -> None:
    root = confined_plane.folder / "root"
    jobs = [confined_plane.post(storage=storage.format(root=root)) for _ in range(2)]
    assert all(Path(job["storage"]).is_relative_to(root) for job in jobs)
    assert [Path(job["storage"]).name for job in jobs] == [job["id"] for job in jobs]
    for job in jobs:
        confined_plane.await_state(job["id"], "succeeded")


DATA = ["/etc/passwd", "{root}/../outside/secret.jsonl", "{root}/link-out/secret.jsonl", "http://127.0.0.1:1/x.jsonl",
        "simplecache::file:///etc/passwd", "memory://x.jsonl"]  # fmt: skip


@pytest.mark.parametrize("path", DATA)
def test_data_lies_under_a_root(confined_plane: ControlPlane, path: str) -> None:
    (confined_plane.folder / "secret.jsonl").write_text('{"source": "a", "target": "b", "lang": "c"}\n')
    data = {"corpus": "jsonl", "paths": [path.format(root=confined_plane.folder / "root")]}
    answer = confined_plane.http.post("/v1/jobs", json=spec(data=data))
    assert answer.status_code == 422, answer.text
    assert answer.json()["errors"][0]["path"] == "data.paths[0]"


@pytest.fixture(scope="module")
def confined_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane with one root, and links in it that lead in and out."""
    folder = tmp_path_factory.mktemp("confined")
    root, outside_folder = folder / "root", folder / "outside"
    (root / "in").mkdir(parents=True)
    outside_folder.mkdir()
    (root / "link-out").symlink_to(outside_folder)
    (root / "link-in").symlink_to(root / "in")
    control_plane = ControlPlane(folder, storage_roots=[str(root)], data_roots=[str(root)]).start()
    yield control_plane
    control_plane.close()


# Tokens


def test_nothing_is_served_without_the_token(token_plane: ControlPlane) -> None:
    for authorization in (
        "",
        "Bearer",
        "Bearer wrong",
        f"Basic {TOKEN}",
        TOKEN,
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
    ):
        for method, path in (("GET", "/v1/jobs"), ("POST", "/v1/jobs"), ("GET", "/metrics"), ("GET", "/v1/cluster")):
            answer = token_plane.http.request(method, path, headers={"authorization": authorization})
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer"), (authorization, path)
    assert token_plane.http.get("/v1/jobs").status_code == 200
    assert token_plane.http.get("/healthz", headers={"authorization": ""}).status_code == 200


def test_readiness_without_the_token_names_no_host_and_no_path(own_plane: ControlPlane) -> None:
    own_plane.start(token=TOKEN)
    assert own_plane.http.get("/readyz").json()["holder"].startswith(socket.gethostname())
    stranger = {"authorization": ""}
    ready = {"status": "ready", "writing": "ok", "controller": "acting"}
    assert own_plane.http.get("/readyz", headers=stranger).json() == ready
    own_plane.database.unlink()
    assert str(own_plane.database) in own_plane.http.get("/readyz").json()["detail"]
    answer = own_plane.http.get("/readyz", headers=stranger)
    assert (answer.status_code, "shardyard.db" in answer.text) == (503, False)


UNSAFE = [
    ({"host": "0.0.0.0"}, "host (='0.0.0.0') is reachable from other machines and requires a token"),
    ({"host": "::"}, "host (='::') is reachable from other machines and requires a token"),
    ({"host": "192.168.1.2"}, "requires a token; set SHARDYARD_TOKEN, or listen on 127.0.0.1"),
    ({"host": "shardyard.example"}, "requires a token"),
    ({"token": "short"}, "token must have at least 16 characters"),
    ({"events_url": "ftp://x"}, "events_url (='ftp://x') must be an http or https URL"),
]


@pytest.mark.parametrize(("values", "message"), UNSAFE)
def test_unsafe_settings_are_refused(tmp_path: Path, values: dict[str, str], message: str) -> None:
    with pytest.raises(ValidationError) as error:
        Settings(state_dir=tmp_path, **values)
    assert message in str(error.value)
    assert "short" not in str(error.value).replace("shorter", "")


def test_safe_settings(tmp_path: Path) -> None:
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        Settings(state_dir=tmp_path, host=host)
    settings = Settings(state_dir=tmp_path, host="0.0.0.0", token=TOKEN)
    assert TOKEN not in repr(settings)
    assert settings.events_url == "http://127.0.0.1:8321"


def test_what_this_service_writes_is_its_own(plane: ControlPlane) -> None:
    state = plane.folder / "state"
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    for path in (state / "attempt.key", *state.glob("shardyard.db*")):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_attempt_tokens_are_in_no_database_log_or_command_line(token_plane: ControlPlane) -> None:
    hold = token_plane.hold()
    job = token_plane.post(labels={"hold": "hold"})
    token_plane.await_state(job["id"], "running")
    (launch,) = launches(job["storage"], 1)
    assert stat.S_IMODE(launch.stat().st_mode) == 0o600
    token = json.loads(launch.read_text())["token"]
    database_bytes = b"".join(path.read_bytes() for path in (token_plane.folder / "state").glob("shardyard.db*"))
    assert token.encode() not in database_bytes
    driver = token_plane.driver(job["id"])
    for text in (*driver.cmdline(), *driver.environ().values(), token_plane.log_text()):
        assert token not in text
    hold.unlink()
    token_plane.await_state(job["id"], "succeeded")


def test_tokens_are_in_no_traceback(own_plane: ControlPlane) -> None:
    own_plane.start(token=TOKEN)
    with closing(sqlite3.connect(own_plane.database)) as database:
        database.execute("ALTER TABLE writers RENAME TO gone")
        database.execute("ALTER TABLE jobs RENAME TO lost")
    attempt_token = "of-an-attempt-and-secret"
    records, headers = "/internal/v1/jobs/job-aaaaaaaaaaaa/records", {"authorization": f"Bearer {attempt_token}"}
    assert own_plane.http.post(records, headers=headers).status_code == 500
    for _ in range(2):
        answer = own_plane.http.get("/v1/jobs")
        assert (answer.status_code, answer.json()["type"]) == (500, "urn:shardyard:problem:internal")
    log = own_plane.log_text()
    assert "no such table" in log
    assert log.count("a request failed") == 3, "once each"
    for absent in ("Exception in ASGI application", TOKEN, attempt_token):
        assert absent not in log
