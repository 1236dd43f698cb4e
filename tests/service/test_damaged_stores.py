"""Full disks, and databases that are moved, removed or replaced: reported, nothing half written, and recoverable."""

import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest
from sqlalchemy import event, insert, text

from moe.spec import JobSpec
from moe.storage.folder import Folder
from service.control.errors import Full, Unavailable
from service.control.jobs.roots import StorageRoots
from service.control.retention.full_roots import FullRoots
from service.control.scheduling.new_jobs import _write_spec
from service.control.store import tables
from service.control.store.database import Database
from tests.processes import await_that
from tests.service.checkpoints import commit
from tests.service.control_plane import TOKEN, ControlPlane, spec

# Errors of the kernel and of SQLite that every machine can produce


def grow(database: Database, num_bytes: int) -> None:
    with database.write() as tx:
        lease = {"name": "x" * num_bytes, "version": 1, "holder": "", "expires_at": 0}
        tx.execute(insert(tables.leases).values(lease))


def test_a_database_that_may_not_grow_says_full_until_it_may(database: Database) -> None:
    limit = {"pages": 1}  # SQLite raises it to the number of pages in use

    @event.listens_for(database._engine, "begin")
    def set_page_limit(connection: object) -> None:
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

    database._engine.dispose()  # existing connections would keep the longer timeout
    with closing(Database(str(database.url))) as holder, holder.write(), pytest.raises(Unavailable, match="locked"):
        grow(database, 1)


@contextmanager
def largest_file(num_bytes: int, pid: int = 0) -> Iterator[None]:
    """Limit the size of files that a process writes, even as root: beyond it, writing fails as on a full disk."""
    limits, without_bytecode = resource.prlimit(pid, resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # bytecode of a module first imported here would stay truncated
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
    """More bytes than the disk has free, and fewer than it could have."""
    (root / "something").write_bytes(bytes(1 << 20))
    usage = shutil.disk_usage(root)
    return usage.free + usage.used // 2


def detail(full: FullRoots) -> str:
    return full.fault.detail


def test_a_root_is_full_until_it_has_room_for_what_it_refused(tmp_path: Path) -> None:
    """Each root by itself, and without a POST."""
    first, second = (tmp_path / name for name in ("first", "second"))
    size_bytes = more_than_is_free(tmp_path)
    for root in (first, second):
        root.mkdir()
    full = FullRoots(StorageRoots([str(first), str(second)]))
    full.record_refusal(str(first / "job-a"), Full("no room on the first"), 100)
    full.record_refusal(str(second / "job-b"), Full("no room on the second"), size_bytes)
    assert detail(full) == "no room on the first; no room on the second"
    with largest_file(100):  # not even a block can be written
        full.recheck()
    assert detail(full) == "no room on the first; no room on the second"
    full.recheck()
    assert detail(full) == "no room on the second"
    full.record_write(str(second / "job-c"), 100)  # a spec needs less room than a checkpoint
    assert full.fault
    assert [*first.iterdir(), *second.iterdir()] == []


def test_a_refusal_hides_no_other(tmp_path: Path) -> None:
    full = FullRoots(StorageRoots([str(tmp_path)]))
    more_than_its_disk_has = str(tmp_path / "job-a"), Full("no room for a hoax"), 1 << 60
    full.record_refusal(*more_than_its_disk_has)
    assert full.fault is None, "it says nothing of the room"
    full.record_refusal(str(tmp_path / "job-b"), Full("no room for a checkpoint"), more_than_is_free(tmp_path))
    full.record_refusal(str(tmp_path / "job-c"), Full("no room for a spec"), 100)
    full.record_refusal(*more_than_its_disk_has)
    full.recheck()
    full.record_write(str(tmp_path / "job-d"), 100)
    assert detail(full) == "no room for a checkpoint"


def test_roots_are_checked_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thread.start is patched, since no test can use up the machine's threads."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    full = FullRoots(StorageRoots([str(tmp_path)]))
    full.record_refusal(str(tmp_path / "job"), Full("no room"), 100)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        full.check_soon()
    assert full.fault
    full.check_soon()
    await_that(lambda: full.fault is None)


def test_storage_that_is_no_file_system_is_asked_too() -> None:
    full = FullRoots(StorageRoots(["memory://full-roots"]))
    full.record_refusal("memory://full-roots/job", Full("no room"), 100)
    full.recheck()
    assert full.fault is None
    assert Folder("memory://full-roots").names() == []


def test_a_post_that_fails_leaves_no_folder(own_plane: ControlPlane) -> None:
    """By then the spec is written, and a checkpoint, which is larger than the database, is half copied."""
    root = own_plane.folder / "root"
    source = own_plane.start(storage_roots=[str(root)]).finished_job()
    commit(source["storage"], 2, spec=source["spec"], size_bytes=8 << 20)
    before = {path.relative_to(root) for path in root.rglob("*")}
    body = spec(train=MORE_STEPS, start_from={"job": source["id"]}, storage=str(root / "team/a"))
    max_file_bytes = max(path.stat().st_size for path in own_plane.database.parent.glob("shardyard.db*")) + (1 << 20)
    with largest_file(max_file_bytes, own_plane.process.pid):
        answer = own_plane.http.post("/v1/jobs", json=body)
    assert (answer.status_code, answer.json()["type"]) == FULL
    assert "File too large" in answer.json()["detail"]
    assert {path.relative_to(root) for path in root.rglob("*")} == before
    assert own_plane.http.post("/v1/jobs", json=body).status_code == 201


MORE_STEPS = {"num_steps": 9, "batch_tokens": 1024}
FULL = (507, "urn:shardyard:problem:storage-full")
UNAVAILABLE = (503, "urn:shardyard:problem:unavailable")


# A whole control plane on a disk of its own


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    result = mount and subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if not result or result.returncode:
        pytest.skip("this user may not mount a file system")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path) -> Path:
    """File that takes all the free space."""
    ballast = disk / "ballast"
    with ballast.open("ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    assert os.statvfs(disk).f_bavail == 0
    return ballast


def readiness(plane: ControlPlane, **headers: str) -> tuple[int, str, str]:
    """(HTTP status, status, whether it can write)"""
    answer = plane.http.get("/readyz", headers=headers)
    return answer.status_code, answer.json()["status"], answer.json()["writing"]


@pytest.mark.slow
def test_storage_that_is_full_is_told_and_deleting_makes_room(own_plane: ControlPlane, small_disk: Path) -> None:
    """The database lies elsewhere, as on Kubernetes."""
    own_plane.start(storage_roots=[str(small_disk)], token=TOKEN)
    job = own_plane.post(resources={"num_workers": 900})
    (Path(job["storage"]) / "large").write_bytes(bytes(1_000_000))
    ballast = fill(small_disk)
    for _ in range(3):
        answer = own_plane.http.post("/v1/jobs", json=spec())
        assert (answer.status_code, answer.json()["type"]) == FULL
        assert "No space left on device" in answer.json()["detail"]
    assert [path.name for path in small_disk.iterdir() if path.is_dir()] == [job["id"]]
    *status, write_status = readiness(own_plane)
    assert (status, "No space left on device" in write_status) == ([200, "degraded"], True)
    assert readiness(own_plane, authorization="") == (200, "degraded", "full")
    assert own_plane.act(job["id"], "cancel").status_code == 202
    assert own_plane.http.delete(f"/v1/jobs/{job['id']}").status_code == 202
    await_that(lambda: not Path(job["storage"]).exists())
    own_plane.post(resources={"num_workers": 900})
    assert readiness(own_plane)[1] == "ready"

    ballast.unlink()  # and a checkpoint that finds no room
    source = own_plane.finished_job()
    commit(source["storage"], 2, spec=source["spec"], size_bytes=8 << 20)  # of 12
    answer = own_plane.http.post("/v1/jobs", json=spec(train=MORE_STEPS, start_from={"job": source["id"]}))
    assert (answer.status_code, answer.json()["type"]) == FULL
    *status, write_status = readiness(own_plane)
    assert (status, "cannot copy the checkpoint to" in write_status) == ([200, "degraded"], True)
    own_plane.post(resources={"num_workers": 900})  # for which there is room
    assert readiness(own_plane)[1] == "degraded"
    assert own_plane.http.delete(f"/v1/jobs/{source['id']}").status_code == 202
    await_that(lambda: readiness(own_plane)[1] == "ready")


@contextmanager
def read_only(*files: Path) -> Iterator[None]:
    """Make files immutable by their attributes, which bind root and files that are open."""

    def change(mode: str) -> None:
        subprocess.run([shutil.which("chattr") or "chattr", mode, *map(str, files)], check=True, capture_output=True)

    try:
        change("+i")
    except (OSError, subprocess.CalledProcessError):
        with suppress(OSError, subprocess.CalledProcessError):
            change("-i")
        pytest.skip("this user or file system has no immutable files")
    try:
        yield
    finally:
        change("-i")


def check_writes_are_refused(plane: ControlPlane, job_id: str, expected: tuple[int, str], detail: str = "") -> None:
    """Check that writes are refused with a problem while jobs can be read."""
    for path, body in (("/v1/jobs", spec()), (f"/v1/jobs/{job_id}/cancel", {})):
        answer = plane.http.post(path, json=body)
        assert (answer.status_code, answer.json()["type"]) == expected
        assert detail in answer.json()["detail"]
    assert plane.job(job_id)["state"] == "queued"
    assert readiness(plane)[:2] == (200, "degraded")
    assert plane.http.get("/healthz").status_code == 200


def check_writes_are_taken_again(plane: ControlPlane, job_id: str) -> None:
    await_that(lambda: readiness(plane)[1] == "ready")
    assert plane.act(job_id, "cancel").status_code == 202


def test_a_database_that_is_read_only_for_a_while(own_plane: ControlPlane) -> None:
    job_id = own_plane.start().post(resources={"num_workers": 900})["id"]
    with read_only(own_plane.database, Path(f"{own_plane.database}-wal")):
        check_writes_are_refused(own_plane, job_id, UNAVAILABLE, "its disk, folder or file is read-only or failing")
        assert "read-only" in readiness(own_plane)[2]
    check_writes_are_taken_again(own_plane, job_id)


def test_connections_opened_to_a_read_only_file_write_to_it_later(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'service.db'}")
    database.migrate()
    write = text("DELETE FROM drafts")
    with read_only(tmp_path / "service.db", tmp_path / "service.db-wal"):
        with pytest.raises(Unavailable), database.write() as tx:
            tx.execute(write)
        with ExitStack() as stack:
            for _ in range(4):
                stack.enter_context(database.read()).execute(text("SELECT 1"))
    for _ in range(5):
        with database.write() as tx:
            tx.execute(write)
    database.close()


@pytest.mark.slow
def test_accepted_jobs_outlive_a_failing_disk(own_plane: ControlPlane, tmp_path: Path) -> None:
    """The kernel makes a file system read-only when it finds errors on it, even for processes with open files."""
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
        answer = own_plane.http.post("/v1/jobs", json=spec())
        assert (answer.status_code, answer.json()["type"]) == (503, "urn:shardyard:problem:unavailable")
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


def test_a_database_without_room(own_plane: ControlPlane, small_disk: Path) -> None:
    job_id = own_plane.start(state_dir=str(small_disk / "state")).post(resources={"num_workers": 900})["id"]
    ballast = fill(small_disk)
    check_writes_are_refused(own_plane, job_id, FULL)
    ballast.unlink()
    check_writes_are_taken_again(own_plane, job_id)
    assert own_plane.log_text().count("a controller step failed") < 20


def _files(database: Path) -> list[Path]:
    return sorted(database.parent.glob(f"{database.name}*"))


def _move(database: Path) -> None:
    for path in _files(database):
        path.rename(path.with_name(f"moved-{path.name}"))


def _replace(database: Path) -> None:
    """Replace the database as restoring a backup does."""
    shutil.copy(database, database.with_name("copy.db"))
    os.replace(database.with_name("copy.db"), database)


CHANGES: dict[str, Callable[[Path], object]] = {
    "moved": _move,
    "removed": lambda database: [path.unlink() for path in _files(database)],
    "folder moved": lambda database: database.parent.rename(database.parent.with_name("moved")),
    "replaced": _replace,
    "log removed": lambda database: Path(f"{database}-wal").unlink(),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("change", CHANGES)
def test_nothing_is_taken_in_by_a_database_that_is_not_at_its_path(own_plane: ControlPlane, change: str) -> None:
    job_id = own_plane.start().finished_job(train={"num_steps": 1, "batch_tokens": 1024})["id"]
    CHANGES[change](own_plane.database)
    answer = own_plane.http.post("/v1/jobs", json=spec())
    assert (answer.status_code, answer.json()["type"]) == (503, "urn:shardyard:problem:unavailable")
    assert str(own_plane.database) in answer.json()["detail"]
    for path, status in (("/readyz", 503), ("/healthz", 200), (f"/v1/jobs/{job_id}", 503)):
        assert own_plane.http.get(path).status_code == status
    assert own_plane.act(job_id, "cancel").status_code == 503


def test_moved_back_it_is_used_again(own_plane: ControlPlane) -> None:
    own_plane.start()
    job = own_plane.post(labels={"hold": "here"})
    moved_path = own_plane.database.with_name("moved.db")
    own_plane.database.rename(moved_path)
    assert own_plane.http.get("/readyz").status_code == 503
    with closing(sqlite3.connect(moved_path)) as database:  # what was committed is in it, without its log
        assert database.execute("select id from jobs").fetchall() == [(job["id"],)]
    moved_path.rename(own_plane.database)
    assert own_plane.http.get("/readyz").json()["status"] == "ready"
    own_plane.await_state(job["id"], "succeeded")
    assert own_plane.post()["state"] == "queued"


def test_the_controller_does_nothing_meanwhile(own_plane: ControlPlane) -> None:
    own_plane.launcher.set_nodes()  # before the start: facts of a cluster are cached for seconds
    own_plane.start().post()
    _move(own_plane.database)
    await_that(lambda: "a controller step failed" in own_plane.log_text())
    assert own_plane.launcher.launches() == []
