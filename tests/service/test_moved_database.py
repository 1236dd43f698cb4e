"""A database that is moved, removed or replaced under a running service: nothing is taken in that nobody would find."""

import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.processes import await_that
from tests.service.control_plane import TOKEN, ControlPlane, spec


def _moved(database: Path) -> None:
    for path in _files(database):
        path.rename(path.with_name(f"moved-{path.name}"))


def _removed(database: Path) -> None:
    for path in _files(database):
        path.unlink()


def _folder_moved(database: Path) -> None:
    database.parent.rename(database.parent.with_name("moved"))


def _replaced(database: Path) -> None:
    """As a backup is put in place."""
    copy = database.with_name("copy.db")
    shutil.copy(database, copy)
    os.replace(copy, database)


def _log_removed(database: Path) -> None:
    Path(f"{database}-wal").unlink()


def _files(database: Path) -> list[Path]:
    return sorted(database.parent.glob(f"{database.name}*"))


@pytest.mark.parametrize("change", [_moved, _removed, _folder_moved, _replaced, _log_removed])
def test_nothing_is_taken_in_by_a_database_that_is_not_at_its_path(
    own_plane: ControlPlane, change: Callable[[Path], None]
) -> None:
    own_plane.start()
    before = own_plane.post(train={"num_steps": 1, "batch_tokens": 1024})
    own_plane.await_state(before["id"], "succeeded")
    change(own_plane.database)
    answer = own_plane.http.post("/v1/jobs", json=spec())
    assert (answer.status_code, answer.json()["type"]) == (503, "urn:shardyard:problem:unavailable")
    assert str(own_plane.database) in answer.json()["detail"]
    assert own_plane.http.get("/readyz").status_code == 503
    assert own_plane.http.get("/healthz").status_code == 200
    assert own_plane.http.get(f"/v1/jobs/{before['id']}").status_code == 503
    assert own_plane.http.post(f"/v1/jobs/{before['id']}/cancel").status_code == 503


def test_moved_back_it_is_used_again(own_plane: ControlPlane) -> None:
    own_plane.start()
    job = own_plane.post(labels={"hold": "here"})
    moved = own_plane.database.with_name("moved.db")
    own_plane.database.rename(moved)
    assert own_plane.http.get("/readyz").status_code == 503
    with closing(sqlite3.connect(moved)) as rescued:  # what was committed is in it, without its log
        assert rescued.execute("select id from jobs").fetchall() == [(job["id"],)]
    moved.rename(own_plane.database)
    assert own_plane.http.get("/readyz").json()["status"] == "ready"
    own_plane.await_state(job["id"], "succeeded")
    assert own_plane.post()["state"] == "queued"


def test_whoever_has_no_token_is_not_told_where_it_lay(tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path, token=TOKEN).start()
    try:
        plane.database.unlink()
        told = plane.http.get("/readyz").json()["detail"]
        assert str(plane.database) in told
        del plane.http.headers["authorization"]
        answer = plane.http.get("/readyz")
        assert answer.status_code == 503
        assert "shardyard.db" not in answer.text
    finally:
        plane.close()


def test_the_controller_does_nothing_meanwhile(own_plane: ControlPlane) -> None:
    own_plane.launcher.set_nodes()  # before the start: what a cluster has is remembered for seconds
    own_plane.start()
    job = own_plane.post()
    _moved(own_plane.database)
    log = own_plane.folder / "control-plane.log"
    await_that(lambda: "a controller step failed" in log.read_text())
    assert own_plane.launcher.launches() == []
    assert job["id"] not in str(own_plane.launcher.launches())
