"""Files of a job over the API: only those meant for users, each complete under its name."""

import json
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.train.checkpoint import marker as markers
from moe.train.checkpoint.marker import FileSeal, Marker
from service.client import ApiError, Client, ClientError, Job, Patience, Unreachable
from service.client.connection import FilePart, ServiceConnection
from service.client.download import Downloader
from service.control.errors import NotFound
from service.control.jobs.roots import StorageRoots
from service.control.retention.job_files import JobFiles
from tests.processes import DEADLINE_S
from tests.service.checkpoints import commit, fault_of
from tests.service.control_plane import ControlPlane
from tests.service.local_launcher import launches
from tests.service.test_streams import most_memory, write_log

CHECKPOINT = "checkpoints/step-00000005.a1.g0"


@pytest.fixture(scope="module")
def job(plane: ControlPlane) -> dict[str, Any]:
    """A job that has ended, with two checkpoints and logs."""
    job = plane.finished_job()
    storage = Path(job["storage"])
    commit(storage, 5, size_bytes=3_000)
    commit(storage, 9, size_bytes=2_000)
    write_log(storage, "a1.driver", 0, "one\n")
    write_log(storage, "a1.g0.rank-0", 0, "two\n" * 500)
    return job


def get(plane: ControlPlane, job: dict[str, Any], path: str, **headers: str) -> tuple[int, bytes]:
    answer = plane.http.get(f"/v1/jobs/{job['id']}/files/{path}", headers=headers)
    return answer.status_code, answer.content


def list_files(plane: ControlPlane, job: dict[str, Any], **query: Any) -> list[dict[str, Any]]:
    answer = plane.http.get(f"/v1/jobs/{job['id']}/files", params=query)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["items"])


def test_what_is_listed_is_what_there_is_and_can_be_had(plane: ControlPlane, job: dict[str, Any]) -> None:
    files = list_files(plane, job)
    assert [file["path"] for file in files] == sorted(file["path"] for file in files)
    assert {file["path"] for file in files} == {
        "attempts/1/result.json", "spec.json", "logs/a1.driver/segment-00000000.log",
        "logs/a1.g0.rank-0/segment-00000000.log",
        *(f"checkpoints/step-0000000{step}.a1.g0{part}" for step in (5, 9)
          for part in (".commit.json", "/__0_0.distcp", "/run.json")),
    }  # fmt: skip
    for file in files:
        status, content = get(plane, job, file["path"])
        assert (status, content) == (200, (Path(job["storage"]) / file["path"]).read_bytes())
        assert len(content) == file["size_bytes"]
        assert file["sha256"] in (None, markers.seal(content).sha256)
        assert (file["sha256"] is not None) == (file["kind"] == "checkpoints")
    assert {file["kind"] for file in list_files(plane, job, kind=["spec", "logs"])} == {"spec", "logs"}
    pages, cursor = [], None
    while True:
        page = plane.http.get(
            f"/v1/jobs/{job['id']}/files", params={"limit": 3, **({"cursor": cursor} if cursor else {})}
        )
        pages += page.json()["items"]
        if (cursor := page.json()["next_cursor"]) is None:
            break
    assert pages == files
    assert plane.http.get(f"/v1/jobs/{job['id']}/files", params={"kind": "keys"}).status_code == 422


def test_a_rest_of_a_file(plane: ControlPlane, job: dict[str, Any]) -> None:
    path = f"{CHECKPOINT}/__0_0.distcp"
    _, content = get(plane, job, path)
    for start in (0, 1, 2_999):
        assert get(plane, job, path, range=f"bytes={start}-") == (206, content[start:])
    for range, part in (("bytes=1-2", content[1:3]), ("bytes=2990-9999", content[2990:]), ("bytes=-7", content[-7:])):
        assert get(plane, job, path, range=range) == (206, part)
    for range in ("bytes=5-2", "bytes=-", "bytes=0-1,4-5", "lines=1-2", "bytes=a-"):
        assert get(plane, job, path, range=range) == (200, content)
    answer = plane.http.get(f"/v1/jobs/{job['id']}/files/{path}", headers={"range": "bytes=1-2"})
    assert answer.headers["content-range"] == "bytes 1-2/3000"
    etag = answer.headers["etag"]
    assert get(plane, job, path, **{"range": "bytes=1-2", "if-range": etag}) == (206, content[1:3])
    assert get(plane, job, path, **{"range": "bytes=1-2", "if-range": '"another"'}) == (200, content)
    with closing(ServiceConnection(plane.url)) as connection:
        for start in (3_000, 3_001):
            answer = plane.http.get(f"/v1/jobs/{job['id']}/files/{path}", headers={"range": f"bytes={start}-"})
            assert (answer.status_code, answer.headers["content-range"]) == (416, "bytes */3000")
            assert answer.json()["type"] == "urn:shardyard:problem:range-not-satisfiable"
        with connection.download(f"/v1/jobs/{job['id']}/files/{path}", 3_000, DEADLINE_S) as rest:
            assert (rest.offset, list(rest.chunks)) == (3_000, [])
        with (
            pytest.raises(ApiError, match="must begin before the end of the file"),
            connection.download(f"/v1/jobs/{job['id']}/files/{path}", 3_001, DEADLINE_S),
        ):
            pass


def test_no_token_and_nothing_from_outside(plane: ControlPlane, job: dict[str, Any], tmp_path: Path) -> None:
    storage = Path(job["storage"])
    (launch,) = launches(storage, 1)
    token = json.loads(launch.read_text())["token"]
    secret = tmp_path / "secret"
    secret.write_text(token)
    links = {
        "logs/a1.driver/segment-00000007.log": launch,
        "logs/a1.driver/segment-00000008.log": secret,
        "logs/a2.driver": launch.parent,
        "attempts/2": launch.parent,
        "attempts/3/result.json": launch,
        "checkpoints/step-00000007.a1.g0": launch.parent,
    }
    for name, target in links.items():
        (storage / name).parent.mkdir(exist_ok=True)
        (storage / name).symlink_to(target)
    seal = FileSeal(size_bytes=launch.stat().st_size, sha256=markers.seal(launch.read_bytes()).sha256)
    sealed_again = Marker(
        step=7, attempt=1, group=0, num_workers=1, created_at="2026-01-31T12:00:00Z",
        files={launch.name: seal, f"../../attempts/1/{launch.name}": seal},
    )  # fmt: skip
    (storage / "checkpoints/step-00000007.a1.g0.commit.json").write_bytes(sealed_again.to_bytes())
    paths = [
        *links, f"attempts/1/{launch.name}", "attempts/2/result.json", "position",
        f"checkpoints/step-00000007.a1.g0/{launch.name}",
        f"checkpoints/step-00000007.a1.g0/../../attempts/1/{launch.name}",
        f"checkpoints/step-00000007.a1.g0/..%2f..%2fattempts/1/{launch.name}", "..%2f..%2fattempt.key",
        f"logs/../attempts/1/{launch.name}", "/etc/passwd", "%2fetc%2fpasswd", "logs/a1.driver", "",
    ]  # fmt: skip
    try:
        for path in (*paths, *(file["path"] for file in list_files(plane, job))):
            status, content = get(plane, job, path)
            assert token.encode() not in content
            assert status in ((404, 422, 503) if path in paths else (200,))
    finally:
        for name in (*links, "checkpoints/step-00000007.a1.g0.commit.json"):
            (storage / name).unlink()
        (storage / "attempts/3").rmdir()


ODD_MARKERS: dict[str, Callable[[Path, Path], object]] = {
    "link": lambda marker, _: marker.symlink_to("step-00000005.a1.g0.commit.json"),
    "link out": lambda marker, target: marker.symlink_to(target),
    "folder": lambda marker, _: marker.mkdir(),
    "pipe": lambda marker, _: os.mkfifo(marker),
    "torn": lambda marker, _: marker.write_bytes(b"{"),
    "deep": lambda marker, _: marker.write_bytes(b"[" * 3000),
    "huge": lambda marker, _: marker.touch() or os.truncate(marker, 1 << 30),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("odd", ODD_MARKERS)
def test_an_odd_marker_costs_no_other_checkpoint(plane: ControlPlane, odd: str, tmp_path: Path) -> None:
    job = plane.await_state(plane.post(labels={"fail": "yes"})["id"], "failed")
    checkpoints = Path(commit(job["storage"], 5) and f"{job['storage']}/checkpoints")
    (tmp_path / "outside").write_bytes((checkpoints / "step-00000005.a1.g0.commit.json").read_bytes())
    ODD_MARKERS[odd](checkpoints / "step-00000007.a1.g0.commit.json", tmp_path / "outside")
    answer = plane.http.get(f"/v1/jobs/{job['id']}/checkpoints")
    assert answer.status_code == 200, answer.text
    intact, faulty = answer.json()["items"]
    assert (intact["step"], intact["fault"]) == (5, None)
    assert (faulty["step"], bool(faulty["fault"])) == (7, True)
    assert ("bytes" in faulty["fault"]) == (odd == "huge"), faulty["fault"]
    assert {file["path"].split(".")[0] for file in list_files(plane, job, kind="checkpoints")} == {
        "checkpoints/step-00000005"
    }
    assert plane.act(job["id"], "resume").status_code == 202
    plane.act(job["id"], "cancel")


def test_a_large_file_costs_no_memory(plane: ControlPlane) -> None:
    job = plane.finished_job()
    commit(job["storage"], 5)
    large = Path(job["storage"]) / CHECKPOINT / "__0_0.distcp"
    os.truncate(large, 100_000_000)
    num_bytes, growth_bytes = most_memory(plane, f"/v1/jobs/{job['id']}/files/{CHECKPOINT}/__0_0.distcp")
    assert num_bytes == 100_000_000
    assert growth_bytes < 30e6
    # It no longer matches the marker, so it is not accepted as the checkpoint's.
    with Client(plane.url) as client, pytest.raises(ClientError, match="download it again"):
        client.job(job["id"]).download(large.parent.parent.parent.with_name("into"))


def test_a_download_goes_on_where_it_was(plane: ControlPlane, job: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / job["id"]
    draft = folder / CHECKPOINT / ".__0_0.distcp.part"
    draft.parent.mkdir(parents=True)
    draft.write_bytes((Path(job["storage"]) / CHECKPOINT / "__0_0.distcp").read_bytes()[:1000])
    with Client(plane.url) as client:
        client_job = client.job(job["id"])
        download = client_job.download(tmp_path)
        assert download.folder == folder
        assert set(download.fetched) == {file["path"] for file in list_files(plane, job)}
        assert fault_of(folder, "step-00000005.a1.g0") is None
        repeat = client_job.download(tmp_path)
        assert (repeat.fetched, set(repeat.kept)) == ([], set(download.fetched))
        newest = client_job.download(tmp_path / "newest", ["checkpoints"], latest=True)
        assert {Path(path).parts[1].split(".")[0] for path in newest.fetched} == {"step-00000009"}
        draft.write_bytes(b"x" * 10)  # of something else
        (folder / CHECKPOINT / "__0_0.distcp").unlink()
        with pytest.raises(ClientError, match="is wrong; download it again"):
            client_job.download(tmp_path)
        assert not (folder / CHECKPOINT / "__0_0.distcp").exists()
        client_job.download(tmp_path)
        assert fault_of(folder, "step-00000005.a1.g0") is None


def test_the_newest_checkpoint_is_the_one_that_a_run_resumes_from(plane: ControlPlane, tmp_path: Path) -> None:
    job = plane.finished_job()
    names = [commit(job["storage"], step, attempt=attempt) for step, attempt in ((3, 9), (3, 10), (2, 11))]
    with Client(plane.url) as client:
        newest = client.job(job["id"]).download(tmp_path, ["checkpoints"], latest=True)
    assert {Path(path).parts[1].removesuffix(markers.SUFFIX) for path in newest.fetched} == {names[1]}


@pytest.mark.parametrize("id", ["", ".", "..", "../x", "/etc", "a/b", "a\\b"])
def test_an_id_that_is_no_folder_s_name_is_not_believed(tmp_path: Path, id: str) -> None:
    wrong = pytest.raises(ClientError, match="which is not a folder name")
    with closing(ServiceConnection("http://127.0.0.1:9")) as connection, wrong:
        Job(connection, Patience(), {"id": id}).download(tmp_path)
    assert not list(tmp_path.iterdir())


class BreakingConnection(ServiceConnection):
    """A connection that breaks after `num_bytes`."""

    def __init__(self, url: str, num_bytes: int) -> None:
        super().__init__(url)
        self._left = num_bytes

    @contextmanager
    def download(
        self, path: str, start: int, silence_timeout_s: float, version: str | None = None
    ) -> Iterator[FilePart]:
        with super().download(path, start, silence_timeout_s, version) as part:
            yield replace(part, chunks=self._cut(part.chunks))

    def _cut(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            yield chunk[: self._left]
            if len(chunk) > self._left:
                raise Unreachable(self.url, "the connection broke")
            self._left -= len(chunk)


class FlakyConnection(BreakingConnection):
    """A connection of which each breaks after `num_bytes`."""

    def _cut(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        num_bytes = self._left
        yield from super()._cut(chunks)
        self._left = num_bytes


def test_a_download_goes_on_after_each_cut(plane: ControlPlane, job: dict[str, Any], tmp_path: Path) -> None:
    path = next(file["path"] for file in list_files(plane, job) if file["size_bytes"] > 1000)
    source, target = Path(job["storage"]) / path, tmp_path / path
    downloader = Downloader(BreakingConnection(plane.url, 500), f"/v1/jobs/{job['id']}", tmp_path)
    with pytest.raises(Unreachable):
        downloader.fetch_all()
    assert list(tmp_path.rglob(".*.part"))
    patience = Patience(away_s=DEADLINE_S, first_pause_s=0.01)
    connection = FlakyConnection(plane.url, 700)
    result = Downloader(connection, f"/v1/jobs/{job['id']}", tmp_path, patience=patience).fetch_all()
    connection.close()
    assert {*result.fetched, *result.kept} == {file["path"] for file in list_files(plane, job)}
    assert target.read_bytes() == source.read_bytes()
    assert not list(tmp_path.rglob(".*.part"))


def test_a_part_of_an_earlier_version_is_not_continued(plane: ControlPlane, tmp_path: Path) -> None:
    job = plane.finished_job()
    source = Path(job["storage"]) / "spec.json"
    content = source.read_bytes()
    connection = BreakingConnection(plane.url, len(content) // 2)
    with pytest.raises(Unreachable):
        Downloader(connection, f"/v1/jobs/{job['id']}", tmp_path).fetch_all(["spec"])
    connection.close()
    source.write_bytes(content.upper())
    with Client(plane.url) as client:
        download = client.job(job["id"]).download(tmp_path.parent / "whole", ["spec"])
        assert (download.folder / "spec.json").read_bytes() == content.upper()
    connection = ServiceConnection(plane.url)
    Downloader(connection, f"/v1/jobs/{job['id']}", tmp_path).fetch_all(["spec"])
    connection.close()
    assert (tmp_path / "spec.json").read_bytes() == content.upper()


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(breaks=st.lists(st.integers(0, 12_000), max_size=3))
def test_broken_off_anywhere_no_torn_file_has_its_name(
    plane: ControlPlane, job: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, breaks: list[int]
) -> None:
    folder, storage = tmp_path_factory.getbasetemp() / secrets.token_hex(8), Path(job["storage"])
    path = f"/v1/jobs/{job['id']}"
    for num_bytes in breaks:
        connection = BreakingConnection(plane.url, num_bytes)
        with suppress(Unreachable):
            Downloader(connection, path, folder).fetch_all()
        connection.close()
        for file in folder.rglob("*"):
            if file.is_file() and not file.name.endswith(".part"):
                assert file.read_bytes() == (storage / file.relative_to(folder)).read_bytes()
                if file.name.endswith(markers.SUFFIX):
                    assert fault_of(folder, file.name.removesuffix(markers.SUFFIX)) is None
    connection = ServiceConnection(plane.url)
    download = Downloader(connection, path, folder).fetch_all()
    connection.close()
    file_paths = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    assert file_paths == {*download.fetched, *download.kept} == {file["path"] for file in list_files(plane, job)}


def test_storage_that_is_no_file_system() -> None:
    files, folder = fsspec.core.url_to_fs("memory://downloads/team/job-x")
    segment, result = "logs/a1.driver/segment-00000000.log", "attempts/1/result.json"
    launch = f"attempts/1/launch.{'0' * 64}.json"
    for path in ("spec.json", segment, result, launch, "logs/a1.driver/.draft"):
        files.pipe_file(f"{folder}/{path}", path.encode())
    commit("memory://downloads/team/job-x", 5)
    job_files = JobFiles(StorageRoots(["memory://downloads"]), "memory://downloads/team/job-x")
    paths = [file.path for file in job_files.list_files()]
    assert {"spec.json", segment, result} == {path for path in paths if not path.startswith("checkpoints/")}
    assert len(paths) == 6
    served_file = job_files.open(segment)
    assert (served_file.file.seek(0), served_file.file.read()) == (0, segment.encode())
    assert served_file.size_bytes == len(segment)
    assert served_file.version == job_files.open(segment).version
    with pytest.raises(NotFound, match="is not a served file"):
        job_files.open(launch)
    with pytest.raises(NotFound, match="outside the storage roots"):
        JobFiles(StorageRoots(["memory://elsewhere"]), "memory://downloads/team/job-x")


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", "a\\..\\x"])
def test_a_path_that_leads_out_of_the_folder_is_not_believed(tmp_path: Path, path: str) -> None:
    wrong = pytest.raises(ClientError, match="which is not a path below a job's folder")
    with closing(ServiceConnection("http://127.0.0.1:9")) as connection, wrong:
        Downloader(connection, "/v1/jobs/x", tmp_path)._target(path)
