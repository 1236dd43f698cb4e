"""Two control planes on one PostgreSQL database, of which one acts."""

import json
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import httpx
import pytest
from sqlalchemy import inspect, text

from service.control.report.tokens import TokenMint
from service.control.store import tables
from service.control.store.database import Database
from tests.processes import await_that
from tests.service.control_plane import ControlPlane


@pytest.fixture
def planes(url: str, tmp_path: Path) -> Iterator[list[ControlPlane]]:
    """Two control planes with one database, one cluster and one storage, and folders of their own; not started."""
    planes = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        shared = {"database_url": url, "storage_roots": [str(tmp_path / "jobs")], "cache_dir": str(tmp_path / "cache")}
        planes.append(ControlPlane(tmp_path / name, **shared))
    planes[1].launcher.folder = planes[0].launcher.folder
    yield planes
    for plane in planes:
        plane.close()


def acting(planes: list[ControlPlane]) -> list[ControlPlane]:
    """Those whose controllers act."""
    found = []
    for plane in planes:
        with suppress(httpx.TransportError):
            if plane.http.get("/readyz").json().get("controller") == "acting":
                found.append(plane)
    return found


def test_migrations_make_the_tables_that_the_code_names(url: str) -> None:
    with closing(Database(url)) as database:
        assert database.revision() is None
        before, after = database.migrate()
        assert (before, database.revision()) == (None, after)
        assert database.migrate() == (after, after)
        with database.read() as tx:
            inspector = inspect(tx)
            assert set(inspector.get_table_names()) == {*tables.metadata.tables, "alembic_version"}
            for name, table in tables.metadata.tables.items():
                columns = {column["name"]: column["nullable"] for column in inspector.get_columns(name)}
                assert columns == {column.name: column.nullable for column in table.columns}, name


def test_control_planes_with_folders_of_their_own_derive_the_same_tokens(url: str, tmp_path: Path) -> None:
    with closing(Database(url)) as database:
        database.migrate()
        first, second = (TokenMint.of(database, tmp_path / name).token("job-a", 1) for name in ("first", "second"))
    assert first == second


@pytest.mark.slow
def test_the_other_acts_after_sigkill_and_finishes_the_job(planes: list[ControlPlane]) -> None:
    first, second = planes
    first.start()
    await_that(lambda: acting(planes) == [first])
    second.start()
    job_id = first.post(labels={"step_ms": "100"}, train={"num_steps": 60, "batch_tokens": 1024})["id"]
    await_that(lambda: second.job(job_id)["step"] >= 3, lambda: f"{second.job(job_id)}")
    assert acting(planes) == [first]
    first.kill()
    killed_at = time.monotonic()
    await_that(lambda: acting(planes) == [second])
    print(f"the other acted {time.monotonic() - killed_at:.1f} s after SIGKILL, with a lease of 1 s")
    assert second.job(job_id)["attempt"] == 1
    # Its driver sends its records to the address of the first, which is there again, standing by.
    first.start()
    job = second.await_state(job_id, "succeeded", "failed", "paused")
    assert (job["state"], job["attempt"]) == ("succeeded", 1), job["reason"]
    assert sorted(second.losses(job_id)) == list(range(1, 61))
    assert acting(planes) == [second]
    assert first.launcher.launches() == [f"{job_id}-a1"]


@pytest.mark.slow
def test_a_rolling_upgrade_touches_no_training(planes: list[ControlPlane], tmp_path: Path) -> None:
    """The new one starts beside the old one and acts as soon as that has ended; clients are served by both."""
    old, new = planes
    old.start()
    (tmp_path / "cache").mkdir(exist_ok=True)
    (hold := tmp_path / "cache" / "hold").touch()  # the driver ends after this file is removed
    job_id = old.post(labels={"hold": "hold"})["id"]
    old.await_state(job_id, "running")
    new.start()
    assert new.job(job_id)["state"] == "running"
    assert old.terminate() == 0
    await_that(lambda: acting(planes) == [new])
    old.start()  # the driver's records go there, through a Service in a cluster
    hold.unlink()
    job = new.await_state(job_id, "succeeded", "failed", "paused")
    assert (job["state"], job["attempt"]) == ("succeeded", 1), job["reason"]


@pytest.mark.slow
def test_two_that_start_at_once_migrate_once(planes: list[ControlPlane], url: str) -> None:
    for plane in planes:
        plane.start()
    await_that(lambda: len(acting(planes)) == 1)
    with closing(Database(url)) as database, database.read() as tx:
        assert len(tx.execute(text("SELECT * FROM keys")).all()) == 1
        assert len(tx.execute(text("SELECT * FROM alembic_version")).all()) == 1


@pytest.mark.slow
def test_a_database_that_restarts_is_used_again(planes: list[ControlPlane], url: str) -> None:
    """Every connection is cut, as by a fail-over of the database."""
    (plane, _) = planes
    plane.start()
    job_id = plane.post(labels={"step_ms": "50"}, train={"num_steps": 40, "batch_tokens": 1024})["id"]
    with closing(Database(url)) as database, database.write() as tx:
        tx.execute(text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"))
    assert plane.await_state(job_id, "succeeded", "failed", "paused")["state"] == "succeeded"
    assert json.loads(plane.http.get("/v1/jobs").text)["items"][0]["id"] == job_id
