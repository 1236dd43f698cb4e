"""Asynchronous checkpointing: shards written in the background, committed by a marker, old ones removed."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

from torch import Tensor

from moe.activity import doing
from moe.parallel import Layout, json_collectives
from moe.records import CheckpointRecord
from moe.storage.folder import Folder
from moe.storage.sealing import UnreadableStorage
from moe.train.background import BackgroundCall
from moe.train.checkpoint import marker as markers
from moe.train.checkpoint import shards
from moe.train.checkpoint.marker import FileSeal, Marker
from moe.train.checkpoint.run_files import best_committed
from moe.train.checkpoint.shards import ShardWriter, ShardWriteResult
from moe.train.checkpoint.tensor_piece import TensorPiece
from moe.train.recorder import Level, Recorder


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or does not fit the run; names it, the reason and a remedy."""


@dataclass
class _Saving:
    """Checkpoint in progress: every rank writes its shards, then rank 0 commits."""

    step: int
    marker_name: str
    stall_s: float
    started_at: float
    writing: BackgroundCall[ShardWriteResult]
    committing: BackgroundCall[Marker | None] | None = None

    @property
    def current(self) -> BackgroundCall[ShardWriteResult] | BackgroundCall[Marker | None]:
        return self.writing if self.committing is None else self.committing


class Checkpointer:
    """Saves a run's tensors without stopping it.

    `start` copies the tensors to staging buffers (the only blocking part); a thread writes them. Ranks synchronize
    through the training step's all-reduce: each contributes `vote()`, and `advance` gets the sums, so that all
    advance at the same step. Once all ranks have written, rank 0 writes the marker in a thread, and all learn of the
    commit at the same step.
    """

    def __init__(
        self,
        folder: Folder,
        layout: Layout,
        tensors: Mapping[str, Tensor | TensorPiece],
        *,
        attempt: int,
        group: int,
        keep: int,
        keep_best: bool = False,
        files: Mapping[str, bytes],
        recorder: Recorder,
    ) -> None:
        self._folder, self._layout, self._tensors = folder, layout, tensors
        self.url = folder.url
        self._attempt, self._group, self._keep, self._files = attempt, group, keep, files
        self._keep_best, self._recorder = keep_best, recorder
        self._writer: ShardWriter | None = None
        self._saving: _Saving | None = None
        self._skipped: set[str] = set()
        self._unreadable: set[str] = set()
        self.last_committed: str | None = None
        """Name of the newest checkpoint known to be intact."""

    def restore(self, check: Callable[[Folder], None] | None = None) -> Marker | None:
        """Load the newest intact checkpoint into the tensors; None if there is none. Collective.

        Torn, damaged or unreadable checkpoints are logged and skipped. Each rank verifies a share of the files.
        `check` gets the checkpoint's folder before anything is loaded, and may raise. Raises CheckpointError if none
        is intact and one is unreadable, since that one may hold the run.
        """
        unreadable: list[str] = []
        for name in json_collectives.broadcast_from_rank0(lambda: markers.list_committed(self._folder)):
            plain_marker, *faults = json_collectives.broadcast_from_rank0(partial(_read_marker, self._folder, name))
            marker = Marker.model_validate(plain_marker) if plain_marker else None
            if marker is not None:
                paths = sorted(marker.files)[self._layout.rank :: self._layout.world_size]
                faults = json_collectives.all_gather_json(_plain(markers.fault(self._folder, marker, paths)))
            fault = next((_fault(*plain_fault) for plain_fault in faults if plain_fault is not None), None)
            if marker is not None and fault is None:
                if check is not None:
                    check(self._folder.subfolder(name))
                shards.load(self._folder.subfolder(name), self._tensors)
                self.last_committed = name
                return marker
            if isinstance(fault, UnreadableStorage):
                self._unreadable.add(name)
                unreadable.append(f"{name}: {fault}")
            else:
                self._skipped.add(name)
            self._log("warning", f"skipped checkpoint {name} for an earlier one: {fault}")
        if unreadable:
            raise CheckpointError(
                f"no checkpoint in {self._folder.url} can be resumed from, and some may be intact but "
                f"unreadable ({'; '.join(unreadable)}), so training does not start over; repair the "
                "storage or its permissions, or use another storage to start over"
            )
        return None

    def replace_tensors(self, tensors: Mapping[str, Tensor | TensorPiece]) -> None:
        """Save these tensors from now on: the same values, sharded otherwise. Before the first save."""
        assert self._writer is None, "saves share their buffers"
        self._tensors = tensors

    @property
    def has_skipped_checkpoints(self) -> bool:
        """Whether `restore` found damaged checkpoints."""
        return bool(self._skipped)

    def is_stored(self, step: int) -> bool:
        """Whether the checkpoint of a step of this run is committed, or being saved. Collective."""
        if self._saving is not None and self._saving.step == step:
            return True
        names = json_collectives.broadcast_from_rank0(lambda: markers.list_committed(self._folder))
        return any((markers.order(name) or ())[:1] == (step,) for name in names if not markers.is_copy(name))

    def start(self, step: int, run_state: bytes) -> None:
        """Start saving the current tensors as the checkpoint of `step`. Collective.

        Waits for a save in progress: slow storage slows down training.
        """
        if self._saving is not None:
            self._log(
                "warning",
                f"step {step} waits for the checkpoint of step {self._saving.step}, which is still "
                "being written; save less often or use faster storage",
            )
            self._finish()
        began = time.perf_counter()
        name = markers.name_of(step, self._attempt, self._group)
        with doing("checkpoint", f"copying checkpoint {name}"):
            if self._writer is None:
                self._writer = ShardWriter(self._tensors)
            self._writer.stage()
        stall_s = time.perf_counter() - began
        writing = BackgroundCall(lambda: self._write(name, run_state), f"write-{name}")
        self._saving = _Saving(step, name, stall_s, time.perf_counter(), writing)

    def vote(self) -> tuple[int, int]:
        """(1 if this rank finished the current phase, 1 if that failed), to be summed over ranks."""
        if self._saving is None:
            return 0, 0
        current = self._saving.current
        return int(current.is_done), int(current.is_done and current.error is not None)

    def advance(self, num_done: int, num_failed: int) -> None:
        """Move the current save to its next phase, given the same summed votes on all ranks. Collective.

        A failed save is recorded and dropped.
        """
        saving = self._saving
        if saving is None or num_done < self._layout.world_size:
            return
        if num_failed:
            self._saving = None
            errors = enumerate(json_collectives.all_gather_json(_in_words(saving.current.error)))
            reason = "; ".join(f"rank {rank}: {error}" for rank, error in errors if error is not None)
            if self._layout.rank == 0:
                self._recorder.checkpoint_failed(saving.step, reason)
        elif saving.committing is None:
            plain_results = json_collectives.gather_json(saving.writing.result().to_plain())
            results = None if plain_results is None else list(map(ShardWriteResult.from_plain, plain_results))
            saving.committing = BackgroundCall(lambda: self._commit(saving, results), f"commit-{saving.marker_name}")
        else:
            self._saving, self.last_committed = None, saving.marker_name
            self._announce(saving, saving.committing.result())

    def finish(self) -> None:
        """Wait until the save in progress is committed or has failed. Collective."""
        if self._saving is not None:
            self._finish()

    def save(self, step: int, run_state: bytes) -> None:
        """Save and wait for the commit. Raises CheckpointError on all ranks if any rank failed."""
        self.finish()
        if self._last_step() == step:
            return
        self.start(step, run_state)
        self.finish()
        if self._last_step() != step:
            name = markers.name_of(step, self._attempt, self._group)
            raise CheckpointError(
                f"checkpoint {name} (={self._folder.url_of(name)}) could not be written before the run "
                "ended; the log says why; free some space or fix the storage, then resume"
            )

    def _log(self, level: Level, message: str) -> None:
        """Log on rank 0 only."""
        if self._layout.rank == 0:
            self._recorder.log(level, message)

    def _last_step(self) -> int | None:
        order = markers.order(self.last_committed) if self.last_committed else None
        return order[0] if order else None

    def _finish(self) -> None:
        """Complete the save in progress, waiting for the slowest rank in each phase."""
        while self._saving is not None:
            with doing("checkpoint", f"waiting for checkpoint {self._saving.marker_name}"):
                self._saving.current.wait()
                num_done, num_failed = json_collectives.all_reduce_sum(*self.vote())
                self.advance(int(num_done), int(num_failed))

    def _write(self, name: str, run_state: bytes) -> ShardWriteResult:
        """Write this rank's files; rank 0 also writes the run's metadata files."""
        with doing("checkpoint", f"checkpoint {name}"):
            return self._write_files(name, run_state)

    def _write_files(self, name: str, run_state: bytes) -> ShardWriteResult:
        assert self._writer is not None
        if self._layout.rank == 0:
            self._skipped.discard(name)
            self._unreadable.discard(name)
            self._folder.remove(name + markers.SUFFIX)
        result = self._writer.write(self._folder.subfolder(name))
        if self._layout.rank == 0:
            for path, content in {**self._files, "run.json": run_state}.items():
                self._folder.write(f"{name}/{path}", content)
                result.seals[path] = markers.seal(content)
        return result

    def _commit(self, saving: _Saving, results: list[ShardWriteResult] | None) -> Marker | None:
        """Write the marker after all files, then remove old checkpoints. On rank 0 only."""
        if results is None:
            return None
        assert self._writer is not None
        seals: dict[str, FileSeal] = self._writer.finish(self._folder.subfolder(saving.marker_name), results)
        marker = Marker(
            step=saving.step, attempt=self._attempt, group=self._group, num_workers=self._layout.world_size,
            created_at=datetime.now(UTC).isoformat(), files=seals,
        )  # fmt: skip
        self._folder.write(marker.name + markers.SUFFIX, marker.to_bytes())
        self._delete_superfluous(saving)
        return marker

    def _delete_superfluous(self, saving: _Saving) -> None:
        """Remove checkpoints beyond `keep`, except the best one if that is kept, damaged ones, and unfinished ones of
        dead worker groups.

        Unreadable checkpoints may be intact: they do not count toward `keep`, and stay until `keep` newer intact ones
        exist. Those of later attempts or worker groups stay, in case this worker group is presumed dead.
        """
        current = (self._attempt, self._group)
        committed_names = markers.list_committed(self._folder)
        num_kept, superfluous = 0, set(self._skipped)
        best = self._best()
        for name in committed_names:  # newest first
            if num_kept == self._keep:
                superfluous |= {name} - best
            elif name not in self._skipped | self._unreadable:
                num_kept += 1
        for name in superfluous:
            # Marker first, so that no marker is left without its files.
            if (markers.order(name) or ())[1:] <= current and self._try_remove(name + markers.SUFFIX, name):
                self._skipped.discard(name)
        for name in set(self._folder.names()) - set(committed_names):
            order = markers.order(name)
            if order and (order[1:] < current or (order[1:] == current and order[0] < saving.step)):
                self._try_remove(name)

    def _best(self) -> set[str]:
        """Name of the best checkpoint, if it is kept; all names while storage cannot tell which one it is."""
        if not self._keep_best:
            return set()
        try:
            best = best_committed(self._folder, excluded=self._skipped)
        except OSError as error:
            self._recorder.log("warning", f"no old checkpoint is removed, since the best one is unknown: {error}")
            return set(markers.list_committed(self._folder))
        return set() if best is None else {best}

    def _try_remove(self, *paths: str) -> bool:
        """Remove paths; return whether all are gone. Leftovers do not fail a committed save."""
        try:
            for path in paths:
                self._folder.remove(path)
        except OSError as error:
            self._recorder.log("warning", f"cannot remove {paths[-1]}: {error}")
            return False
        return True

    def _announce(self, saving: _Saving, marker: Marker | None) -> None:
        if marker is not None:
            self._recorder.checkpoint(CheckpointRecord(
                step=saving.step, name=marker.name, url=self._folder.url_of(marker.name),
                size_bytes=marker.size_bytes, num_files=len(marker.files), stall_s=saving.stall_s,
                write_s=time.perf_counter() - saving.started_at, time=marker.created_at,
            ))  # fmt: skip


def _read_marker(folder: Folder, name: str) -> tuple[dict[str, Any] | None, tuple[str, bool] | None]:
    """(marker or None, fault or None), as plain values."""
    try:
        return markers.read(folder, name).model_dump(mode="json"), None
    except FileNotFoundError:
        fault = "its marker is missing"
    except OSError as error:
        fault = UnreadableStorage(f"its marker cannot be read: {error}")
    except ValueError as error:
        fault = str(error)
    return None, _plain(fault)


def _plain(fault: str | None) -> tuple[str, bool] | None:
    """Plain value of a fault; inverse of `_fault`."""
    return None if fault is None else (str(fault), isinstance(fault, UnreadableStorage))


def _fault(text: str, is_unreadable: bool) -> str:
    return UnreadableStorage(text) if is_unreadable else text


def _in_words(error: Exception | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {error}"
