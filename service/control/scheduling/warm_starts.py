"""Warm starts: checks and copies another job's checkpoint for a new job."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from moe.spec import JobSpec, Problem, SpecError, spec_error
from moe.storage.folder import Folder
from moe.train.checkpoint import marker as markers
from moe.train.checkpoint.copying import CopyInterrupt, DamagedCheckpoint, copy_checkpoint
from moe.train.checkpoint.marker import Marker
from moe.train.checkpoint.spec_changes import MAX_SPEC_BYTES, SPEC, spec_of, state_changes
from service.control.errors import Full, Unavailable
from service.control.jobs.roots import StorageRoots
from service.control.retention.full_roots import FullRoots
from service.control.store.database import Database, is_full
from service.control.store.deletions import find_deletion
from service.control.store.jobs import JobRow, get_job

MAX_COPIES = 4
"""Maximum number of concurrent copies, since every one occupies a thread that other requests need."""
MAX_SHOWN_STEPS = 8


class WarmStarts:
    """Copies checkpoints for new jobs, until `should_stop` returns True."""

    def __init__(
        self, database: Database, roots: StorageRoots, full_roots: FullRoots, should_stop: Callable[[], bool]
    ) -> None:
        self._database, self._roots, self._full_roots, self._should_stop = (database, roots, full_roots, should_stop)
        self._copy_slots = threading.Semaphore(MAX_COPIES)

    def look_up(self, spec: JobSpec, owner: str) -> None:
        """Check `spec.start_from` without copying. Raises SpecError as `copy` would."""
        self._first_intact(spec, owner, lambda _, marker: marker)

    def copy(self, spec: JobSpec, owner: str, storage: str) -> Marker:
        """Copy the checkpoint of `spec.start_from` to `storage` (default: the newest intact one) and return its
        marker. Raises SpecError if there is none or it does not suit this job, Full, Unavailable (also if too many
        copies run)."""
        if not self._copy_slots.acquire(blocking=False):
            raise Unavailable(
                (f"{MAX_COPIES} checkpoints are already being copied for other jobs; submit this job again later"),
                headers={"retry-after": "10"},
            )
        try:
            return self._first_intact(spec, owner, lambda checkpoints, marker: self._copy(checkpoints, marker, storage))
        finally:
            self._copy_slots.release()

    def _first_intact(self, spec: JobSpec, owner: str, use: Callable[[Folder, Marker], Marker]) -> Marker:
        """Result of `use` for the first undamaged checkpoint."""
        assert spec.start_from is not None
        source = self._source(spec.start_from.job, owner)
        checkpoints = self._roots.folder(source.storage).subfolder(markers.FOLDER)
        faults = []
        with self._unless_deleted(source.id, owner):
            names = _candidates(checkpoints, source.id, spec.start_from.step)
        for name in names:
            try:
                with self._unless_deleted(source.id, owner):
                    return use(checkpoints, _suitable_marker(spec, checkpoints, name))
            except DamagedCheckpoint as error:
                faults.append(f"{name}: {error}")
        raise spec_error("not_found", "start_from.step", spec.start_from.step,
                    f"must be a complete checkpoint of {source.id} ({'; '.join(faults)})",
                    "use another step, or another job")  # fmt: skip

    @contextmanager
    def _unless_deleted(self, job_id: str, owner: str) -> Iterator[None]:
        """Raise the error of `_source` instead, if the source job was deleted meanwhile."""
        try:
            yield
        except (DamagedCheckpoint, SpecError):
            self._source(job_id, owner)
            raise

    def _source(self, job_id: str, owner: str) -> JobRow:
        with self._database.read() as tx:
            job, deletion = get_job(tx, job_id), find_deletion(tx, job_id=job_id)
        if job is not None and job.owner == owner and deletion is None:
            return job
        is_deleted = deletion is not None and deletion.owner == owner
        rule = "was deleted with its checkpoints" if is_deleted else "is not a job of yours"
        raise spec_error("not_found", "start_from.job", job_id, rule, "use an id from 'shardyard ls'")

    def _copy(self, checkpoints: Folder, marker: Marker, storage: str) -> Marker:
        """Marker of the copy. Raises DamagedCheckpoint (after removing the copy), Full, Unavailable."""
        target = self._roots.folder(storage).subfolder(markers.FOLDER)
        try:
            return copy_checkpoint(checkpoints, marker, target, self._should_stop)
        except DamagedCheckpoint:
            with suppress(OSError):  # leftovers have no marker, and the run removes them
                target.remove("")
            raise
        except CopyInterrupt:
            raise Unavailable("this service is stopping; submit the job again after its restart") from None
        except OSError as error:
            reason = f"cannot copy the checkpoint to {storage}: {error.strerror or error}"
            if is_full(error):
                fault = Full(f"{reason}; free some space, and submit the job again")
                self._full_roots.record_refusal(storage, fault, marker.size_bytes)
                raise fault from None
            raise Unavailable(reason) from None


def _suitable_marker(spec: JobSpec, checkpoints: Folder, name: str) -> Marker:
    """Marker of a checkpoint suitable for the job. Raises DamagedCheckpoint, SpecError."""
    try:
        marker = markers.read(checkpoints, name)
        if (num_bytes := marker.files[SPEC].size_bytes) > MAX_SPEC_BYTES:  # too large to be parsed
            raise DamagedCheckpoint(f"its {SPEC} has {num_bytes:,} bytes; the limit is {MAX_SPEC_BYTES:,}")
        # Verified before it is parsed: error messages may only quote what the run wrote.
        if (fault := markers.fault(checkpoints, marker, [SPEC])) is not None:
            raise DamagedCheckpoint(fault)
        source_spec = spec_of(checkpoints.subfolder(name))
    except FileNotFoundError:
        raise DamagedCheckpoint("it was just removed, as checkpoint.keep requires") from None
    except KeyError:
        raise DamagedCheckpoint(f"its marker names no {SPEC}") from None
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(str(error)) from None
    problems = state_changes(source_spec, spec)
    if marker.step >= spec.train.num_steps:
        problems.append(
            Problem("out_of_range", "train.num_steps", spec.train.num_steps,
                    f"must exceed the checkpoint's steps (={marker.step}), which count too",
                    f"use {marker.step + 1} or more, or an earlier start_from.step")
        )  # fmt: skip
    if problems:
        raise SpecError(problems)
    return marker


def _candidates(checkpoints: Folder, job_id: str, step: int | None) -> list[str]:
    """Names of committed checkpoints (of `step`, if given), newest first. Raises SpecError if there are none,
    Unavailable."""
    try:
        names = markers.list_committed(checkpoints)
    except OSError as error:
        raise Unavailable(f"cannot read the storage of {job_id}: {error}; try again later") from None
    if not names:
        rule, remedy = "has no committed checkpoint", "wait for its first, or omit start_from"
        raise spec_error("not_found", "start_from.job", job_id, rule, remedy)
    steps = {name: (markers.order(name) or (0,))[0] for name in names}
    matches = [name for name in names if step in (None, steps[name])]
    if not matches:
        choices = ", ".join(str(candidate_step) for candidate_step in sorted(set(steps.values()))[-MAX_SHOWN_STEPS:])
        remedy = f"use one of {choices}, or omit it for the newest"
        raise spec_error("not_found", "start_from.step", step, f"is not a committed checkpoint of {job_id}", remedy)
    return matches
