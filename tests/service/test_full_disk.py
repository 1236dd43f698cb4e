"""A disk without room: said in words, nothing half made, what is stored readable, and a way out."""

import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
from sqlalchemy import event, insert

from moe.spec import JobSpec
from moe.storage.folder import Folder
from service.control.errors import Full, Unavailable
from service.control.jobs.roots import StorageRoots
from service.control.retention.full_roots import FullRoots
from service.control.scheduling.requests import _write_spec
from service.control.store import tables
from service.control.store.database import Database
from tests.processes import await_that
from tests.service.checkpoints import commit
from tests.service.control_plane import TOKEN, ControlPlane, spec


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with closing(Database(f"sqlite:///{tmp_path}/a.db")) as database:
        database.migrate()
        yield database


# Refusals of the kernel and of SQLite, wherever tests run


def grow(database: Database, num_bytes: int) -> None:
    with database.write() as tx:
        lease = {"name": "x" * num_bytes, "version": 1, "holder": "", "expires_at": 0}
        tx.execute(insert(tables.leases).values(lease))


def test_a_database_that_may_not_grow_says_full_until_it_may(database: Database) -> None:
    limit = {"pages": 1}  # SQLite takes it for as many as there are

    @event.listens_for(database._engine, "begin")
    def bound(connection: object) -> None:
        connection.exec_driver_sql(f"PRAGMA max_page_count={limit['pages']}")  # type: ignore[attr-defined]

    with pytest.raises(Full, match="database or disk is full"):
        grow(database, 1_000_000)
    assert "no space left" in str(database.fault)
    with database.read():
        pass  # reads go on, and clear nothing
    assert database.fault
    limit["pages"] = 1_000_000
    grow(database, 1_000_000)
    assert database.fault is None


def test_a_database_that_another_holds_says_unavailable(database: Database) -> None:
    @event.listens_for(database._engine, "connect")
    def hurry(connection: object, _record: object) -> None:
        connection.execute("PRAGMA busy_timeout=1").close()  # type: ignore[attr-defined]

    database._engine.dispose()  # what it is connected by already would not hurry
    with closing(Database(str(database.url))) as other, other.write(), pytest.raises(Unavailable, match="locked"):
        grow(database, 1)


@contextmanager
def largest_file(num_bytes: int, pid: int = 0) -> Iterator[None]:
    """A limit of the process, which no permission lifts: writing beyond it fails as on a full disk."""
    limits, without_bytecode = resource.prlimit(pid, resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # of a module that is first imported within: it would be cut off for good
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
        sys.dont_write_bytecode = without_bytecode


def test_a_spec_that_finds_no_room(tmp_path: Path) -> None:
    text = JobSpec.parse(spec()).model_dump_json()
    with largest_file(100), pytest.raises(Full, match="File too large"):
        _write_spec(StorageRoots([str(tmp_path)]), str(tmp_path / "job"), text, None)
    assert list((tmp_path / "job").iterdir()) == []


def more_than_is_free(root: Path) -> int:
    """Bytes that its disk could have free, but has not: there is something on it."""
    (root / "something").write_bytes(bytes(1 << 20))
    there = shutil.disk_usage(root)
    return there.free + there.used // 2


def test_a_root_is_full_until_it_has_room_for_what_it_refused(tmp_path: Path) -> None:
    """Each by itself, and asked by nobody's POST."""
    first, second = (tmp_path / name for name in ("first", "second"))
    more = more_than_is_free(tmp_path)
    for root in (first, second):
        root.mkdir()
    full = FullRoots(StorageRoots([str(first), str(second)]))
    full.record_refusal(str(first / "job-a"), Full("no room on the first"), 100)
    full.record_refusal(str(second / "job-b"), Full("no room on the second"), more)
    told = full.fault
    assert told is not None
    assert told.detail == "no room on the first; no room on the second"
    with largest_file(100):  # not even a block can be written
        full.recheck()
    assert str(full.fault) == str(told)
    full.recheck()
    told = full.fault
    assert told is not None
    assert told.detail == "no room on the second"
    full.took(str(second / "job-c"), 100)  # a spec is no checkpoint
    assert full.fault
    assert [*first.iterdir(), *second.iterdir()] == []


def test_a_small_refusal_hides_no_large_one(tmp_path: Path) -> None:
    full = FullRoots(StorageRoots([str(tmp_path)]))
    full.record_refusal(str(tmp_path / "job-a"), Full("no room for a checkpoint"), more_than_is_free(tmp_path))
    full.record_refusal(str(tmp_path / "job-b"), Full("no room for a spec"), 100)
    full.recheck()
    full.took(str(tmp_path / "job-c"), 100)
    told = full.fault
    assert told is not None
    assert told.detail == "no room for a checkpoint"


def test_more_than_a_disk_has_in_all_says_nothing_of_its_room(tmp_path: Path) -> None:
    """And hides nothing that does."""
    full = FullRoots(StorageRoots([str(tmp_path)]))
    full.record_refusal(str(tmp_path / "job-a"), Full("no room for a hoax"), 1 << 60)
    assert full.fault is None
    full.record_refusal(str(tmp_path / "job-b"), Full("no room for a checkpoint"), more_than_is_free(tmp_path))
    full.record_refusal(str(tmp_path / "job-a"), Full("no room for a hoax"), 1 << 60)
    full.recheck()
    told = full.fault
    assert told is not None
    assert told.detail == "no room for a checkpoint"


def test_where_there_is_no_thread_to_ask_roots_they_are_asked_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No machine here has as many threads as it may whenever a test wants it."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    full = FullRoots(StorageRoots([str(tmp_path)]))
    full.record_refusal(str(tmp_path / "job"), Full("no room"), 100)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        full.ask_soon()
    assert full.fault
    full.ask_soon()
    await_that(lambda: full.fault is None)


def test_roots_are_asked_in_the_background(tmp_path: Path) -> None:
    full = FullRoots(StorageRoots([str(tmp_path)]))
    full.record_refusal(str(tmp_path / "job"), Full("no room"), 100)
    full.ask_soon()
    await_that(lambda: full.fault is None)


def test_storage_that_is_no_file_system_is_asked_too() -> None:
    full = FullRoots(StorageRoots(["memory://full-roots"]))
    full.record_refusal("memory://full-roots/job", Full("no room"), 100)
    full.recheck()
    assert full.fault is None
    assert Folder("memory://full-roots").names() == []


def test_a_post_that_fails_leaves_no_folder(own_plane: ControlPlane) -> None:
    """The spec lies there by then, and a checkpoint is half copied, which is larger than the database."""
    root = own_plane.folder / "root"
    own_plane.settings["storage_roots"] = [str(root)]
    own_plane.start()
    source = own_plane.await_state(own_plane.post()["id"], "succeeded")
    commit(source["storage"], 2, spec=source["spec"], size_bytes=8 << 20)
    state = own_plane.folder / "state"
    before = {path.relative_to(root) for path in root.rglob("*")}
    given = spec(
        train={"num_steps": 9, "batch_tokens": 1024}, start_from={"job": source["id"]}, storage=str(root / "team/a")
    )
    assert own_plane.process is not None
    most = max(path.stat().st_size for path in state.glob("shardyard.db*")) + (1 << 20)
    with largest_file(most, own_plane.process.pid):
        answer = own_plane.http.post("/v1/jobs", json=given)
    assert (answer.status_code, answer.json()["type"]) == (507, "urn:shardyard:problem:storage-full")
    assert "File too large" in answer.json()["detail"]
    assert {path.relative_to(root) for path in root.rglob("*")} == before
    assert own_plane.http.post("/v1/jobs", json=given).status_code == 201


# A whole control plane on a disk of its own


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    made = mount and subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if not made or made.returncode:
        pytest.skip("this user may not mount a file system")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path) -> Path:
    """The file that takes all that is left."""
    ballast = disk / "ballast"
    with ballast.open("ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    assert os.statvfs(disk).f_bavail == 0
    return ballast


def test_storage_that_is_full_is_told_and_deleting_makes_room(own_plane: ControlPlane, small_disk: Path) -> None:
    """The database lies elsewhere, as on Kubernetes."""
    own_plane.settings |= {"storage_roots": [str(small_disk)], "token": TOKEN}
    own_plane.http.headers["authorization"] = f"Bearer {TOKEN}"
    own_plane.start()
    job = own_plane.post(resources={"num_workers": 900})
    (Path(job["storage"]) / "large").write_bytes(bytes(1_000_000))
    fill(small_disk)
    for _ in range(3):
        answer = own_plane.http.post("/v1/jobs", json=spec())
        assert (answer.status_code, answer.json()["type"]) == (507, "urn:shardyard:problem:storage-full")
        assert "No space left on device" in answer.json()["detail"]
    assert [path.name for path in small_disk.iterdir() if path.is_dir()] == [job["id"]]
    ready = own_plane.http.get("/readyz")
    assert (ready.status_code, ready.json()["status"]) == (200, "degraded")
    assert "No space left on device" in ready.json()["writing"]
    stranger = own_plane.http.get("/readyz", headers={"authorization": ""})
    assert (stranger.status_code, stranger.json()["writing"]) == (200, "full")
    assert own_plane.http.post(f"/v1/jobs/{job['id']}/cancel").status_code == 202
    assert own_plane.http.delete(f"/v1/jobs/{job['id']}").status_code == 202
    await_that(lambda: not Path(job["storage"]).exists())
    own_plane.post(resources={"num_workers": 900})
    assert own_plane.http.get("/readyz").json()["status"] == "ready"


def test_a_checkpoint_that_finds_no_room_is_told_until_there_is_some(own_plane: ControlPlane, small_disk: Path) -> None:
    own_plane.settings |= {"storage_roots": [str(small_disk)]}
    own_plane.start()
    source = own_plane.await_state(own_plane.post()["id"], "succeeded")
    commit(source["storage"], 2, spec=source["spec"], size_bytes=8 << 20)  # of 12
    given = spec(train={"num_steps": 9, "batch_tokens": 1024}, start_from={"job": source["id"]})
    answer = own_plane.http.post("/v1/jobs", json=given)
    assert (answer.status_code, answer.json()["type"]) == (507, "urn:shardyard:problem:storage-full")
    ready = own_plane.http.get("/readyz")
    assert (ready.status_code, ready.json()["status"]) == (200, "degraded")
    assert "cannot copy the checkpoint to" in ready.json()["writing"]
    own_plane.post(resources={"num_workers": 900})  # for which there is room
    assert own_plane.http.get("/readyz").json()["status"] == "degraded"
    assert own_plane.http.delete(f"/v1/jobs/{source['id']}").status_code == 202
    await_that(lambda: own_plane.http.get("/readyz").json()["status"] == "ready")


@pytest.fixture
def make_read_only() -> Iterator[Callable[[Path, bool], None]]:
    """Changes whether a file can be written: by its attributes, which bind the superuser, and files that are open."""
    changed: set[Path] = set()
    program = shutil.which("chattr") or "chattr"

    def make(path: Path, read_only: bool) -> None:
        mode = "+i" if read_only else "-i"
        try:
            subprocess.run([program, mode, str(path)], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("this user or file system has no immutable files")
        (changed.add if read_only else changed.discard)(path)

    yield make
    for path in list(changed):
        make(path, False)


def test_a_database_that_is_read_only_for_a_while_answers_in_words(
    own_plane: ControlPlane, make_read_only: Callable[[Path, bool], None]
) -> None:
    own_plane.start()
    job = own_plane.post(resources={"num_workers": 900})
    files = [own_plane.folder / "state" / name for name in ("shardyard.db", "shardyard.db-wal")]
    for file in files:
        make_read_only(file, True)
    for path, body in (("/v1/jobs", spec()), (f"/v1/jobs/{job['id']}/cancel", {})):
        answer = own_plane.http.post(path, json=body)
        assert (answer.status_code, answer.json()["type"]) == (503, "urn:shardyard:problem:unavailable")
        assert "its disk, folder or file is read-only or failing" in answer.json()["detail"]
    assert own_plane.job(job["id"])["state"] == "queued"
    ready = own_plane.http.get("/readyz").json()
    assert (ready["status"], "read-only" in ready["writing"]) == ("degraded", True)
    for file in files:
        make_read_only(file, False)
    await_that(lambda: own_plane.http.get("/readyz").json()["status"] == "ready")
    assert own_plane.http.post(f"/v1/jobs/{job['id']}/cancel").status_code == 202


@pytest.mark.slow
def test_what_was_accepted_outlives_a_disk_that_fails(own_plane: ControlPlane, tmp_path: Path) -> None:
    """The kernel makes a file system read-only when it finds errors on it, whoever has files open there."""
    image, disk = tmp_path / "image", tmp_path / "disk"
    disk.mkdir()
    image.write_bytes(bytes(32 << 20))
    mount = ["mount", "-o", "loop", str(image), str(disk)]
    try:
        subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, capture_output=True)
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this user may not mount a file system")
    try:
        own_plane.settings["state_dir"] = str(disk / "state")
        own_plane.start()
        jobs = [own_plane.post(resources={"num_workers": 900})["id"] for _ in range(3)]
        subprocess.run(["mount", "-o", "remount,abort", str(disk)], check=True)
        refused = own_plane.http.post("/v1/jobs", json=spec())
        assert (
            refused.status_code,
            "its disk, folder or file is read-only or failing" in refused.json()["detail"],
        ) == (503, True)
        assert own_plane.job(jobs[0])["state"] == "queued"
        own_plane.kill()
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
        subprocess.run(["fsck.ext4", "-y", str(image)], check=False, capture_output=True)
        subprocess.run(mount, check=True)
        own_plane.start()
        assert sorted(job["id"] for job in own_plane.http.get("/v1/jobs").json()["items"]) == sorted(jobs)
    finally:
        own_plane.close()
        subprocess.run(["umount", "--lazy", str(disk)], check=False)


def test_a_database_without_room_answers_in_words(own_plane: ControlPlane, small_disk: Path) -> None:
    own_plane.settings["state_dir"] = str(small_disk / "state")
    own_plane.start()
    job = own_plane.post(resources={"num_workers": 900})
    ballast = fill(small_disk)
    for path, body in (("/v1/jobs", spec()), (f"/v1/jobs/{job['id']}/cancel", {})):
        answer = own_plane.http.post(path, json=body)
        assert (answer.status_code, answer.json()["type"]) == (507, "urn:shardyard:problem:storage-full")
    assert own_plane.job(job["id"])["state"] == "queued"
    ready = own_plane.http.get("/readyz")
    assert (ready.status_code, ready.json()["status"]) == (200, "degraded")
    assert own_plane.http.get("/healthz").status_code == 200
    ballast.unlink()
    await_that(lambda: own_plane.http.get("/readyz").json()["status"] == "ready")
    assert own_plane.http.post(f"/v1/jobs/{job['id']}/cancel").status_code == 202
    log = (own_plane.folder / "control-plane.log").read_text()
    assert log.count("a controller step failed") < 20
