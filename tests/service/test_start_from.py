"""Jobs that start from another job's checkpoint: it is found, checked, and copied whole or not at all; training goes on
as if uninterrupted."""

import errno
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from moe.spec import JobSpec
from moe.storage.folder import Folder
from moe.train.checkpoint import marker as markers
from service.control.errors import Full, ServiceError, Unavailable
from service.control.jobs.roots import StorageRoots
from service.control.retention.full_roots import FullRoots
from service.control.scheduling.warm_starts import MAX_COPIES, WarmStarts
from service.control.store.database import Database
from service.control.store.deletions import DeletionRow, insert_deletion
from service.control.store.jobs import insert_job
from tests.processes import await_that
from tests.refusals import Summary, check, expect_problem
from tests.service.checkpoints import commit, fault_of
from tests.service.control_plane import ControlPlane, spec
from tests.unit.train_runs import corpus, job

TRAIN = {"num_steps": 9, "batch_tokens": 1024}


@pytest.fixture(scope="module")
def source(plane: ControlPlane) -> dict[str, Any]:
    return ended_with(plane, 2, 4, 5)


def submit(plane: ControlPlane, source: str, step: int | None = None, **changes: Any) -> dict[str, Any]:
    return plane.post(**{"train": TRAIN, "start_from": {"job": source, "step": step}, **changes})


def problems(plane: ControlPlane, source: str = "", step: int | None = None, **changes: Any) -> list[dict[str, Any]]:
    body = spec(**{"train": TRAIN, "start_from": {"job": source, "step": step}, **changes})
    answer = plane.http.post("/v1/jobs", json=body)
    assert answer.status_code == 422, answer.text
    return list(answer.json()["errors"])


def ended_with(plane: ControlPlane, *steps: int, **changes: Any) -> dict[str, Any]:
    """A job that has ended, with checkpoints of these steps."""
    job = plane.finished_job()
    for step in steps:
        commit(job["storage"], step, spec=job["spec"], **changes)
    return job


def checkpoints(plane: ControlPlane, job: dict[str, Any]) -> list[dict[str, Any]]:
    return list(plane.http.get(f"/v1/jobs/{job['id']}/checkpoints").json()["items"])


@pytest.mark.sample(1)
@pytest.mark.parametrize(("step", "expected_step"), [(None, 5), (2, 2), (4, 4)])
def test_a_job_starts_with_a_copy(
    plane: ControlPlane, source: dict[str, Any], step: int | None, expected_step: int
) -> None:
    job = submit(plane, source["id"], step, labels={"hold": "never"})
    assert (job["step"], job["reason"]) == (
        expected_step,
        f"starts from step {expected_step} of {source['id']}; waiting for its turn",
    )
    (copy,) = checkpoints(plane, job)
    assert (copy["name"], copy["fault"]) == (f"step-{expected_step:08d}.a0.g0", None)
    own_folder = Folder(f"{job['storage']}/checkpoints")
    marker = markers.read(own_folder, copy["name"])
    last_checkpoint = job["last_checkpoint"]
    assert (last_checkpoint["step"], last_checkpoint["size_bytes"], last_checkpoint["time"] >= job["created_at"]) == (
        expected_step,
        marker.size_bytes,
        True,
    )
    assert markers.fault(own_folder, marker) is None
    original = Folder(f"{source['storage']}/checkpoints")
    assert marker.files == markers.read(original, f"step-{expected_step:08d}.a1.g0").files
    assert plane.await_state(job["id"], "succeeded", "failed")["state"] == "succeeded"


def test_the_copy_outlives_the_other_job(plane: ControlPlane) -> None:
    other_job = ended_with(plane, 3, size_bytes=3_000_000)
    job = submit(plane, other_job["id"])
    shutil.rmtree(other_job["storage"])
    assert fault_of(job["storage"], "step-00000003.a0.g0") is None


REFUSALS: list[tuple[dict[str, Any], Summary]] = [
    ({"train": {"num_steps": 5, "batch_tokens": 1024}}, ("out_of_range", "train.num_steps", 5)),
    ({"train": {**TRAIN, "optimizer": {"name": "adafactor"}}}, ("conflict", "train.optimizer.name", "adafactor")),
    ({"train": {**TRAIN, "dtype": "bfloat16"}}, ("conflict", "train.dtype", "bfloat16")),
    ({"model": {"preset": "gshard-tiny", "ffn_dim": 128}}, ("conflict", "model.ffn_dim", 128)),
    ({"model": {"preset": "gshard-tiny", "source_vocab_size": 3000, "target_vocab_size": 3000}},
     ("conflict", "model.source_vocab_size", 3000)),
    ({"data": {"corpus": "catalogs", "languages": ["de", "fr"]}}, ("conflict", "data.languages", ["de", "fr"])),
    ({"data": {"corpus": "catalogs", "max_tokens": 64}}, ("conflict", "data.max_tokens", 64)),
    ({"start_from": {"job": "job-aaaaaaaaaaaa"}}, ("not_found", "start_from.job", "job-aaaaaaaaaaaa")),
    ({"start_from": {"step": 3}}, ("not_found", "start_from.step", 3)),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "expected"), REFUSALS, ids=[row[1][1] for row in REFUSALS])
def test_a_spec_that_does_not_fit_the_checkpoint_is_refused(
    plane: ControlPlane, source: dict[str, Any], changes: dict[str, Any], expected: Summary
) -> None:
    folders = set((plane.folder / "state/storage").iterdir())
    start_from = {"job": source["id"], **changes.get("start_from", {})}
    errors = problems(plane, **{**changes, "start_from": start_from})
    errors[0]["rule"] = errors[0]["rule"].replace(source["id"], "JOB")
    check(errors[:1], [expected])
    if expected[1] == "start_from.step":
        assert errors[0]["remedy"] == "use one of 2, 4, 5, or omit it for the newest"
    assert set((plane.folder / "state/storage").iterdir()) == folders


def test_a_spec_may_differ_in_the_course_from_there(plane: ControlPlane, source: dict[str, Any]) -> None:
    optimizer = {"name": "adamw", "peak_lr": 1e-4, "weight_decay": 0.1}
    train = {"num_steps": 40, "batch_tokens": 2048, "seed": 7, "optimizer": optimizer, "clip_norm": None,
             "schedule": {"decay": "linear"}, "label_smoothing": 0.0}  # fmt: skip
    submit(
        plane, source["id"], train=train, resources={"num_workers": 2}, parallel={"expert": 2},
        data={"corpus": "catalogs", "sampling_exponent": 1.0}, checkpoint={"every_steps": 3}, name="other",
    )  # fmt: skip


@pytest.mark.slow
def test_jobs_that_are_deleted_of_another_owner_or_without_a_checkpoint_are_refused(own_plane: ControlPlane) -> None:
    own_plane.start()
    deleted_job, bare, foreign = ended_with(own_plane, 4), ended_with(own_plane), ended_with(own_plane, 2)
    assert own_plane.http.delete(f"/v1/jobs/{deleted_job['id']}").status_code == 202
    Folder(f"{bare['storage']}/checkpoints").write("step-00000004.a1.g0/__0_0.distcp", b"unsealed")
    rules = [problems(own_plane, job["id"])[0]["rule"] for job in (deleted_job, bare)]
    own_plane.kill()
    own_plane.start(owner="somebody-else")
    (error,) = problems(own_plane, foreign["id"])
    assert (error["code"], error["path"]) == ("not_found", "start_from.job")
    assert [*rules, error["rule"]] == [
        "was deleted with its checkpoints", "has no committed checkpoint", "is not a job of yours",
    ]  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("harm", ["flipped", "short", "missing", "elsewhere", "linked", "linked spec"])
def test_a_damaged_checkpoint_is_never_taken(plane: ControlPlane, harm: str) -> None:
    other_job = ended_with(plane, 2, 4)
    damaged_folder = Path(other_job["storage"]) / "checkpoints/step-00000004.a1.g0"
    content = (damaged_folder / "__0_0.distcp").read_bytes()
    if harm == "missing":
        (damaged_folder / "__0_0.distcp").unlink()
    elif harm.startswith("linked"):  # to the file that the marker seals, but outside the job's folder
        path = damaged_folder / ("spec.json" if harm == "linked spec" else "__0_0.distcp")
        outside_path = plane.folder / f"outside-{path.name}"
        path.rename(outside_path)
        path.symlink_to(outside_path)
    elif harm == "elsewhere":  # a forged marker with valid seals
        folder = Folder(str(damaged_folder.parent))
        marker = markers.read(folder, damaged_folder.name)
        files = {"../../../stolen": markers.seal(content), **marker.files}
        folder.write(damaged_folder.name + markers.SUFFIX, marker.model_copy(update={"files": files}).to_bytes())
    else:
        changed_bytes = content[:-1] if harm == "short" else bytes([content[0] ^ 1]) + content[1:]
        (damaged_folder / "__0_0.distcp").write_bytes(changed_bytes)
    (error,) = problems(plane, other_job["id"], 4)
    assert (error["path"], "(step-00000004" in error["rule"]) == ("start_from.step", True)
    # Without a step in the spec, the checkpoint before it is used, as by a run.
    job = submit(plane, other_job["id"])
    copy_names = [path.name for path in (Path(job["storage"]) / "checkpoints").iterdir() if path.is_dir()]
    assert copy_names == [copy["name"] for copy in checkpoints(plane, job)] == ["step-00000002.a0.g0"]


def add_zeros(storage: str, name: str, size_bytes: int) -> None:
    """Add a sparse file to a committed checkpoint; copying it takes a while."""
    folder = Folder(f"{storage}/checkpoints")
    with open(folder.path_of(f"{name}/zeros.distcp"), "wb") as file:
        file.truncate(size_bytes)
    digest, block = hashlib.sha256(), bytes(1 << 20)
    for _ in range(size_bytes // len(block)):
        digest.update(block)
    marker = markers.read(folder, name)
    files = {**marker.files, "zeros.distcp": markers.FileSeal(size_bytes=size_bytes, sha256=digest.hexdigest())}
    folder.write(name + markers.SUFFIX, marker.model_copy(update={"files": files}).to_bytes())


def drafts_of_some_megabytes(storage: Path) -> list[Path]:
    """Draft files that copies are being written to."""
    drafts = []
    for path in storage.glob("*/checkpoints/*.a0.g0/.*.draft"):
        with suppress(FileNotFoundError):  # a small one, complete by now
            if path.stat().st_size > 4 << 20:
                drafts.append(path)
    return drafts


def test_killed_in_the_middle_of_the_copy(own_plane: ControlPlane) -> None:
    """No job, no checkpoint that looks whole, and eventually no folder; a repeated post makes both."""
    other_job = ended_with(own_plane.start(abandoned_after_s=3.0), 2)
    size_bytes = 400 << 20
    add_zeros(other_job["storage"], "step-00000002.a1.g0", size_bytes)
    body = spec(train=TRAIN, start_from={"job": other_job["id"]})
    headers = {"idempotency-key": "once"}

    def post() -> None:
        with suppress(httpx.TransportError):
            own_plane.http.post("/v1/jobs", json=body, headers=headers)

    poster = threading.Thread(target=post)
    poster.start()
    storage = own_plane.folder / "state/storage"
    await_that(lambda: drafts_of_some_megabytes(storage))
    own_plane.kill()
    poster.join()
    (draft,) = drafts_of_some_megabytes(storage)
    assert draft.stat().st_size < size_bytes
    assert not list(storage.glob("*/checkpoints/*.a0.g0.commit.json"))
    own_plane.start()
    assert len(own_plane.list_jobs()) == 1
    await_that(lambda: not draft.parents[2].exists())
    assert markers.list_committed(Folder(f"{other_job['storage']}/checkpoints"))
    commit(other_job["storage"], 3, spec=other_job["spec"])  # smaller, copied in a moment
    answer = own_plane.http.post("/v1/jobs", json=body, headers=headers)
    assert answer.status_code == 201
    assert fault_of(answer.json()["storage"], "step-00000003.a0.g0") is None


class Copies:
    """Checkpoints that are copied in this process; `while_copying` is called in the middle of each."""

    def __init__(self, folder: Path) -> None:
        self.database = Database(f"sqlite:///{folder / 'shardyard.db'}")
        self.database.migrate()
        self.folder = folder
        values = {
            "id": "job-source", "owner": "me", "name": "x", "spec": "{}", "storage": str(folder / "source"),
            "state": "succeeded", "reason": "", "num_steps": 5, "created_at": 0, "updated_at": 0, "queued_at": 0,
        }  # fmt: skip
        with self.database.write() as tx:
            insert_job(tx, values, {})
        commit(values["storage"], 2, spec=JobSpec.parse(spec()).model_dump(mode="json"))
        self.spec = JobSpec.parse(spec(train=TRAIN, start_from={"job": "job-source"}))
        self.while_copying: Callable[[], bool] = lambda: False
        roots = StorageRoots([str(folder)])
        self.full_roots = FullRoots(roots)
        self.warm_starts = WarmStarts(self.database, roots, self.full_roots, lambda: self.while_copying())

    def copy(self, name: str) -> Folder:
        self.warm_starts.copy(self.spec, "me", str(self.folder / name))
        return Folder(str(self.folder / name / "checkpoints"))


@pytest.fixture
def copies(tmp_path: Path) -> Iterator[Copies]:
    copies = Copies(tmp_path)
    yield copies
    copies.database.close()


def test_a_few_copies_at_a_time_and_no_more(copies: Copies) -> None:
    copy_numbers: list[int] = []

    def copy_next() -> bool:
        if len(copy_numbers) < MAX_COPIES:
            copy_numbers.append(len(copy_numbers))
            if len(copy_numbers) < MAX_COPIES:
                copies.copy(f"copy-{len(copy_numbers)}")
            else:
                with pytest.raises(Unavailable, match="checkpoints are already being copied for other jobs"):
                    copies.copy("one-too-many")
        return False

    copies.while_copying = copy_next
    copies.copy("copy-0")
    assert len(copy_numbers) == MAX_COPIES
    copies.copy("later")
    copies.while_copying = lambda: True
    with pytest.raises(Unavailable, match="this service is stopping"):
        copies.copy("given-up")
    assert not markers.list_committed(Folder(str(copies.folder / "given-up/checkpoints")))


def test_a_link_that_is_planted_while_it_is_copied_changes_no_answer(copies: Copies) -> None:
    elsewhere, link = copies.folder / "elsewhere", copies.folder / "first"
    (elsewhere / "checkpoints").mkdir(parents=True)
    (elsewhere / "checkpoints/file").touch()
    (copies.folder / "source/checkpoints/step-00000002.a1.g0/__0_0.distcp").write_bytes(b"x" * 100)

    def plant() -> bool:
        if not link.is_symlink():
            shutil.rmtree(link)
            link.symlink_to(elsewhere)
        return False

    copies.while_copying = plant
    with expect_problem("not_found", "start_from.step", None):
        copies.copy("first")
    assert [path.name for path in elsewhere.rglob("*")] == ["checkpoints", "file"]


def test_a_job_that_is_deleted_while_it_is_copied_is_said_to_be(copies: Copies) -> None:
    commit(copies.folder / "source", 1, spec=JobSpec.parse(spec()).model_dump(mode="json"))

    def delete() -> bool:
        if (copies.folder / "source").exists():
            with copies.database.write() as tx:
                deletion = DeletionRow("job-source", 1, "me", "x", str(copies.folder / "source"), 0, "user:me", 0, None)
                insert_deletion(tx, deletion)
            shutil.rmtree(copies.folder / "source")
        return False

    copies.while_copying = delete
    with expect_problem("not_found", "start_from.job", "job-source"):
        copies.copy("first")
    assert not markers.list_committed(Folder(str(copies.folder / "first/checkpoints")))


@pytest.mark.parametrize(("number", "error"), [(errno.ENOSPC, Full), (errno.EIO, Unavailable)])
def test_storage_that_cannot_take_the_copy(copies: Copies, number: int, error: type[ServiceError]) -> None:
    def fail() -> bool:
        raise OSError(number, os.strerror(number))  # as the write that follows would

    copies.while_copying = fail
    with pytest.raises(error, match=f"cannot copy the checkpoint to .*first: {os.strerror(number)}"):
        copies.copy("first")
    assert (copies.full_roots.fault is not None) == (error is Full)


@pytest.mark.slow
def test_a_resumed_job_and_a_fork_have_the_losses_of_a_whole_run(own_plane: ControlPlane, tmp_path: Path) -> None:
    plane = own_plane.start(data_roots=[str(tmp_path)])
    base_spec = job(corpus(tmp_path)).model_dump(mode="json")

    def post(**changes: Any) -> str:
        return str(plane.submit({**base_spec, **changes})["id"])

    through = post(labels={"trains": "yes"})
    broken = post(labels={"trains": "yes", "die_at": "7"}, retry={"max_failures": 0})
    failed_job = plane.await_state(broken, "failed", "succeeded")
    assert "ended (failed) without a result" in failed_job["reason"]
    assert max(plane.losses(broken)) == 6
    assert plane.http.post(f"/v1/jobs/{broken}/resume").status_code == 202
    assert plane.await_state(through, "succeeded", "failed")["state"] == "succeeded"
    fork = post(labels={"trains": "yes"}, start_from={"job": through, "step": 6}, checkpoint={"keep": 1})
    for job_id in (broken, fork):
        final_job = plane.await_state(job_id, "succeeded", "failed")
        assert (final_job["state"], final_job["step"]) == ("succeeded", 8), final_job["reason"]
    assert plane.losses(broken) == plane.losses(through)
    assert plane.losses(fork) == {step: loss for step, loss in plane.losses(through).items() if step > 6}
    messages = [event.data["message"] for event in plane.events(fork) if event.kind == "log"]
    assert "resumed at step 6 from step-00000006.a0.g0 of 1 workers on 1" in messages
