"""The store: migrated from any release, one writer at a time, no number used twice."""

import json
import multiprocessing
import stat
from collections.abc import Callable
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from sqlalchemy import text

from moe.spec import JobSpec
from service.control.jobs.changes import set_state
from service.control.jobs.earlier_releases import read_stored_plan, read_stored_spec
from service.control.report.curve_store import CurveStore
from service.control.report.event_text import data_text
from service.control.report.history import measured_load_skew, measured_step, metric_history, metric_page
from service.control.report.tokens import TokenMint, hash_token, matches
from service.control.store import tables
from service.control.store.database import Database
from service.control.store.events import NewEvent, append_events, events_after, sampled_by_step
from service.control.store.idempotency import UsedKey, find_key
from service.control.store.jobs import JobRow, delete_job, get_job, insert_job
from service.control.store.leases import holds_lease, release_lease, take_lease
from service.control.store.tables import metadata
from service.wire.states import ENDED, TRANSITIONS, State
from tests.service.control_plane import spec
from tests.service.databases import BOTH_DATABASES


def add_job(database: Database, job_id: str = "job-aaaaaaaaaaaa", state: State = State.QUEUED) -> JobRow:
    with database.write() as tx:
        values = {"id": job_id, "owner": "o", "name": "n", "spec": "{}", "storage": "/s", "state": state, "reason": "r",
                  "num_steps": 1, "created_at": 1, "updated_at": 1, "queued_at": 1}  # fmt: skip
        return insert_job(tx, values, {"a": "b"})


def test_migrations_make_the_tables_that_queries_use(database: Database) -> None:
    database.migrate()  # again, with nothing to do
    with database.read() as tx:
        assert compare_metadata(MigrationContext.configure(tx), metadata) == []
        assert tx.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert tx.exec_driver_sql("PRAGMA synchronous").scalar() == 2  # FULL
        assert tx.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1


def _migrations(database: Database, move: Callable[[Config, str], None], revision: str) -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(tables.__file__).parent / "migrations"))
    with database._engine.connect() as connection:
        config.attributes["connection"] = connection
        move(config, revision)


def test_a_database_of_the_first_release_keeps_its_jobs_and_keys(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'old.db'}")
    _migrations(database, command.upgrade, "0001")
    columns = {
        "id": "job-aaaaaaaaaaaa", "version": 1, "owner": "o", "name": "n", "labels": "{}", "spec": "{}",
        "storage": "/s", "state": "succeeded", "reason": "r", "created_at": 1, "updated_at": 1, "queued_at": 1,
        "step": 1, "num_steps": 1, "last_event_id": 7, "attempt": 1, "failures": 0,
    }  # fmt: skip
    with database.write() as tx:
        places = ", ".join(f":{name}" for name in columns)
        tx.execute(text(f"INSERT INTO jobs ({', '.join(columns)}) VALUES ({places})"), columns)
        tx.execute(text("INSERT INTO idempotency_keys VALUES ('o', 'k', 1, 'print', 1, 1)"))
    database.migrate()
    with database.write() as tx:
        job = get_job(tx, "job-aaaaaaaaaaaa")
        assert (job.first_event_id, job.thinned_to, job.last_event_id) == (1, 0, 7)
        delete_job(tx, job.number)
        assert find_key(tx, "o", "k") == UsedKey("print", job.number)  # it stays used
    database.close()


def _migrate(path: str) -> None:
    with closing(Database(f"sqlite:///{path}")) as database:
        database.migrate()


def _append(path: str, writer: str, number: int) -> None:
    with closing(Database(f"sqlite:///{path}")) as database:
        for index in range(number):
            with database.write() as tx:
                append_events(tx, 1, [NewEvent("log", index, None, writer, "{}")])


@pytest.mark.slow
def test_several_processes_migrate_and_write_at_once(tmp_path: Path) -> None:
    path = str(tmp_path / "shared.db")
    spawn = multiprocessing.get_context("spawn")

    def run(target: Any, *arguments: tuple[Any, ...]) -> None:
        processes = [spawn.Process(target=target, args=process_arguments) for process_arguments in arguments]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0] * len(processes)

    run(_migrate, (path,), (path,), (path,))
    with closing(Database(f"sqlite:///{path}")) as database:
        add_job(database)
        run(_append, (path, "a", 50), (path, "b", 50))
        with database.read() as tx:
            rows = events_after(tx, 1, 0, 1000)
    assert [row.id for row in rows] == list(range(1, 101))
    for writer in "ab":
        assert [row.time for row in rows if row.actor == writer] == list(range(50))


@pytest.mark.parametrize("before", [None, 0o644])
def test_nobody_but_its_owner_reads_the_database(tmp_path: Path, before: int | None) -> None:
    """Also where another release made it readable by all."""
    path = tmp_path / "state.db"
    if before is not None:
        path.touch(before)
    with closing(Database(f"sqlite:///{path}")) as database:
        database.migrate()
        add_job(database)
        files = {file.name: stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
    assert set(files) >= {"state.db", "state.db-wal", "state.db-shm"}
    assert set(files.values()) == {0o600}, files


@BOTH_DATABASES
def test_a_write_that_fails_leaves_nothing(database: Database) -> None:
    job = add_job(database)
    with suppress(KeyboardInterrupt), database.write() as tx:
        append_events(tx, job.number, [NewEvent("log", 1, None, "a", "{}")])
        raise KeyboardInterrupt
    with database.read() as tx:
        assert events_after(tx, job.number, 0, 10) == []


@pytest.mark.parametrize("end", sorted(ENDED))
def test_an_end_is_an_end(database: Database, end: State) -> None:
    job = add_job(database, state=State.RUNNING)
    with database.write() as tx:
        assert set_state(tx, job, end, "done", "test")
    # A writer that still takes the job for running changes nothing.
    for state in TRANSITIONS[State.RUNNING]:
        with database.write() as tx:
            assert set_state(tx, job, state, "late", "test") == []
    with database.read() as tx:
        after = get_job(tx, job.id)
    assert (after.state, after.reason, after.last_event_id) == (end, "done", 1)


@BOTH_DATABASES
def test_one_holder_of_the_lease(database: Database) -> None:
    with database.write() as tx:
        assert take_lease(tx, "one", time_us=100, lease_us=10)
        assert not take_lease(tx, "two", time_us=105, lease_us=10)
        assert take_lease(tx, "one", time_us=105, lease_us=10)
        assert not take_lease(tx, "two", time_us=115 - 1, lease_us=10)
        assert take_lease(tx, "two", time_us=115, lease_us=10)
        assert not holds_lease(tx, "one")
        release_lease(tx, "one")  # not its own
        assert holds_lease(tx, "two")
        release_lease(tx, "two")
        assert take_lease(tx, "one", time_us=116, lease_us=10)


@BOTH_DATABASES
@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 50])
def test_a_sample_of_steps_keeps_the_ends_and_is_spread_evenly(database: Database, count: int) -> None:
    job = add_job(database)
    old, new = ([NewEvent("metric", 1, 1, "group-0", f'{{"step":{step},"x":1}}', step) for step in range(count)]
                for _ in range(2))  # fmt: skip
    rare = [NewEvent("metric", 1, 1, "group-0", '{"step":3,"rare_x":1}', step=3)]
    with database.write() as tx:
        first = {event.id for event in append_events(tx, job.number, old)}
        append_events(tx, job.number, new + rare * (count > 3))
    for max_samples in range(1, 60):
        with database.read() as tx:
            ids = sampled_by_step(tx, job.number, "metric", 0, max_samples)
            assert not first & set(ids)
            steps = [min(id - count - 1, count) for id in ids]
            steps = [3 if step == count else step for step in steps]
        assert len(steps) == min(count, max_samples)
        assert steps == sorted(set(steps))
        if count:
            assert steps[-1] == count - 1
            assert max_samples == 1 or steps[0] == 0
        gaps = {right - left for left, right in pairwise(steps)}
        assert not gaps or max(gaps) - min(gaps) <= 1


@BOTH_DATABASES
def test_a_value_that_few_steps_have_is_not_thinned_away(database: Database) -> None:
    job = add_job(database)
    rows = [{"step": step, "loss": 1.0, **({"bleu_%": 2.0} if step % 100 == 50 else {})} for step in range(1000)]
    with database.write() as tx:
        append_events(
            tx, job.number, [NewEvent("metric", 1, 1, "group-0", data_text(data), data["step"]) for data in rows]
        )
    points = metric_history(database, CurveStore(database), job.number, "bleu_%", 0, max_points=10)
    assert [point["step"] for point in points] == list(range(50, 1000, 100))
    assert [point["bleu_%"] for point in points] == [2.0] * 10
    assert metric_history(database, CurveStore(database), job.number, "bleu__", 0, max_points=10) == []


@BOTH_DATABASES
def test_what_plans_count_with_is_read_of_steps_of_any_release(database: Database) -> None:
    """The first step is left out of the time of one; those without a value, or with another type's, of its median."""
    job = add_job(database)
    metrics: list[dict[str, Any]] = [
        {"step": 1, "step_s": 9.0, "layers": [{"layer": 1, "load": [4, 0], "max_over_mean": 2.0}]},
        {"step": 2, "step_s": 0.25, "layers": [{"layer": 1, "load": [3, 1], "max_over_mean": 1.5, "later": 1}]},
        {"step": 3, "step_s": 0.5, "layers": [{"layer": 1, "load": [2, 2]}]},  # of a release that had no such value
        {"step": 4, "step_s": None, "layers": None},
        {"step": 5, "step_s": "slow", "layers": [{"layer": "one"}]},
        {"loss": 1.0},
    ]
    with database.write() as tx:
        events = [NewEvent("metric", 1, 1, "group-0", data_text(data), data.get("step")) for data in metrics]
        append_events(tx, job.number, events)
    measurement = measured_step(database, job.number, attempt=1, tokens_per_step=300)
    assert measurement == {"num_steps": 2, "step_s": 0.375, "tokens_per_s": 800.0}
    assert measured_load_skew(database, job.number) == 1.75
    assert measured_step(database, job.number, attempt=2, tokens_per_step=300) is None


@BOTH_DATABASES
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    step_records=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 3), st.booleans()), max_size=40),
    limit=st.integers(1, 15), since_step=st.integers(0, 6), name=st.sampled_from([None, "loss"]),
)  # fmt: skip
def test_pages_have_every_step_once_and_as_the_history_has_it(
    database: Database, step_records: list[tuple[int, int, bool]], limit: int, since_step: int, name: str | None
) -> None:
    job = add_job(database, f"job-{uuid4().hex[:12]}")
    new = [
        NewEvent("metric", 1, attempt, "group-0",
                 data_text({"step": step, ("loss" if has else "below"): {"loss": index}}), step)
        for index, (step, attempt, has) in enumerate(step_records)
    ]  # fmt: skip
    with database.write() as tx:
        append_events(tx, job.number, new)
    pages, next_step = [], since_step
    while next_step is not None:
        points, next_step = metric_page(database, job.number, name, next_step, limit)
        assert len(points) <= limit
        pages += points
    assert pages == metric_history(database, CurveStore(database), job.number, name, since_step, 100)


def test_a_spec_of_another_release_is_read_without_what_is_unknown() -> None:
    current_spec = JobSpec.parse(spec())
    old = current_spec.model_dump(mode="json")
    old["priority"] = "high"
    old["data"]["shuffle"] = {"buffer": 3}
    old["train"]["optimizer"]["amsgrad"] = True
    old["model"]["moe"]["jitter"] = 0.1
    assert read_stored_spec(json.dumps(old)) == current_spec
    del old["checkpoint"], old["train"]["label_smoothing"]  # what a release before did not have
    assert read_stored_spec(json.dumps(old)) == current_spec
    del old["train"]["num_steps"]
    with pytest.raises(ValidationError):
        read_stored_spec(json.dumps(old))
    assert read_stored_plan('{"version": 7}') is None
    assert read_stored_plan(None) is None


def test_attempt_tokens_are_the_same_after_a_restart_and_for_nobody_else(database: Database, tmp_path: Path) -> None:
    mint = TokenMint.of(database, tmp_path)
    token = mint.token("job-a", 1)
    assert TokenMint.of(database, tmp_path).token("job-a", 1) == token
    (tmp_path / "other").mkdir()
    other_mint = TokenMint.of(database, tmp_path / "other")
    other_tokens = {mint.token("job-a", 2), mint.token("job-b", 1), other_mint.token("job-a", 1)}
    assert len(other_tokens | {token}) == 4
    assert matches(token, hash_token(token))
    assert not any(matches(other_token, hash_token(token)) for other_token in other_tokens)
    assert not matches("", None)
    assert not matches(token, None)


def test_numbers_are_not_used_again(database: Database) -> None:
    first = add_job(database)
    with database.write() as tx:
        tx.execute(text("DELETE FROM labels"))
        tx.execute(text("DELETE FROM jobs"))
    assert add_job(database).number > first.number
