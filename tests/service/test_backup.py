"""Backups of a control plane that runs, and what they are restored into."""

import gzip
import json
import os
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from moe.storage.folder import Folder
from service.control.report.tokens import KEY_FILE, TokenMint
from service.control.store import tables
from service.control.store.backup import (
    MANIFEST,
    BackupError,
    list_backups,
    read_backup,
    read_manifest,
    remove_older,
    write_backup,
)
from service.control.store.database import Database, NewerDatabase
from tests.processes import await_that
from tests.service.control_plane import ControlPlane
from tests.service_cli.command import output_of, shardyard


def rows_of(database: Database) -> dict[str, list[tuple[Any, ...]]]:
    """All rows of all tables but leases."""
    with database.read() as tx:
        stored = [table for table in tables.metadata.sorted_tables if table.name != "leases"]
        return {
            table.name: [tuple(row) for row in tx.execute(select(table).order_by(*table.primary_key.columns))]
            for table in stored
        }


def restored(folder: Path, backup: Folder) -> Database:
    folder.mkdir()
    database = Database(f"sqlite:///{folder / 'shardyard.db'}")
    read_backup(database, backup, read_manifest(backup))
    return database


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A control plane that has run two jobs and deleted the second, stopped."""
    plane = ControlPlane(tmp_path_factory.mktemp("plane")).start()
    try:
        plane.finished_job(name="ae")
        deleted = plane.finished_job()["id"]
        plane.http.delete(f"/v1/jobs/{deleted}")
        with closing(Database(f"sqlite:///{plane.database}")) as database:
            await_that(lambda: len(rows_of(database)["jobs"]) == 1)
        plane.terminate()
        yield plane
    finally:
        plane.close()


@pytest.fixture
def backup(finished: ControlPlane, tmp_path: Path) -> Folder:
    place = Folder(str(tmp_path / "backups"))
    with closing(Database(f"sqlite:///{finished.database}")) as database:
        name, _ = write_backup(database, place, b"key")
    return place.subfolder(name)


def test_every_row_comes_back_and_numbers_go_on(finished: ControlPlane, backup: Folder, tmp_path: Path) -> None:
    with (
        closing(Database(f"sqlite:///{finished.database}")) as database,
        closing(restored(tmp_path / "new", backup)) as copy,
    ):
        assert rows_of(copy) == rows_of(database)
        assert len(rows_of(copy)["jobs"]) == 1
        with copy.read() as tx:
            assert tx.exec_driver_sql("SELECT seq FROM sqlite_sequence").scalar_one() == 2  # of the deleted job, too
    assert {os.stat(path).st_mode & 0o777 for path in Path(backup.url).iterdir()} == {0o600}


def test_only_an_empty_database_is_filled(finished: ControlPlane, backup: Folder) -> None:
    with closing(Database(f"sqlite:///{finished.database}")) as database:
        before = rows_of(database)
        with pytest.raises(BackupError, match="is not empty"):
            read_backup(database, backup, read_manifest(backup))
        assert rows_of(database) == before


@pytest.mark.parametrize("path", ["jobs.jsonl.gz", "events.jsonl.gz", "attempt.key"])
def test_a_damaged_backup_is_refused_before_anything_is_written(backup: Folder, path: str) -> None:
    content = backup.read(path)
    backup.write(path, content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(BackupError, match=f"{path} does not match its checksum"):
        read_manifest(backup)
    backup.remove(path)
    with pytest.raises(BackupError, match=f"{path} is missing"):
        read_manifest(backup)


def test_a_backup_of_a_newer_release_is_refused(backup: Folder, tmp_path: Path) -> None:
    manifest = read_manifest(backup).model_copy(update={"revision": "9999"})
    with (
        closing(Database(f"sqlite:///{tmp_path / 'shardyard.db'}")) as database,
        pytest.raises(NewerDatabase, match="9999"),
    ):
        read_backup(database, backup, manifest)


def test_a_backup_of_an_older_release_is_migrated(backup: Folder, tmp_path: Path) -> None:
    """That of revision 0011, which had no table of keys, and whose rows this release reads."""
    manifest = read_manifest(backup)
    files = {path: seal for path, seal in manifest.files.items() if path != "keys.jsonl.gz"}
    rows = {name: count for name, count in manifest.rows.items() if name != "keys"}
    older = manifest.model_copy(update={"revision": "0011", "files": files, "rows": rows})
    with closing(Database(f"sqlite:///{tmp_path / 'shardyard.db'}")) as database:
        read_backup(database, backup, older)
        assert database.revision() == manifest.revision
        assert len(rows_of(database)["jobs"]) == 1


def test_unfinished_backups_do_not_count_and_older_ones_are_removed(finished: ControlPlane, tmp_path: Path) -> None:
    place = Folder(str(tmp_path))
    with closing(Database(f"sqlite:///{finished.database}")) as database:
        names = [write_backup(database, place, None)[0] for _ in range(4)]
    place.remove(f"{names[3]}/{MANIFEST}")
    assert list_backups(place) == [names[2], names[1], names[0]]
    assert remove_older(place, keep=2) == [names[0]]
    assert place.names() == sorted(names[1:])


@pytest.mark.slow
def test_training_is_found_again_after_the_state_folder_is_lost(own_plane: ControlPlane, tmp_path: Path) -> None:
    """Backed up while two jobs run; then the state is lost, restored, and both go on in their first attempts."""
    own_plane.start()
    done = own_plane.finished_job()["id"]
    specs = {"labels": {"step_ms": "100"}, "train": {"num_steps": 100, "batch_tokens": 1024}}
    running = [own_plane.post(**specs)["id"] for _ in range(2)]
    for job_id in running:
        await_that(lambda job_id=job_id: own_plane.job(job_id)["step"] >= 3)
    state, place = tmp_path / "state", tmp_path / "backups"
    output = output_of("backup", place, "--state-dir", state, "--keep", "1")
    backup = Path(output.strip())
    before = own_plane.job(done)
    later = own_plane.finished_job(name="later")["id"]
    await_that(lambda: own_plane.job(running[0])["step"] >= 10)
    own_plane.kill()
    for path in (*state.glob("shardyard.db*"), state / KEY_FILE):
        path.unlink()

    result = shardyard("restore", place, "--state-dir", state)
    assert (result.returncode, result.stdout.startswith("restored 3 jobs and ")) == (0, True), result.stderr
    assert (state / KEY_FILE).stat().st_mode & 0o777 == 0o600
    manifest = json.loads((backup / MANIFEST).read_text())
    lines = gzip.decompress((backup / "events.jsonl.gz").read_bytes()).splitlines()
    assert manifest["rows"]["events"] == len(lines)

    own_plane.start()
    assert own_plane.job(done) == before
    for job_id in running:
        job = own_plane.await_state(job_id, "succeeded", "failed", "paused")
        assert (job["state"], job["attempt"]) == ("succeeded", 1), job["reason"]
        assert sorted(own_plane.losses(job_id)) == list(range(1, 101))
    assert len(own_plane.launcher.launches()) == 4  # none was launched twice
    assert own_plane.http.get(f"/v1/jobs/{later}").status_code == 404
    shardyard("recover", "--state-dir", state)
    assert own_plane.job(later)["name"] == "later"


@pytest.mark.slow
def test_keys_of_the_restored_control_plane_are_those_of_the_backup(tmp_path: Path) -> None:
    with closing(Database(f"sqlite:///{tmp_path / 'shardyard.db'}")) as database:
        database.migrate()
        token = TokenMint.of(database, tmp_path).token("job-a", 1)
    output_of("backup", tmp_path / "backups", "--state-dir", tmp_path)
    output_of("restore", tmp_path / "backups", "--state-dir", tmp_path / "new")
    with closing(Database(f"sqlite:///{tmp_path / 'new' / 'shardyard.db'}")) as database:
        assert TokenMint.of(database, tmp_path / "new").token("job-a", 1) == token


@pytest.mark.slow
def test_commands_refuse_in_a_line_what_they_cannot_use(finished: ControlPlane, backup: Folder, tmp_path: Path) -> None:
    state = finished.database.parent
    for words, arguments in (
        ("there is nothing to back up", ("backup", tmp_path / "b", "--state-dir", tmp_path)),
        ("cannot use the database", ("backup", tmp_path / "b", "--state-dir", tmp_path / "absent")),
        ("needs a package that is not installed", ("backup", "abfs://bucket/b", "--state-dir", state)),
        ("has no backup.json", ("restore", tmp_path / "b", "--state-dir", tmp_path / "new")),
        ("is not empty", ("restore", backup.url, "--state-dir", state)),
    ):
        result = shardyard(*arguments)
        assert result.returncode in (1, 2), result.stdout
        assert (words in result.stderr, result.stderr.count("\n")) == (True, 1), result.stderr


def test_what_is_left_of_old_incomplete_backups_is_removed(tmp_path: Path) -> None:
    place = Folder(str(tmp_path))
    complete, left, begun, foreign = (
        "shardyard-20260101T000000.000000Z", "shardyard-20260102T000000.000000Z", "shardyard-20260103T000000.000000Z",
        "shardyard-of-mine",
    )  # fmt: skip
    for name in (complete, left, begun, foreign):
        place.write(f"{name}/jobs.jsonl.gz", b"")
    place.write(f"{complete}/backup.json", b"{}")
    assert remove_older(place, 1, now=datetime(2026, 1, 3, 12, tzinfo=UTC)) == [left]
    assert sorted(place.names()) == sorted([complete, begun, foreign])
