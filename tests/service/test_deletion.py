"""Deleting a job removes all of it and nothing else, for good, whatever dies meanwhile."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.train.checkpoint import marker as markers
from service.control.api.services import Services
from service.control.errors import Conflict, Gone
from service.control.jobs.stored_jobs import find_job
from service.control.retention import deletions
from service.control.store.clock import now_us
from service.control.store.events import NewEvent, append_events, events_after
from service.control.store.jobs import get_job
from service.wire.states import State
from tests.processes import await_that
from tests.service.checkpoints import commit, fault_of
from tests.service.control_plane import ControlPlane, spec
from tests.service.controllers import SimulatedKill, controller_on, stored_job, submit_job
from tests.service.silent_run import Run, metric


def deletion_record(plane: ControlPlane, job_id: str) -> dict[str, Any]:
    """Delete a job; return the record of its finished deletion."""
    path = f"/v1/jobs/{job_id}"
    assert plane.http.delete(path).status_code == 202
    await_that(lambda: plane.http.get(path).status_code == 410, lambda: str(plane.job(job_id)))
    answer = plane.http.delete(path)
    assert answer.status_code == 200
    return dict(answer.json())


def test_all_of_a_job_goes_and_who_asked_for_it_stays(plane: ControlPlane) -> None:
    neighbour, job = plane.finished_job(), plane.finished_job(labels={"a": "b"})
    storage, path = Path(job["storage"]), f"/v1/jobs/{job['id']}"
    commit(storage, 5)
    record = deletion_record(plane, job["id"])
    assert not storage.exists()
    assert (record["state"], record["actor"], record["name"]) == ("deleted", "user:local", "small")
    detail = f"{job['id']} was deleted by user:local at {record['finished_at']}"
    for part in ("", "/plan", "/metrics", "/events", "/logs", "/checkpoints"):
        answer = plane.http.get(path + part)
        assert (answer.status_code, answer.json()["detail"]) == (410, detail)
    assert [plane.act(job["id"], action).status_code for action in ("cancel", "pause", "resume")] == [410] * 3
    left = {item["id"] for item in plane.list_jobs()}
    assert (job["id"] in left, neighbour["id"] in left) == (False, True)
    assert Path(neighbour["storage"], "spec.json").exists()


def test_only_what_has_ended_or_is_paused_is_deleted(plane: ControlPlane, run: Run) -> None:
    waiting_id = plane.post(resources={"num_workers": 900})["id"]
    for job_id, state in ((run.id, "starting"), (waiting_id, "queued")):
        answer = plane.http.delete(f"/v1/jobs/{job_id}")
        assert (answer.status_code, f"{job_id} is {state}; " in answer.json()["detail"]) == (409, True)
    plane.act(waiting_id, "pause")
    assert deletion_record(plane, waiting_id)["state"] == "deleted"
    assert plane.http.delete("/v1/jobs/job-aaaaaaaaaaaa").status_code == 404


def test_open_streams_end_with_the_reason_and_late_records_are_refused(plane: ControlPlane) -> None:
    run = Run(plane)
    run.send(0, metric(1))
    plane.http.post(f"/v1/jobs/{run.id}/pause")
    plane.await_state(run.id, "paused")
    stream = plane.events(run.id)
    next(stream)
    with plane.http.stream("GET", f"/v1/jobs/{run.id}/logs", params={"follow": True}) as log:
        deletion_record(plane, run.id)
        last = list(stream)[-1]
        assert list(log.iter_lines()) == []
    assert (last.kind, last.actor) == ("state", "user:local")
    assert last.data == {
        "state": "deleting", "previous": "paused",
        "reason": "deletion requested by local; removing its files first",
    }  # fmt: skip
    late_answer: httpx.Response = run.send(1, metric(2))
    assert (late_answer.status_code, late_answer.json()["request"]) == (403, "cancel")
    assert late_answer.json()["detail"] == f"{run.id} was deleted; its records are refused"
    stranger = run.send(1, metric(2), token="f" * 64)
    assert (stranger.status_code, "request" in stranger.json()) == (403, False)


def test_a_key_is_not_used_again(plane: ControlPlane) -> None:
    """A request that is repeated after its job was deleted must not run it once more."""
    headers = {"idempotency-key": "of a deleted job"}
    job = plane.http.post("/v1/jobs", json=spec(), headers=headers).json()
    plane.await_state(job["id"], "succeeded")
    deletion_record(plane, job["id"])
    repeat = plane.http.post("/v1/jobs", json=spec(), headers=headers)
    assert repeat.status_code == 409
    assert f"belongs to a deleted job: {job['id']} was deleted by user:local" in repeat.json()["detail"]


# Crashes, symbolic links and other stores, with a controller that these tests step by hand


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("plane")
    services = controller_on(folder, storage_roots=(str(folder / "storage"), "memory://jobs"))
    services.controller.step()
    yield services
    services.database.close()


def cancelled_job(services: Services, num_events: int = 0, **changes: Any) -> tuple[str, str]:
    """The id and the storage of a job that has ended."""
    job = submit_job(services, resources={"num_workers": 900}, **changes)
    services.requests.cancel(job.id, "tester")
    with services.database.write() as tx:
        append_events(tx, job.number, [NewEvent("log", now_us(), 1, "driver", "{}")] * num_events)
    return job.id, job.storage


def reason_after_a_step(services: Services, job_id: str) -> str:
    """Ask for a deletion and try it once."""
    services.deletions.ask(job_id, "tester")
    services.deletions.step()
    return stored_job(services, job_id).reason


def delete_all(services: Services, job_id: str) -> None:
    services.deletions.ask(job_id, "tester")
    for _ in range(1000):
        with services.database.read() as tx:
            if get_job(tx, job_id) is None:
                return
        services.deletions.step()
    raise AssertionError(f"{job_id} is not deleted")


NAMES = st.sampled_from(["a", "b", "checkpoints", "logs", "step-00000001.a1.g0.commit.json", ".hidden", "é"])
TREES: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from(["file", "link to a file", "link to a folder", "broken link"]),
    lambda children: st.dictionaries(NAMES, children, max_size=4),
    max_leaves=12,
)


def grow(folder: Path, tree: dict[str, Any], outside_folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name, kind in tree.items():
        path = folder / name
        if isinstance(kind, dict):
            grow(path, kind, outside_folder)
        elif kind == "file":
            path.write_text("x")
        else:
            targets = {
                "link to a file": outside_folder / "file",
                "link to a folder": outside_folder,
                "broken link": "nowhere",
            }
            path.symlink_to(targets[kind])


@given(tree=st.dictionaries(NAMES, TREES, max_size=5), dies_at=st.integers(0, 25))
def test_deletion_killed_anywhere_goes_on(services: Services, tree: dict[str, Any], dies_at: int) -> None:
    job_id, storage = cancelled_job(services, num_events=3)
    outside_folder = Path(storage).parent / f"outside-{job_id}"
    (outside_folder / "folder").mkdir(parents=True)
    (outside_folder / "file").write_text("precious")
    grow(Path(storage), tree, outside_folder)
    if not os.path.lexists(f"{storage}/checkpoints"):
        commit(storage, 7)
    services.deletions.ask(job_id, "tester")
    left = dies_at
    with pytest.MonkeyPatch.context() as patch:

        def deadly(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **keywords: Any) -> Any:
                nonlocal left
                left -= 1
                if left < 0:
                    raise SimulatedKill
                return function(*arguments, **keywords)

            return call

        for name in ("unlink", "rmdir"):
            patch.setattr(f"service.control.retention.removal.os.{name}", deadly(getattr(os, name)))
        for name in ("delete_oldest_events", "delete_job", "finish_deletion"):
            patch.setattr(deletions, name, deadly(getattr(deletions, name)))
        patch.setattr(deletions, "STEP_S", 0.0)
        patch.setattr(deletions, "STEP_EVENTS", 2)
        try:
            delete_all(services, job_id)
        except SimulatedKill:
            assert stored_job(services, job_id).state == State.DELETING
            with services.database.read() as tx, pytest.raises(Gone, match="is being deleted"):
                find_job(tx, job_id)
            if Path(storage, "checkpoints/step-00000007.a1.g0.commit.json").exists():
                assert fault_of(storage, "step-00000007.a1.g0") is None
    delete_all(services, job_id)
    assert not os.path.lexists(storage)
    assert (outside_folder / "file").read_text() == "precious"
    assert (outside_folder / "folder").is_dir()
    with services.database.read() as tx, pytest.raises(Gone, match=f"{job_id} was deleted by user:tester at 20"):
        find_job(tx, job_id)
    assert services.deletions.ask(job_id, "somebody else")[0].actor == "user:tester"
    shutil.rmtree(outside_folder)


@pytest.mark.parametrize("place", ["the folder", "a folder above"])
def test_a_folder_that_was_swapped_for_a_link_is_not_followed(services: Services, tmp_path: Path, place: str) -> None:
    root = Path(services.settings.storage_roots[0])
    job_id, storage = cancelled_job(services, storage=str(root / "mine"))
    shutil.move(root / "mine", tmp_path / "moved")
    link = Path(storage) if place == "the folder" else root / "mine"
    if place == "the folder":
        link.parent.mkdir()
    link.symlink_to(tmp_path / "moved" / (job_id if place == "the folder" else ""))
    reason = reason_after_a_step(services, job_id)
    assert f"{link.name!r} is a symbolic link, which is not followed" in reason
    assert (tmp_path / "moved" / job_id / "spec.json").exists()
    link.unlink()
    delete_all(services, job_id)


def test_a_root_that_is_not_there_is_waited_for(services: Services) -> None:
    """A share that is not mounted now: what lies on it is not gone."""
    job_id, storage = cancelled_job(services)
    root = Path(services.settings.storage_roots[0])
    unmounted_root = root.rename(root.with_name("unmounted"))
    assert f"the storage root {root} is missing" in reason_after_a_step(services, job_id)
    unmounted_root.rename(root)
    delete_all(services, job_id)
    assert not Path(storage).exists()


def test_storage_that_is_no_file_system(services: Services) -> None:
    job_id, storage = cancelled_job(services, storage="memory://jobs/team")
    files, path = fsspec.core.url_to_fs(storage)
    for name in ("logs/a1.driver/segment-00000000.log", "checkpoints/step-00000001.a1.g0.commit.json"):
        files.pipe_file(f"{path}/{name}", b"x")
    files.pipe_file("/jobs/team/other", b"stays")
    delete_all(services, job_id)
    assert files.find("/jobs/team") == ["/jobs/team/other"]


def test_a_step_takes_a_bounded_number_of_files_and_rows(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id, storage = cancelled_job(services, num_events=10)
    for number in range(5):
        Path(storage, str(number)).touch()
    monkeypatch.setattr(deletions, "STEP_S", 0.0)
    monkeypatch.setattr(deletions, "STEP_EVENTS", 4)
    services.deletions.ask(job_id, "tester")
    num_files = []
    while Path(storage).exists():
        num_files.append(len(os.listdir(storage)))
        services.deletions.step()
    assert num_files == [6, 5, 4, 3, 2, 1, 0]
    with services.database.read() as tx:
        assert len(events_after(tx, stored_job(services, job_id).number, 0, 100)) == 9
    delete_all(services, job_id)


def test_what_a_killed_process_spooled_here_goes_too(services: Services, node: Path) -> None:
    job_id, _ = cancelled_job(services)
    base = node / f"shardyard-spool-{os.getuid()}"
    (base / job_id / "logs/a1.driver").mkdir(parents=True)
    (base / job_id / "logs/a1.driver/segment-00000000.log").touch()
    (base / "job-of-another").mkdir()
    delete_all(services, job_id)
    assert os.listdir(base) == ["job-of-another"]


def test_a_job_outside_the_roots_of_now_is_left_as_it_is(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id, storage = cancelled_job(services)
    monkeypatch.setattr(services.deletions._roots, "_roots", [("file", "/elsewhere")])
    with pytest.raises(Conflict, match="outside the storage roots of this service"):
        services.deletions.ask(job_id, "tester")
    assert Path(storage, "spec.json").exists()
    assert markers.FOLDER not in os.listdir(storage)
