"""Checkpoints of one process: retention, damage and failed saves."""

import os
import pickle
import resource
import subprocess
import sys
import time
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum

import fsspec
import pytest
import torch

from moe.parallel import Layout
from moe.spec import SpecError
from moe.storage.folder import Folder
from moe.train.checkpoint import marker as markers
from moe.train.checkpoint import shards
from moe.train.checkpoint.checkpointer import Checkpointer, CheckpointError
from moe.train.recorder import MemoryRecorder
from tests.refusals import expect_problems


class Run:
    """Tensors that count steps, with their checkpointer."""

    def __init__(self, url, keep=2, attempt=1, group=0):
        self.tensors = {"model.w": torch.zeros(4, 3), "optimizer.m.w": torch.zeros(4, dtype=torch.float64)}
        self.recorder = MemoryRecorder()
        self.folder = Folder(str(url))
        self.checkpointer = Checkpointer(
            self.folder, Layout.single(), self.tensors, attempt=attempt, group=group, keep=keep,
            files={"spec.json": b"{}"}, recorder=self.recorder,
        )  # fmt: skip

    def set(self, value):
        for tensor in self.tensors.values():
            tensor.fill_(value)

    def save(self, *steps):
        for step in steps:
            self.set(step)
            self.checkpointer.save(step, b'{"step": %d}' % step)
        return self

    def values(self):
        return {float(value) for tensor in self.tensors.values() for value in tensor.unique()}

    def committed_names(self):
        return markers.list_committed(self.folder)

    def announcements(self):
        return [(record.step, record.url) for record in self.recorder.checkpoints]

    def warnings(self):
        return [line["message"] for line in self.recorder.logs]


def damage(run, name, path="__0_0.distcp"):
    content = bytearray(run.folder.read(f"{name}/{path}"))
    content[len(content) // 2] ^= 1
    run.folder.write(f"{name}/{path}", bytes(content))


def test_restores_the_newest_and_keeps_as_many_as_configured(tmp_path):
    run = Run(tmp_path).save(1, 2, 3, 4)
    newest = ["step-00000003.a1.g0", "step-00000004.a1.g0"]
    assert run.folder.names() == [name + suffix for name in newest for suffix in ("", markers.SUFFIX)]
    assert run.announcements() == [(step, f"{tmp_path}/step-0000000{step}.a1.g0") for step in (1, 2, 3, 4)]
    assert run.folder.read("step-00000004.a1.g0/run.json") == b'{"step": 4}'

    next_run = Run(tmp_path, group=1)
    marker = next_run.checkpointer.restore()
    assert (marker.step, next_run.values()) == (4, {4.0})
    assert marker.size_bytes == sum(file.stat().st_size for file in (tmp_path / marker.name).iterdir())


def test_a_checkpoint_has_the_values_of_the_moment_that_it_began(tmp_path):
    run = Run(tmp_path)
    run.set(1)
    run.checkpointer.start(1, b"{}")
    run.set(2)  # training goes on while a thread writes
    run.checkpointer.finish()
    run.checkpointer.restore()
    assert run.values() == {1.0}


def test_the_older_checkpoint_is_removed_only_when_the_newer_one_is_committed(tmp_path):
    run = Run(tmp_path, keep=1).save(1)
    run.checkpointer.start(2, b"{}")
    run.checkpointer._saving.writing.wait()
    assert run.committed_names() == ["step-00000001.a1.g0"]
    run.checkpointer.advance(1, 0)  # all ranks have written: rank 0 commits
    run.checkpointer._saving.committing.wait()
    assert run.committed_names() == ["step-00000002.a1.g0"]
    # It is announced only at a step that all ranks agree on.
    assert [step for step, _ in run.announcements()] == [1]
    assert run.checkpointer.last_committed == "step-00000001.a1.g0"
    run.checkpointer.advance(1, 0)
    assert [step for step, _ in run.announcements()] == [1, 2]


def replace_by_directory(path):
    """Replace a file by a directory: a read error that even a privileged user gets."""
    path.unlink()
    path.mkdir()


def test_damaged_checkpoints_are_named_skipped_and_later_removed(tmp_path):
    damage(Run(tmp_path, keep=3).save(1, 2, 3), "step-00000003.a1.g0")
    (tmp_path / "step-00000002.a1.g0.commit.json").write_text('{"version": 1, "st')

    run = Run(tmp_path, keep=3, group=1)
    assert run.checkpointer.restore().step == 1
    assert run.values() == {1.0}
    assert run.warnings() == [
        "skipped checkpoint step-00000003.a1.g0 for an earlier one: __0_0.distcp does not match its checksum",
        "skipped checkpoint step-00000002.a1.g0 for an earlier one: its marker is incomplete",
    ]
    # They do not count as kept, and are removed when a newer one is saved.
    run.save(4)
    assert run.committed_names() == ["step-00000004.a1.g1", "step-00000001.a1.g0"]


def test_without_an_intact_checkpoint_nothing_is_restored(tmp_path):
    damage(Run(tmp_path).save(1), "step-00000001.a1.g0", ".metadata")
    run = Run(tmp_path, group=1)
    assert run.checkpointer.restore() is None
    assert run.checkpointer.has_skipped_checkpoints


def test_unreadable_checkpoints_are_skipped_and_stay_until_there_are_enough_newer_ones(tmp_path):
    Run(tmp_path, keep=3).save(1, 2, 3)
    unreadable = ["step-00000003.a1.g0", "step-00000002.a1.g0"]  # they may be intact
    replace_by_directory(tmp_path / unreadable[0] / "__0_0.distcp")
    replace_by_directory(tmp_path / f"{unreadable[1]}.commit.json")

    run = Run(tmp_path, keep=3, group=1)
    assert run.checkpointer.restore().step == 1
    for warning, name, fault in zip(run.warnings(), unreadable, ("__0_0.distcp", "its marker"), strict=True):
        assert f"{name} for an earlier one: {fault} cannot be read: " in warning
    run.save(4, 5)
    newer = ["step-00000005.a1.g1", "step-00000004.a1.g1"]
    assert run.committed_names() == [*newer, *unreadable, "step-00000001.a1.g0"]
    run.save(6)
    assert run.committed_names() == ["step-00000006.a1.g1", *newer]


def test_a_run_does_not_start_over_where_no_checkpoint_can_be_read(tmp_path):
    Run(tmp_path).save(1, 2)
    for step in (1, 2):
        replace_by_directory(tmp_path / f"step-0000000{step}.a1.g0" / "__0_0.distcp")
    run = Run(tmp_path, group=1)
    with pytest.raises(
        CheckpointError, match=r"step-00000002\.a1\.g0: __0_0\.distcp cannot be read.*repair the storage"
    ):
        run.checkpointer.restore()
    assert run.committed_names() == ["step-00000002.a1.g0", "step-00000001.a1.g0"]


def test_no_file_of_a_checkpoint_is_written_through_a_link(tmp_path):
    key, storage = tmp_path / "key", tmp_path / "storage"
    key.write_text("secret")
    for path in ("__0_0.distcp", ".metadata.tmp", ".metadata", "run.json", "spec.json"):
        link = storage / "step-00000001.a1.g0" / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(key)
    (storage / f"step-00000001.a1.g0.commit.json.{os.getpid()}.tmp").symlink_to(key)
    run = Run(storage).save(1)
    assert key.read_text() == "secret"
    marker = markers.read(run.folder, "step-00000001.a1.g0")
    assert set(marker.files) == {"__0_0.distcp", ".metadata", "run.json", "spec.json"}
    assert markers.fault(run.folder, marker) is None


def test_unfinished_files_of_earlier_worker_groups_are_removed_and_those_of_later_ones_stay(tmp_path):
    newer_names = Run(tmp_path, attempt=9).save(2).committed_names()
    partial_names = ["step-00000007.a1.g0", "step-00000007.a2.g1", "step-00000007.a3.g0"]
    for name in partial_names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__0_0.distcp").write_bytes(b"half")
    run = Run(tmp_path, attempt=2, group=2, keep=1).save(5, 6)
    assert run.committed_names() == ["step-00000006.a2.g2", *newer_names]
    assert [name for name in partial_names if name in run.folder.names()] == ["step-00000007.a3.g0"]


def test_a_failed_save_is_logged_and_training_goes_on_but_the_last_one_must_succeed(tmp_path):
    run = Run(tmp_path).save(1)
    (tmp_path / "step-00000002.a1.g0").write_text("a file where the folder should be")
    run.checkpointer.start(2, b"{}")
    run.checkpointer.finish()
    [failure] = run.recorder.failed_checkpoints
    assert failure["step"] == 2
    assert failure["reason"].startswith("rank 0: NotADirectoryError")
    run.save(3)

    (tmp_path / "step-00000004.a1.g0").write_text("again")
    with pytest.raises(CheckpointError, match=r"step-00000004\.a1\.g0 .* could not be written before the run ended"):
        run.save(4)
    assert run.committed_names()[0] == "step-00000003.a1.g0"


@contextmanager
def full_storage():
    """A limit on the file size of this process, which acts like a quota or a full disk for any user on any machine."""
    before, without_bytecode = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # of a module that is first imported within: it would be cut off for good
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = without_bytecode


def test_full_storage_is_reported_for_each_checkpoint_until_there_is_room(tmp_path):
    run = Run(tmp_path).save(1)
    with full_storage():
        for step in (2, 3):
            run.checkpointer.start(step, b"{}")
            run.checkpointer.finish()
    run.save(4)
    assert [failure["step"] for failure in run.recorder.failed_checkpoints] == [2, 3]
    assert all("File too large" in failure["reason"] for failure in run.recorder.failed_checkpoints)
    assert [step for step, _ in run.announcements()] == [1, 4]


def test_every_tensor_that_is_missing_or_has_another_shape_is_named(tmp_path):
    Run(tmp_path).save(1)
    with expect_problems([("shape_mismatch", "model.w", [4, 3]), ("missing", "model.v", None)]):
        shards.load(
            Folder(f"{tmp_path}/step-00000001.a1.g0"), {"model.w": torch.zeros(5, 3), "model.v": torch.zeros(4, 3)}
        )


class _Harm:
    def __reduce__(self):
        return print, ("harm done",)


@pytest.mark.parametrize("path", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize(
    "content",
    [pickle.dumps(_Harm()), pickle.dumps({}), b"", b"\x80\x04]\x94h\x07."],
    ids=["executes code", "another object", "empty", "torn"],
)
def test_a_sealed_checkpoint_that_no_run_has_written_is_refused(tmp_path, capsys, path, content):
    """A user with access to a job's storage can seal anything; none of it is executed."""
    run, name = Run(tmp_path).save(1), "step-00000001.a1.g0"
    run.folder.write(f"{name}/{path}", content)
    before = markers.read(run.folder, name)
    marker = before.model_copy(update={"files": {**before.files, path: markers.seal(content)}})
    run.folder.write(name + markers.SUFFIX, marker.to_bytes())
    with pytest.raises(SpecError) as error:
        Run(tmp_path, group=1).checkpointer.restore()
    (problem,) = error.value.problems
    assert problem.path == f"{tmp_path}/{name}"
    assert problem.rule.startswith("is not a checkpoint written by a run: ")
    assert "\n" not in problem.rule
    if b"harm" in content and path == ".metadata":
        assert "cannot contain builtins.print" in problem.rule
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("scheme", "place"),
    [
        ("file", "../other/__0_0.distcp"), ("file", "{root}/other/__0_0.distcp"), ("file", "link"),
        ("memory", "../other/__0_0.distcp"), ("memory", "{root}/other/__0_0.distcp"),
        ("memory", "a/../../other/__0_0.distcp"),
    ],
)  # fmt: skip
def test_tensors_are_read_from_the_checkpoint_s_own_folder_alone(tmp_path, scheme, place):
    """Whatever its metadata and links name, a checkpoint reads no tensors of another job."""
    run, name = Run(tmp_path).save(1), "step-00000001.a1.g0"
    content, metadata = (run.folder.read(f"{name}/{file}") for file in ("__0_0.distcp", ".metadata"))
    metadata = pickle.loads(metadata)
    root = str(tmp_path) if scheme == "file" else f"/{tmp_path.name}"
    for index, info in metadata.storage_data.items():
        metadata.storage_data[index] = replace(info, relative_path=place.format(root=root))
    files = fsspec.filesystem(scheme)
    files.mkdirs(f"{root}/other")
    files.pipe_file(f"{root}/other/__0_0.distcp", content)
    files.pipe_file(f"{root}/{name}/.metadata", pickle.dumps(metadata))
    if scheme == "file":
        (tmp_path / name / "link").symlink_to(tmp_path / "other" / "__0_0.distcp")
    with pytest.raises(SpecError, match="outside"):
        shards.load(
            Folder(f"{scheme}://{root.lstrip('/') if scheme == 'memory' else root}/{name}"),
            {"model.w": torch.zeros(4, 3)},
        )
    if scheme == "memory":
        files.rm(root, recursive=True)


class _MemberByAttribute(pickle.Pickler):
    """Pickles enum members as Python 3.11.0 to 3.11.3 do: by `getattr`."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def test_metadata_of_every_python_3_11_is_read_and_its_getattr_fetches_members_only(tmp_path):
    Run(tmp_path).save(1)
    path = tmp_path / "step-00000001.a1.g0" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    with path.open("wb") as stream:
        _MemberByAttribute(stream).dump(metadata)
    shards.load(Folder(str(path.parent)), {"model.w": torch.zeros(4, 3)})

    class Fetching:
        def __reduce__(self):
            return getattr, (OrderedDict, "fromkeys")

    path.write_bytes(pickle.dumps(Fetching()))
    with pytest.raises(SpecError, match="cannot contain fromkeys of"):
        shards.load(Folder(str(path.parent)), {"model.w": torch.zeros(4, 3)})


_DEADLINE_S = 300
_SAVES_FOREVER = """
import sys, torch
from tests.unit.test_train_checkpoint import Run
run = Run(sys.argv[1], keep=2, group=int(sys.argv[2]))
marker = run.checkpointer.restore()
run.tensors["large"] = torch.zeros(12_000_000)
step = marker.step if marker else 0
print(step, flush=True)
while True:
    step += 1
    run.save(step)
"""


@pytest.mark.slow
def test_a_run_that_is_killed_while_it_saves_resumes_from_the_checkpoint_before(tmp_path):
    """A process that saves 48 MB repeatedly is killed, twice, as soon as a new folder appears."""
    folder = Folder(str(tmp_path))
    newest = 0
    for group in range(2):
        command = [sys.executable, "-c", _SAVES_FOREVER, str(tmp_path), str(group)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert int(process.stdout.readline()) >= newest
            half_written = f"step-{newest + 2:08d}.a1.g{group}"
            deadline = time.monotonic() + _DEADLINE_S
            while half_written not in folder.names():
                assert process.poll() is None
                assert time.monotonic() < deadline, f"{half_written} was not begun, only {folder.names()}"
                time.sleep(0.001)  # lets the other process run, and is far shorter than a save
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        newest = markers.order(markers.list_committed(folder)[0])[0]
        run = Run(tmp_path, group=group + 1)
        assert run.checkpointer.restore().step == newest
        assert (run.values(), run.warnings()) == ({float(newest)}, [])
    Run(tmp_path, group=9).save(newest + 1)
    assert len(folder.names()) == 4  # two committed ones, and no files of the killed process
