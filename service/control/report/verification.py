"""Verification of committed checkpoints, in a few threads of its own: a checkpoint may have terabytes, and the threads
that answer requests must not wait for them."""

import asyncio
import posixpath
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Event, Lock
from time import monotonic

from anyio import CapacityLimiter, to_thread

from moe.storage import sealing
from moe.storage.folder import Folder
from moe.train.checkpoint import marker as markers
from moe.train.checkpoint.marker import FileSeal, Marker
from service.control.errors import NotFound, Unavailable
from service.wire.verification import CheckpointFault, CheckpointVerification

NUM_THREADS = 4
"""Files that one verification reads side by side."""
MAX_VERIFICATIONS = 2
"""Verifications at a time."""
RETRY_AFTER_S = 30
MAX_FAULTS = 1_000
"""Faults after which a verification ends."""
MAX_SHOWN_STEPS = 10
_RESTORE = "restore the file from a copy, or use another checkpoint; runs resume from the newest one that is intact"
_REMEDIES = {"missing": _RESTORE, "corrupt": _RESTORE, "unreadable": "check the storage, and verify it again"}


class Interruption(Exception):
    """The service stops, or nobody waits for the verification any more."""


class Verifications:
    """Verifies checkpoints, a few at a time."""

    def __init__(self, should_stop: Callable[[], bool]) -> None:
        """`should_stop` is polled while files are read."""
        self._should_stop, self._num_running = should_stop, 0
        self._threads = CapacityLimiter(NUM_THREADS * MAX_VERIFICATIONS)

    async def verify(self, checkpoints: Folder, checkpoint: str) -> CheckpointVerification:
        """Compare the files of a checkpoint, named by its step or folder, with its marker. Raises NotFound, also if
        it is removed meanwhile; Unavailable while others are verified, or if the storage cannot be listed."""
        if self._num_running >= MAX_VERIFICATIONS:
            raise Unavailable(
                f"{MAX_VERIFICATIONS} checkpoints are being verified; try again when one of them is done",
                headers={"retry-after": str(RETRY_AFTER_S)},
            )
        self._num_running += 1
        try:
            name = await to_thread.run_sync(find_checkpoint, checkpoints, checkpoint, limiter=self._threads)
            return await self._verify(checkpoints, name)
        except OSError as error:
            raise Unavailable(f"cannot read {checkpoints.url}: {error.strerror or error}; try again later") from None
        finally:
            self._num_running -= 1

    async def _verify(self, checkpoints: Folder, name: str) -> CheckpointVerification:
        start_s = monotonic()
        step = (markers.order(name) or (0,))[0]
        try:
            marker = await to_thread.run_sync(markers.read, checkpoints, name, limiter=self._threads)
        except FileNotFoundError:
            raise _was_removed(name) from None
        except ValueError as error:
            fault = CheckpointFault("corrupt", f"{markers.FOLDER}/{name}{markers.SUFFIX}", str(error), _RESTORE)
            return CheckpointVerification(name, step, 0, 0, monotonic() - start_s, (fault,))
        verification = _Verification(checkpoints, marker, self._should_stop)
        try:
            await asyncio.gather(
                *(
                    to_thread.run_sync(verification.check_files, limiter=self._threads, abandon_on_cancel=True)
                    for _ in range(min(NUM_THREADS, len(marker.files)))
                )
            )
        except Interruption:
            raise Unavailable("this service is stopping; verify the checkpoint again after its restart") from None
        finally:
            verification.end()
        faults = tuple(sorted(verification.faults, key=lambda fault: fault.path))
        if faults and not await to_thread.run_sync(_has_marker, checkpoints, name, limiter=self._threads):
            raise _was_removed(name)
        return CheckpointVerification(
            name, step, verification.num_files, verification.num_bytes, monotonic() - start_s, faults
        )


class _Verification:
    """Progress of one verification, shared by its threads."""

    def __init__(self, checkpoints: Folder, marker: Marker, should_stop: Callable[[], bool]) -> None:
        self._checkpoints, self._name, self._should_stop = checkpoints, marker.name, should_stop
        self._files: SimpleQueue[tuple[str, FileSeal]] = SimpleQueue()
        for file in marker.files.items():
            self._files.put(file)
        self._lock, self._ended = Lock(), Event()
        self.faults: list[CheckpointFault] = []
        self.num_files = self.num_bytes = 0

    def end(self) -> None:
        """End the threads at their next block."""
        self._ended.set()

    def check_files(self) -> None:
        """Check the remaining files. Raises Interruption."""
        while len(self.faults) < MAX_FAULTS:
            try:
                path, seal = self._files.get_nowait()
            except Empty:
                return
            fault = self._check(path, seal)
            with self._lock:
                self.num_files += 1
                if fault is not None:
                    location = f"{markers.FOLDER}/{self._name}/{path}"
                    remedy = _REMEDIES[fault.code]
                    self.faults.append(CheckpointFault(fault.code, location, fault.rule, remedy, fault.value))

    def _check(self, path: str, seal: FileSeal) -> sealing.FileFault | None:
        if posixpath.isabs(path) or ".." in path.split("/"):
            return sealing.FileFault("corrupt", "is outside the checkpoint")
        return sealing.check(
            self._checkpoints, f"{self._name}/{path}", seal.size_bytes, seal.sha256, on_block=self._count
        )

    def _count(self, num_bytes: int) -> None:
        if self._ended.is_set() or self._should_stop():
            raise Interruption
        with self._lock:
            self.num_bytes += num_bytes


def find_checkpoint(checkpoints: Folder, checkpoint: str) -> str:
    """Name of the newest committed checkpoint of a step, or of the one with this name. Raises NotFound, OSError."""
    names = markers.list_committed(checkpoints)
    is_step = checkpoint.isascii() and checkpoint.isdecimal()
    steps = {name: (markers.order(name) or (0,))[0] for name in names}
    for name in names:
        if checkpoint == (str(steps[name]) if is_step else name):
            return name
    choices = ", ".join(map(str, sorted(set(steps.values()))[-MAX_SHOWN_STEPS:])) or "none yet"
    raise NotFound(f"there is no committed checkpoint {checkpoint[:100]!r}; its newest steps: {choices}")


def _has_marker(checkpoints: Folder, name: str) -> bool:
    return name in markers.list_committed(checkpoints)


def _was_removed(name: str) -> NotFound:
    return NotFound(f"{name} was removed while it was verified, as checkpoint.keep or a deletion of the job requires")
