"""Jobs that begin with the checkpoint of another: found, checked, copied; whole or not there at all."""

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
from tests.refusals import refused
from tests.service.checkpoints import commit
from tests.service.control_plane import ControlPlane, spec

TRAIN = {"num_steps": 9, "batch_tokens": 1024}


@pytest.fixture(scope="module")
def source(plane: ControlPlane) -> dict[str, Any]:
    """A job that ended at step 5, with checkpoints of steps 2, 4 and 5."""
    job = plane.await_state(plane.post()["id"], "succeeded")
    for step in (2, 4, 5):
        commit(job["storage"], step, spec=job["spec"])
    return job


def submit(plane: ControlPlane, source: str, step: int | None = None, **changes: Any) -> httpx.Response:
    given = spec(**{"train": TRAIN, "start_from": {"job": source, "step": step}, **changes})
    return plane.http.post("/v1/jobs", json=given)


def problems(answer: httpx.Response) -> list[tuple[str, str]]:
    assert answer.status_code == 422, answer.text
    return [(each["path"], each["rule"]) for each in answer.json()["errors"]]


def checkpoints(plane: ControlPlane, job: dict[str, Any]) -> list[dict[str, Any]]:
    return list(plane.http.get(f"/v1/jobs/{job['id']}/checkpoints").json()["items"])


@pytest.mark.parametrize(("step", "taken"), [(None, 5), (2, 2), (4, 4)])
def test_a_job_starts_with_a_copy_of_its_own(
    plane: ControlPlane, source: dict[str, Any], step: int | None, taken: int
) -> None:
    answer = submit(plane, source["id"], step, labels={"hold": "never"})
    assert answer.status_code == 201, answer.text
    job = answer.json()
    assert (job["step"], job["reason"]) == (taken, f"starts from step {taken} of {source['id']}; waiting for its turn")
    (copy,) = checkpoints(plane, job)
    assert (copy["name"], copy["fault"]) == (f"step-{taken:08d}.a0.g0", None)
    own = Folder(f"{job['storage']}/checkpoints")
    marker = markers.read(own, copy["name"])
    known = job["last_checkpoint"]
    assert (known["step"], known["size_bytes"], known["time"] >= job["created_at"]) == (taken, marker.size_bytes, True)
    assert markers.fault(own, marker) is None
    original = Folder(f"{source['storage']}/checkpoints")
    assert marker.files == markers.read(original, f"step-{taken:08d}.a1.g0").files
    assert plane.await_state(job["id"], "succeeded", "failed")["state"] == "succeeded"


def test_what_lies_in_the_job_s_own_storage_outlives_the_other_job_s(plane: ControlPlane) -> None:
    other = plane.await_state(plane.post()["id"], "succeeded")
    commit(other["storage"], 3, spec=other["spec"], size_bytes=3_000_000)
    job = submit(plane, other["id"]).json()
    shutil.rmtree(other["storage"])
    own = Folder(f"{job['storage']}/checkpoints")
    assert markers.fault(own, markers.read(own, "step-00000003.a0.g0")) is None


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"train": {"num_steps": 5, "batch_tokens": 1024}}, "train.num_steps",
     "must exceed the checkpoint's steps (=5), which count too"),
    ({"train": {**TRAIN, "optimizer": {"name": "adafactor"}}}, "train.optimizer.name",
     'must match the checkpoint that this job starts from (="adamw")'),
    ({"train": {**TRAIN, "dtype": "bfloat16"}}, "train.dtype",
     'must match the checkpoint that this job starts from (="float32")'),
    ({"model": {"preset": "gshard-tiny", "ffn_dim": 128}}, "model.ffn_dim", "must match"),
    ({"model": {"preset": "gshard-tiny", "source_vocab_size": 3000, "target_vocab_size": 3000}},
     "model.source_vocab_size", "must match"),
    ({"data": {"corpus": "catalogs", "languages": ["de", "fr"]}}, "data.languages", "must match"),
    ({"data": {"corpus": "catalogs", "max_tokens": 64}}, "data.max_tokens", "must match"),
    ({"start_from": {"job": "job-aaaaaaaaaaaa"}}, "start_from.job", "is not a job of yours"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "path", "rule"), REFUSED, ids=[row[1] for row in REFUSED])
def test_what_does_not_fit_the_checkpoint_is_refused_in_words(
    plane: ControlPlane, source: dict[str, Any], changes: dict[str, Any], path: str, rule: str
) -> None:
    folders = set((plane.folder / "state/storage").iterdir())
    found, *_ = problems(submit(plane, source["id"], **changes))
    assert (found[0], found[1][: len(rule)]) == (path, rule)
    assert set((plane.folder / "state/storage").iterdir()) == folders


def test_what_decides_only_the_course_may_differ(plane: ControlPlane, source: dict[str, Any]) -> None:
    optimizer = {"name": "adamw", "peak_lr": 1e-4, "weight_decay": 0.1}
    train = {"num_steps": 40, "batch_tokens": 2048, "seed": 7, "optimizer": optimizer, "clip_norm": None,
             "schedule": {"decay": "linear"}, "label_smoothing": 0.0}  # fmt: skip
    answer = submit(
        plane, source["id"], train=train, resources={"num_workers": 2}, parallel={"expert": 2},
        data={"corpus": "catalogs", "sampling_exponent": 1.0}, checkpoint={"every_steps": 3}, name="other",
    )  # fmt: skip
    assert answer.status_code == 201, answer.text


def test_a_step_without_a_checkpoint_is_named_with_those_there_are(plane: ControlPlane, source: dict[str, Any]) -> None:
    error = submit(plane, source["id"], 3).json()["errors"][0]
    assert (error["path"], error["value"]) == ("start_from.step", 3)
    assert error["rule"] == f"is not a committed checkpoint of {source['id']}"
    assert error["remedy"] == "use one of 2, 4, 5, or omit it for the newest"


def test_a_deleted_job_is_no_beginning(plane: ControlPlane) -> None:
    other = plane.await_state(plane.post()["id"], "succeeded")
    commit(other["storage"], 4, spec=other["spec"])
    assert plane.http.delete(f"/v1/jobs/{other['id']}").status_code == 202
    deleted = ("start_from.job", "was deleted with its checkpoints")
    assert problems(submit(plane, other["id"])) == [deleted]


def test_a_job_without_a_checkpoint_is_no_beginning(plane: ControlPlane) -> None:
    other = plane.await_state(plane.post()["id"], "succeeded")
    Folder(f"{other['storage']}/checkpoints").write("step-00000004.a1.g0/__0_0.distcp", b"unsealed")
    assert problems(submit(plane, other["id"])) == [("start_from.job", "has no committed checkpoint")]


@pytest.mark.parametrize("harm", ["flipped", "short", "missing", "elsewhere", "linked", "linked spec"])
def test_a_damaged_checkpoint_is_never_taken(plane: ControlPlane, harm: str) -> None:
    other = plane.await_state(plane.post()["id"], "succeeded")
    for step in (2, 4):
        commit(other["storage"], step, spec=other["spec"])
    damaged = Path(other["storage"]) / "checkpoints/step-00000004.a1.g0"
    content = (damaged / "__0_0.distcp").read_bytes()
    if harm == "missing":
        (damaged / "__0_0.distcp").unlink()
    elif harm.startswith("linked"):  # to what the marker was made for, but out of the job's folder
        path = damaged / ("spec.json" if harm == "linked spec" else "__0_0.distcp")
        outside = plane.folder / f"outside-{path.name}"
        path.rename(outside)
        path.symlink_to(outside)
    elif harm == "elsewhere":  # a marker that somebody made, sealed as it should be
        folder = Folder(str(damaged.parent))
        marker = markers.read(folder, damaged.name)
        files = {"../../../stolen": markers.seal(content), **marker.files}
        forged = marker.model_copy(update={"files": files})
        folder.write(damaged.name + markers.SUFFIX, forged.to_bytes())
    else:
        changed = content[:-1] if harm == "short" else bytes([content[0] ^ 1]) + content[1:]
        (damaged / "__0_0.distcp").write_bytes(changed)
    answer = submit(plane, other["id"], 4)
    ((path, rule),) = problems(answer)
    assert (path, rule.startswith(f"must be a complete checkpoint of {other['id']} (step-00000004")) == (
        "start_from.step",
        True,
    )
    # As a run passes it over for the one before it, where it was not asked for by its step.
    job = submit(plane, other["id"]).json()
    assert [each["name"] for each in checkpoints(plane, job)] == ["step-00000002.a0.g0"]
    assert [path.name for path in (Path(job["storage"]) / "checkpoints").iterdir() if path.is_dir()] == [
        "step-00000002.a0.g0"
    ]


def add_zeros(storage: str, name: str, size_bytes: int) -> None:
    """Adds a file to a committed checkpoint that takes a while to copy, and itself no room on the disk."""
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
    """Files that copies are being written to, which have no name yet."""
    found = []
    for path in storage.glob("*/checkpoints/*.a0.g0/.*.draft"):
        with suppress(FileNotFoundError):  # a small one, whole by now
            if path.stat().st_size > 4 << 20:
                found.append(path)
    return found


def test_killed_in_the_middle_of_the_copy(own_plane: ControlPlane) -> None:
    """No job, no checkpoint that looks whole, and in time no folder; asked again, there are both."""
    own_plane.settings["abandoned_after_s"] = 3.0
    own_plane.start()
    other = own_plane.await_state(own_plane.post()["id"], "succeeded")
    size_bytes = 400 << 20
    commit(other["storage"], 2, spec=other["spec"])
    add_zeros(other["storage"], "step-00000002.a1.g0", size_bytes)
    given = spec(train=TRAIN, start_from={"job": other["id"]})
    headers = {"idempotency-key": "once"}

    def post() -> None:
        with suppress(httpx.TransportError):
            own_plane.http.post("/v1/jobs", json=given, headers=headers)

    posting = threading.Thread(target=post)
    posting.start()
    storage = own_plane.folder / "state/storage"
    await_that(lambda: drafts_of_some_megabytes(storage))
    own_plane.kill()
    posting.join()
    (torn,) = drafts_of_some_megabytes(storage)
    assert torn.stat().st_size < size_bytes
    assert not list(storage.glob("*/checkpoints/*.a0.g0.commit.json"))
    own_plane.start()
    assert len(own_plane.http.get("/v1/jobs").json()["items"]) == 1
    await_that(lambda: not torn.parents[2].exists())
    assert markers.list_committed(Folder(f"{other['storage']}/checkpoints"))
    commit(other["storage"], 3, spec=other["spec"])  # of less, to be copied in a moment
    answer = own_plane.http.post("/v1/jobs", json=given, headers=headers)
    assert answer.status_code == 201
    folder = Folder(f"{answer.json()['storage']}/checkpoints")
    assert markers.fault(folder, markers.read(folder, "step-00000003.a0.g0")) is None


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
    begun: list[int] = []

    def another() -> bool:
        if len(begun) < MAX_COPIES:
            begun.append(len(begun))
            if len(begun) < MAX_COPIES:
                copies.copy(f"copy-{len(begun)}")
            else:
                with pytest.raises(Unavailable, match="checkpoints are already being copied for other jobs"):
                    copies.copy("one-too-many")
        return False

    copies.while_copying = another
    copies.copy("copy-0")
    assert len(begun) == MAX_COPIES
    copies.copy("later")


def test_a_service_that_stops_gives_the_copy_up(copies: Copies) -> None:
    copies.while_copying = lambda: True
    with pytest.raises(Unavailable, match="this service is stopping"):
        copies.copy("first")
    assert not markers.list_committed(Folder(str(copies.folder / "first/checkpoints")))


def test_a_link_that_is_planted_while_it_is_copied_changes_no_answer(copies: Copies) -> None:
    elsewhere, to = copies.folder / "elsewhere", copies.folder / "first"
    (elsewhere / "checkpoints").mkdir(parents=True)
    (elsewhere / "checkpoints/file").touch()
    (copies.folder / "source/checkpoints/step-00000002.a1.g0/__0_0.distcp").write_bytes(b"x" * 100)

    def plant() -> bool:
        if not to.is_symlink():
            shutil.rmtree(to)
            to.symlink_to(elsewhere)
        return False

    copies.while_copying = plant
    with refused("not_found", "start_from.step", None):
        copies.copy("first")
    assert [path.name for path in elsewhere.rglob("*")] == ["checkpoints", "file"]


def test_a_job_that_is_deleted_while_it_is_copied_is_said_to_be(copies: Copies) -> None:
    commit(copies.folder / "source", 1, spec=JobSpec.parse(spec()).model_dump(mode="json"))

    def delete() -> bool:
        if (copies.folder / "source").exists():
            with copies.database.write() as tx:
                asked = DeletionRow("job-source", 1, "me", "x", str(copies.folder / "source"), 0, "user:me", 0, None)
                insert_deletion(tx, asked)
            shutil.rmtree(copies.folder / "source")
        return False

    copies.while_copying = delete
    with refused("not_found", "start_from.job", "job-source"):
        copies.copy("first")
    assert not markers.list_committed(Folder(str(copies.folder / "first/checkpoints")))


@pytest.mark.parametrize(("number", "error"), [(errno.ENOSPC, Full), (errno.EIO, Unavailable)])
def test_storage_that_cannot_take_it_is_told_in_words(copies: Copies, number: int, error: type[ServiceError]) -> None:
    def fail() -> bool:
        raise OSError(number, os.strerror(number))  # as the write that follows would

    copies.while_copying = fail
    with pytest.raises(error, match=f"cannot copy the checkpoint to .*first: {os.strerror(number)}"):
        copies.copy("first")
    told = copies.full_roots.fault
    assert (told is not None and "cannot copy the checkpoint to" in told.detail) == (error is Full)


def test_another_owner_s_job_is_no_beginning(own_plane: ControlPlane) -> None:
    own_plane.start()
    other = own_plane.await_state(own_plane.post()["id"], "succeeded")
    commit(other["storage"], 2, spec=other["spec"])
    own_plane.kill()
    own_plane.settings["owner"] = "somebody-else"
    own_plane.start()
    assert problems(submit(own_plane, other["id"])) == [("start_from.job", "is not a job of yours")]
