"""A store that was lost is rebuilt from storage: what has ended has its end, what runs is adopted."""

import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fsspec
import pytest

from moe.records import CheckpointRecord, StepRecord
from service.control.api.services import Services
from service.control.jobs import record_copy
from service.control.jobs.roots import StorageRoots
from service.control.jobs.stored_jobs import MAX_DEPTH, StoredJob, job_folders, read_stored_job
from service.control.launcher.launcher import Observation
from service.control.report.failure_history import read_failures
from service.control.report.saves import Saves
from service.control.scheduling import spec_keeper
from service.control.scheduling.recovery import Recovery, recover_state
from service.control.store.events import events_after
from service.control.store.jobs import get_job
from service.run.recorder import SpoolRecorder
from service.wire.attempt_folder import AttemptFolder
from service.wire.launch import Result
from tests.processes import DEADLINE_S, await_that
from tests.procs.launching import launch
from tests.service.checkpoints import commit
from tests.service.control_plane import ControlPlane, spec
from tests.service.controllers import step_job, submit_job
from tests.service.local_launcher import LocalLauncher
from tests.service_cli.command import shardyard


def lose_database(plane: ControlPlane) -> None:
    """Kills the control plane and takes its database away."""
    plane.kill()
    for path in plane.database.parent.glob("shardyard.db*"):
        path.rename(path.with_name(f"lost-{path.name}"))


def start_recovered(plane: ControlPlane, num_jobs: int) -> None:
    """Starts the control plane, which finds so many jobs on storage."""
    plane.start()
    await_that(lambda: len(plane.list_jobs()) == num_jobs)


def recorder(plane: ControlPlane, job: dict[str, Any]) -> SpoolRecorder:
    """Recorder of rank 0, as in a real attempt; nobody listens."""
    return SpoolRecorder(
        job_id=job["id"], attempt=1, storage=job["storage"], events_url="http://127.0.0.1:9", token="none",
        name="g0.rank-0", speaks=True, sweeps=True,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("node")
def test_jobs_are_recovered_with_their_ends_metrics_and_checkpoints(own_plane: ControlPlane) -> None:
    own_plane.start()
    first = own_plane.finished_job(name="first")
    ended_job = own_plane.finished_job(name="ended", labels={"team": "a"})
    failed_job = own_plane.await_state(own_plane.post(name="failed", labels={"fail": "yes"})["id"], "failed")
    run = recorder(own_plane, ended_job)
    run.record("started", {"group": 0, "resumed_step": 0, "workers": [{"rank": 0, "node": 0}]})
    for step in range(1, 6):
        run.metric(StepRecord(step, loss=1 / step))
    run.checkpoint(CheckpointRecord(step=5, name="step-00000005.a1.g0", size_bytes=7))
    run.close(patience_s=0.1)
    before = [own_plane.job(job["id"]) for job in (failed_job, ended_job, first)]

    lose_database(own_plane)
    start_recovered(own_plane, 3)
    fields = ("id", "name", "state", "labels", "spec", "storage", "attempt", "num_steps", "result", "owner")
    for job in before:
        recovered_job = own_plane.job(job["id"])
        assert {key: recovered_job[key] for key in fields} == {key: job[key] for key in fields}
    assert [job["name"] for job in own_plane.list_jobs()] == [
        "failed",
        "ended",
        "first",
    ]  # in the order in which they came
    recovered_job = own_plane.job(ended_job["id"])
    assert (recovered_job["step"], recovered_job["last_checkpoint"]["step"]) == (5, 5)
    assert own_plane.losses(ended_job["id"]) == {step: 1 / step for step in range(1, 6)}
    ids = [event.id for event in own_plane.events(ended_job["id"])]
    assert ids == list(range(1, len(ids) + 1))
    assert own_plane.list_jobs(label="team=a")[0]["id"] == ended_job["id"]
    assert sorted(own_plane.launcher.launches()) == sorted(f"{job['id']}-a1" for job in before)  # and no other


def test_what_runs_is_adopted_and_what_is_gone_waits_for_somebody(own_plane: ControlPlane) -> None:
    own_plane.start()
    hold = own_plane.hold()
    running_id, lost_id = (own_plane.post(name=name, labels={"hold": "hold"})["id"] for name in ("runs", "gone"))
    for job_id in (running_id, lost_id):
        own_plane.await_state(job_id, "running")
    lose_database(own_plane)
    own_plane.launcher.forget(f"{lost_id}-a1")
    start_recovered(own_plane, 2)
    assert "'resume' continues from its beginning" in own_plane.await_state(lost_id, "paused")["reason"]
    assert own_plane.await_state(running_id, "running")["dashboard_url"]
    hold.unlink()
    own_plane.await_state(running_id, "succeeded")  # its records are admitted: the token is its launch's
    assert list(own_plane.losses(running_id)) == [1, 2, 3, 4, 5]
    assert own_plane.act(lost_id, "resume").status_code == 202
    own_plane.await_state(lost_id, "succeeded")
    assert own_plane.launcher.launches().count(f"{running_id}-a1") == 1
    assert f"{lost_id}-a2" in own_plane.launcher.launches()


@pytest.mark.slow
def test_an_attempt_that_a_silent_cluster_turns_out_not_to_know_is_not_launched_again(own_plane: ControlPlane) -> None:
    own_plane.start()
    hold = own_plane.hold()
    lost_id, running_id = (own_plane.post(name=name, labels={"hold": "hold"})["id"] for name in ("gone", "runs"))
    for job_id in (lost_id, running_id):
        own_plane.await_state(job_id, "running")
    lose_database(own_plane)
    own_plane.launcher.forget(f"{lost_id}-a1")
    own_plane.launcher.set_reachable(False)
    start_recovered(own_plane, 2)
    assert own_plane.job(lost_id)["state"] == "recovering"
    own_plane.launcher.set_reachable(True)
    assert "recovered from its storage; attempt 1 was lost" in own_plane.await_state(lost_id, "paused")["reason"]
    own_plane.await_state(running_id, "running")
    # Once the cluster has said that it runs, it is a job like any other: lost with its cluster, it is launched again.
    own_plane.launcher.forget(f"{running_id}-a1")
    hold.unlink()
    own_plane.await_state(running_id, "succeeded")
    assert own_plane.launcher.launches() == [f"{running_id}-a2"]


@pytest.mark.slow
def test_a_job_that_failed_for_good_has_failed_again(own_plane: ControlPlane) -> None:
    own_plane.start()
    rules: list[Any] = [{"max_failures": 0}, {"max_failures": 1}, {"kinds": {"driver": {"max_failures": 1}}}]
    jobs = [own_plane.post(labels={"die_at": "1-1-1-1-1"}, retry=rule) for rule in rules]
    reasons = [own_plane.await_state(job["id"], "failed")["reason"] for job in jobs]
    lose_database(own_plane)
    start_recovered(own_plane, 3)
    for job, reason, attempt in zip(jobs, reasons, (1, 2, 2), strict=True):
        recovered_job = own_plane.job(job["id"])
        assert (recovered_job["state"], recovered_job["attempt"]) == ("failed", attempt), recovered_job["reason"]
        assert recovered_job["reason"].endswith(reason.rpartition("; ")[2])


def test_writes_while_slow_storage_is_read(services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "state" / "jobs" / "job-aaaaaaaaaaaa"
    folder.mkdir(parents=True)
    (folder / "spec.json").write_text(json.dumps(spec()))
    (folder / "attempts" / "1").mkdir(parents=True)
    roots = StorageRoots([str(folder.parent)])
    recovery = Recovery(services.database, roots, LocalLauncher(tmp_path / "cluster"), services.ingest, "me", tmp_path)
    wrote: list[bool] = []

    def slow(*_: Any) -> Iterator[Any]:  # in place of a share that hangs
        def write() -> None:
            with services.database.write():
                wrote.append(True)

        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        writer.join(DEADLINE_S)
        yield from ()

    monkeypatch.setattr(record_copy, "sealed_records", slow)
    assert [job_id for job_id, _, _ in recovery.run().jobs] == [folder.name]
    assert wrote == [True]


@pytest.mark.slow
def test_a_recovery_that_was_broken_off_goes_on(own_plane: ControlPlane) -> None:
    own_plane.start()
    storages = [Path(own_plane.finished_job(name=f"job-{number}")["storage"]) for number in range(3)]
    lose_database(own_plane)
    for storage in storages[1:]:
        storage.rename(storage.with_suffix(".hidden"))
    start_recovered(own_plane, 1)
    own_plane.kill()
    for storage in storages[1:]:
        storage.with_suffix(".hidden").rename(storage)
    (own_plane.folder / "state" / "recovering").touch()
    start_recovered(own_plane, 3)
    await_that(lambda: not (own_plane.folder / "state" / "recovering").exists())


@pytest.mark.slow
def test_the_command_recovers_beside_a_running_service_and_says_what_it_cannot(own_plane: ControlPlane) -> None:
    job = own_plane.start().finished_job()
    lose_database(own_plane)
    storage = Path(job["storage"])
    storage.rename(storage.with_suffix(".hidden"))
    own_plane.start()
    own_plane.finished_job()
    storage.with_suffix(".hidden").rename(storage)
    broken = storage.with_name("job-aaaaaaaaaaaa")
    broken.mkdir()
    (broken / "spec.json").write_text("no JSON")
    command = ("recover", "--json", "--state-dir", own_plane.folder / "state")
    result = shardyard(*command, "--ray-dashboard-url", "http://127.0.0.1:9")
    assert result.returncode == 1, result.stderr
    report = json.loads(result.stdout)
    assert [(entry["id"], entry["state"]) for entry in report["jobs"]] == [(job["id"], "succeeded")]
    assert [entry["storage"] for entry in report["skipped"]] == [str(broken)]
    assert own_plane.job(job["id"])["result"]["report"] == {"steps": 5}
    repeat = shardyard(*command, "--ray-dashboard-url", "http://127.0.0.1:9")
    assert json.loads(repeat.stdout)["jobs"] == []


@pytest.mark.slow
def test_deleted_jobs_do_not_come_back(own_plane: ControlPlane) -> None:
    job = own_plane.start().finished_job()
    await_that(lambda: own_plane.http.delete(f"/v1/jobs/{job['id']}").status_code == 200)
    lose_database(own_plane)
    own_plane.start()
    own_plane.finished_job()
    assert own_plane.http.get(f"/v1/jobs/{job['id']}").status_code == 404


def test_folders_of_jobs_are_found_below_roots_and_through_no_link(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    jobs = ["job-aaaaaaaaaaaa", "team/a/job-bbbbbbbbbbbb"]
    for folder in (*(root / job for job in jobs), elsewhere / "job-cccccccccccc"):
        folder.mkdir(parents=True)
        (folder / "spec.json").write_text("{}")
    (root / "job-dddddddddddd").mkdir()  # refused before its spec was there
    (root / "link").symlink_to(elsewhere)
    (root / "job-eeeeeeeeeeee").symlink_to(elsewhere / "job-cccccccccccc")
    roots = StorageRoots([str(root), str(tmp_path / "missing"), f"file://{root}"])
    assert sorted(job_folders(roots)) == [str(root / job) for job in jobs]


def test_folders_of_jobs_are_found_on_storage_that_is_no_file_system() -> None:
    root = "memory://recovered-roots"
    files, _ = fsspec.core.url_to_fs(root)
    deep = "/".join("abcdefgh"[:MAX_DEPTH])
    jobs = ["job-aaaaaaaaaaaa", f"{deep}/job-bbbbbbbbbbbb"]
    for job in (*jobs, f"{deep}/one-more/job-cccccccccccc"):
        files.pipe(f"/recovered-roots/{job}/spec.json", b"{}")
    files.pipe("/recovered-roots/job-dddddddddddd/events", b"")  # refused before its spec was there
    try:
        assert sorted(job_folders(StorageRoots([root]))) == sorted(f"{root}/{job}" for job in jobs)
    finally:
        files.rm("/recovered-roots", recursive=True)


def test_a_folder_that_may_not_be_read_keeps_no_job_from_being_found() -> None:
    """As the `lost+found` of a volume that is a storage root."""
    root = Path(tempfile.mkdtemp(dir="/tmp"))
    user = os.geteuid()
    closed_folder, job = root / "lost+found", root / "team" / "job-aaaaaaaaaaaa"
    try:
        root.chmod(0o755)
        job.mkdir(parents=True)
        (job / "spec.json").write_text("{}")
        closed_folder.mkdir(mode=0o000)
        skipped_folders: list[str] = []
        if user == 0:
            os.seteuid(54321)  # root may read everything
        try:
            folders = list(job_folders(StorageRoots([str(root)]), lambda folder, _: skipped_folders.append(folder)))
        finally:
            os.seteuid(user)
        assert (folders, skipped_folders) == ([str(job)], [str(closed_folder)])
    finally:
        shutil.rmtree(root)


RUNNING, PAUSED, RECOVERING = "running", "paused", "recovering"


@pytest.mark.parametrize(
    ("attempt", "result", "status", "state"),
    [
        (0, None, None, PAUSED),
        (1, "succeeded", None, "succeeded"),
        (1, "cancelled", "running", "cancelled"),
        (1, "paused", "unknown", PAUSED),
        (1, "failed", "failed", "failed"),
        (1, "died", "failed", PAUSED),
        (1, "died", "unknown", PAUSED),
        (1, None, None, RECOVERING),
        (1, None, "running", RECOVERING),
        (1, None, "pending", RECOVERING),
        (1, None, "failed", PAUSED),
        (1, None, "succeeded", PAUSED),
        (1, None, "stopped", PAUSED),
        (1, None, "unknown", PAUSED),
    ],
)
def test_where_a_job_stands(standing_job: StoredJob, attempt: int, result: str | None, status: Any, state: str) -> None:
    outcome: Any = {"died": "failed"}.get(result or "", result)
    job_result = Result(outcome=outcome, step=3, retryable=result == "died") if outcome else None
    job = StoredJob(**{**vars(standing_job), "attempt": attempt, "result": job_result})
    standing = recover_state(job, Observation(status=status) if status else None)
    assert (standing.state, standing.is_on_cluster) == (state, state == RECOVERING)


@pytest.fixture
def standing_job(tmp_path: Path) -> StoredJob:
    folder = tmp_path / "job-aaaaaaaaaaaa"
    folder.mkdir()
    (folder / "spec.json").write_text(json.dumps(spec()))
    os.utime(folder / "spec.json", (1.7e9, 1.7e9))
    job = read_stored_job(StorageRoots([str(tmp_path)]), str(folder))
    assert (job.id, job.attempt, job.created_at.timestamp()) == ("job-aaaaaaaaaaaa", 0, 1.7e9)
    return job


class EndedLauncher(LocalLauncher):
    """A cluster on which every driver has died."""

    def observe(self, submission_id: str) -> Observation:
        return Observation(status="failed")


@pytest.mark.parametrize(
    ("failures_left", "state", "num_driver_failures"),
    [({"driver": 0}, "failed", 2), ({"driver": 1}, PAUSED, 1), ({"driver": 2}, PAUSED, 0), ({}, PAUSED, 0)],
)
def test_failures_of_earlier_attempts_count_by_their_kind(
    services: Services, tmp_path: Path, failures_left: dict[str, int], state: str, num_driver_failures: int
) -> None:
    retry = {"max_failures": 3, "kinds": {"driver": {"max_failures": 2}}}
    storage = str(tmp_path / "state" / "jobs" / "job-aaaaaaaaaaaa")
    store_launch(storage, failures_left, retry=retry)
    recover(services, tmp_path, storage)
    with services.database.read() as tx:
        job = get_job(tx, "job-aaaaaaaaaaaa")
    assert job is not None
    assert job.state == state, job.reason
    assert read_failures(job.losses, job.failures).num_of("driver") == num_driver_failures


def test_a_checkpoint_that_no_record_mentions_is_the_last_one(services: Services, tmp_path: Path) -> None:
    storage = str(tmp_path / "state" / "jobs" / "job-aaaaaaaaaaaa")
    store_launch(storage, {})
    commit(storage, step=3, size_bytes=5)
    recover(services, tmp_path, storage)
    with services.database.read() as tx:
        job = get_job(tx, "job-aaaaaaaaaaaa")
    assert job is not None
    assert job.step == 3
    last_commit = Saves.model_validate_json(job.saves or "").committed
    assert last_commit is not None
    assert (last_commit.step, last_commit.time) == (3, datetime(2026, 1, 31, 12, tzinfo=UTC))


def store_launch(storage: str, failures_left: dict[str, int], **changes: Any) -> None:
    """Storage of a job whose first attempt was launched."""
    folder = Path(storage)
    folder.mkdir(parents=True)
    changes_of_launch = {"job_id": folder.name, "storage": storage, "failures_left": failures_left}
    first_launch = launch(folder, **changes).model_copy(update=changes_of_launch)
    (folder / "spec.json").write_text(first_launch.spec.model_dump_json())
    AttemptFolder(storage, 1).write_launch(first_launch)


def recover(services: Services, folder: Path, storage: str) -> None:
    """Recover the job from its storage, and no other."""
    launcher = EndedLauncher(folder / "ended")
    recovery = Recovery(
        services.database, StorageRoots([str(Path(storage).parent)]), launcher, services.ingest, "me", folder
    )
    assert [job_id for job_id, _, _ in recovery.run().jobs] == [Path(storage).name]


def test_a_removed_spec_is_written_again_and_told(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec_keeper, "CHECK_INTERVAL_S", 0.0)
    job = submit_job(services, labels={"silent": "yes", "step_ms": "60000"})
    await_that(lambda: step_job(services, job.id).launch == "submitted")
    shutil.rmtree(job.storage)

    def log_lines() -> list[str]:
        services.controller.step()
        with services.database.read() as tx:
            events = events_after(tx, job.number, 0, 1000)
        return [event.data for event in events if event.kind == "log" and job.storage in event.data]

    await_that(lambda: bool(log_lines()))
    assert len(log_lines()) == 1
    assert read_stored_job(StorageRoots([str(Path(job.storage).parent)]), job.storage).spec.name == "small"
