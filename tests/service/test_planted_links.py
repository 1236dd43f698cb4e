"""What a job's folder is given to hold goes there, whatever links somebody has planted in it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pydantic import SecretStr

from moe.parallel import Layout
from moe.plan import Cluster, plan_job
from moe.spec import JobSpec, ProblemCode
from moe.storage.folder import Folder
from moe.train.checkpoint import marker as markers
from moe.train.checkpoint.checkpointer import Checkpointer, CheckpointError
from moe.train.checkpoint.copying import copy_checkpoint
from moe.train.recorder import MemoryRecorder
from service.control.jobs.roots import StorageRoots
from service.control.scheduling.requests import _write_spec
from service.run.spool import Seals, Spool
from service.wire.attempt_folder import AttemptFolder
from service.wire.launch import Launch, Result
from service.wire.segments import SegmentFolder
from tests.refusals import refused
from tests.service.checkpoints import commit
from tests.service.control_plane import spec

JOB = JobSpec.parse(spec())
PLAN = plan_job(JOB, Cluster(num_nodes=1, devices_per_node=2, device="cpu", memory_bytes=8 << 30), 1)


def launch(storage: Path) -> Launch:
    return Launch(
        job_id=storage.name, attempt=1, spec=JOB, plan=PLAN, gpus_per_worker=0, storage=str(storage),
        cache="/cache", events_url="http://127.0.0.1:9", token=SecretStr("0123456789abcdef"), max_failures=3,
    )  # fmt: skip


def seal(storage: Path) -> None:
    spool = Spool(storage.parent / "node", "log")
    spool.append(lambda _line: b"a line\n")
    spool.roll()
    for segment in spool.complete():
        Seals(str(storage), "logs", "a1.driver").seal(segment)


def copy(storage: Path) -> None:
    commit(storage.parent / "other", 5)
    source = Folder(str(storage.parent / "other/checkpoints"))
    marker = markers.read(source, "step-00000005.a1.g0")
    copy_checkpoint(source, marker, Folder.of_job(str(storage)).below("checkpoints"))


PID = os.getpid()
WRITERS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "a probe": (
        lambda storage: SegmentFolder(Folder.of_job(str(storage)), "metrics").probe(),
        ["metrics/.probe", "metrics"],
    ),
    "a launch": (
        lambda storage: AttemptFolder(str(storage), 1).write_launch(launch(storage)),
        [f"attempts/1/launch.json.{PID}.tmp", "attempts/1", "attempts"],
    ),
    "a plan": (
        lambda storage: AttemptFolder(str(storage), 1).keep_chosen_plan(PLAN),
        [f"attempts/1/plan.json.{PID}.tmp", "attempts/1/plan.json", "attempts/1"],
    ),
    "a result": (
        lambda storage: AttemptFolder(str(storage), 1).write_result(Result(outcome="succeeded", step=5)),
        [f"attempts/1/result.json.{PID}.tmp", "attempts/1/result.json", "attempts"],
    ),
    "a segment": (
        seal,
        [f"logs/a1.driver/.segment-00000000.log.{PID}", "logs/a1.driver/segment-00000000.log", "logs/a1.driver"],
    ),
    "a spec": (
        lambda storage: _write_spec(StorageRoots([str(storage.parent)]), str(storage), "{}", None),
        ["spec.json"],
    ),
    "a checkpoint": (
        copy,
        [
            "checkpoints/step-00000005.a0.g0/__0_0.distcp",
            f"checkpoints/step-00000005.a0.g0.commit.json.{PID}.tmp",
            "checkpoints",
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("write", "planted"),
    [(write, planted) for write, places in WRITERS.values() for planted in places],
    ids=[
        f"{what} at {planted}".replace(str(PID), "PID") for what, (_, places) in WRITERS.items() for planted in places
    ],
)
def test_nothing_is_written_through_a_link(tmp_path: Path, write: Callable[[Path], object], planted: str) -> None:
    storage, key, elsewhere = tmp_path / "job", tmp_path / "attempt.key", tmp_path / "elsewhere"
    key.write_text("secret")
    elsewhere.mkdir()
    is_folder = "." not in Path(planted).name.removeprefix("a1.")
    (storage / planted).parent.mkdir(parents=True)
    (storage / planted).symlink_to(elsewhere if is_folder else key)
    try:
        write(storage)
    except OSError:
        assert is_folder
    assert key.read_text() == "secret"
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("what", WRITERS)
def test_nothing_is_written_where_a_job_s_own_folder_was_swapped_for_a_link(tmp_path: Path, what: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "job").symlink_to(elsewhere)
    with pytest.raises(Exception, match="Not a directory"):
        WRITERS[what][0](tmp_path / "job")
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("keep", [1, 5])
def test_a_save_removes_nothing_of_a_job_that_a_link_leads_to(tmp_path: Path, keep: int) -> None:
    """Neither the marker that has the name of what is saved, nor what is beyond the number that is kept."""
    storage, neighbour = tmp_path / "job", tmp_path / "neighbour"
    for step in (3, 5):
        commit(neighbour, step)
    before = {path: path.read_bytes() for path in neighbour.rglob("*") if path.is_file()}
    storage.mkdir()
    (storage / "checkpoints").symlink_to(neighbour / "checkpoints")
    recorder = MemoryRecorder()
    checkpointer = Checkpointer(
        Folder.of_job(str(storage)).below("checkpoints"), Layout.single(), {"weight": torch.ones(3)},
        attempt=1, group=0, keep=keep, files={}, recorder=recorder,
    )  # fmt: skip
    with pytest.raises(CheckpointError, match="step-00000005"):
        checkpointer.save(5, b"{}")
    assert {path: path.read_bytes() for path in neighbour.rglob("*") if path.is_file()} == before


def test_storage_behind_a_chain_of_links_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    for number in range(2000):
        (tmp_path / f"{number + 1}").symlink_to(f"{number}")
    roots = StorageRoots([str(tmp_path)])
    assert roots.job_folder(str(tmp_path / "40"), "job-x") == f"{tmp_path}/0/job-x"
    with refused("unreadable", "storage"):
        roots.job_folder(str(tmp_path / "2000"), "job-x")


@pytest.mark.parametrize(
    ("code", "asked"),
    [
        ("invalid_value", "relative/path"),
        ("invalid_value", "zip::file:///x"),
        ("invalid_value", "/a?b"),
        ("invalid_value", "/a\u202eb"),
        ("not_allowed", "/somewhere/else"),
        ("not_allowed", "/a/../b"),
    ],
)
def test_a_malformed_storage_has_another_code_than_one_outside(tmp_path: Path, code: ProblemCode, asked: str) -> None:
    with refused(code, "storage", asked):
        StorageRoots([str(tmp_path)]).job_folder(asked, "job-x")


def test_of_what_lies_outside_the_roots_nothing_is_told(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "root" / "way-out").symlink_to("../loop")
    roots, told = StorageRoots([str(tmp_path / "root")]), set()
    for asked in ("loop", "loop/below", "missing", "missing/below", "x/" * 100, "root/way-out"):
        with refused("not_allowed", "storage") as caught:
            roots.job_folder(str(tmp_path / asked), "job-x")
        told |= {problem.rule for problem in caught.value.problems}
    assert told == {"must be under a storage root of this service"}


def test_a_launch_that_was_altered_is_not_taken(tmp_path: Path) -> None:
    path = AttemptFolder(str(tmp_path / "job"), 1).write_launch(launch(tmp_path / "job"))
    assert AttemptFolder.open_launch(path)[1] == launch(tmp_path / "job")
    assert Path(path).stat().st_mode & 0o777 == 0o600
    again = AttemptFolder(str(tmp_path / "job"), 1).write_launch(
        launch(tmp_path / "job").model_copy(update={"max_failures": 2})
    )
    assert again != path  # a driver that has begun finds what it was given
    Path(path).write_text(Path(path).read_text().replace('"data_roots": []', '"data_roots": ["/"]'))
    with pytest.raises(ValueError, match="was modified after it was written"):
        AttemptFolder.open_launch(path)
    with pytest.raises(ValueError, match="must be named as write_launch names it"):
        AttemptFolder.open_launch(f"{tmp_path}/job/attempts/1/launch.json")
