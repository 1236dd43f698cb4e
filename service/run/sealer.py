"""Copies a node's spooled segments to the job's storage in the background."""

import logging
import math
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from service.run.outbox import Outbox
from service.run.spool import LocalSegment, Seals, Spool, local_segments

SEAL_INTERVAL_S = 1.0
"""Sealing interval on a file system. If workers and control plane die together, unsealed records of steps that are
not repeated are lost. Storage with a price per object is sealed less often."""
REMOTE_SEAL_INTERVAL_S = 5.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SealTask:
    """A spool, or a dead process's folder, and its destination."""

    folder: Path
    seals: Seals
    spool: Spool | None = None
    """None if its process is dead, and all segments are complete."""
    outbox: Outbox | None = None
    """The other reader of the segments; they stay until both are done."""

    def complete(self) -> Sequence[LocalSegment]:
        return self.spool.complete() if self.spool else local_segments(self.folder)

    def remove(self, segment: LocalSegment) -> None:
        if self.spool:
            self.spool.remove(segment)
        else:
            segment.remove()


class Sealer:
    """Seals a process's spools, and those of dead processes on this node."""

    def __init__(self, writers: Sequence[SealTask], interval_s: float = SEAL_INTERVAL_S) -> None:
        self._writers, self._interval_s = list(writers), interval_s
        self._ending = threading.Event()
        self._failing = False
        self._fault_logged = ""
        self._thread = threading.Thread(target=self._run, name="sealer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, patience_s: float, extra_tasks: Sequence[SealTask] = ()) -> bool:
        """Seal everything left, and `extra_tasks`, within about `patience_s`; returns whether it succeeded."""
        self._ending.set()
        self._thread.join()
        self._writers += extra_tasks
        give_up_at = time.monotonic() + patience_s
        while not self._seal(age_s=0.0):
            if time.monotonic() > give_up_at:
                return False
            time.sleep(0.2)
        return True

    def _run(self) -> None:
        while not self._ending.wait(self._interval_s / 2):
            self._seal(age_s=self._interval_s)

    def _seal(self, age_s: float) -> bool:
        """Seal all due segments; False if storage could not be written."""
        try:
            for writer in self._writers:
                if writer.spool:
                    # While storage hangs, segments grow instead of multiplying: each holds a file open.
                    writer.spool.roll(math.inf if self._failing and age_s else age_s)
                for segment in writer.complete():
                    writer.seals.seal(segment)
                    if writer.outbox is None or writer.outbox.has_left(segment):
                        writer.remove(segment)
                if writer.spool is None and not local_segments(writer.folder):
                    shutil.rmtree(writer.folder, ignore_errors=True)
        except OSError as error:
            if not self._failing:
                _log.warning("cannot write to storage (%s): records and logs wait on this node", error)
            self._failing = True
            return False
        self._failing = False
        self._log_faults()
        return True

    def _log_faults(self) -> None:
        """Log once that lines wait in memory, with the reason."""
        faults = [writer.spool.fault for writer in self._writers if writer.spool]
        fault = next((str(fault) for fault in faults if fault is not None), "")
        if fault and fault != self._fault_logged:
            _log.warning("cannot write records to the node's disk (%s): they wait in memory", fault)
        self._fault_logged = fault
