"""Waiting for rank 0, for as long as it works, through the store of the default process group.

Rank 0 sets a key every second while it works, and another at the end; the others wait for one key after another, so
none runs into a process group's timeout. They give up if no key is set within that timeout, as in any collective: rank
0 may be suspended, or run native code that holds the GIL. Its death is noticed sooner, because the store or its
launcher goes down too.
"""

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import _get_default_store

from moe.parallel import collective

BEAT_S = 1.0
_WORKS, _ENDED = b"works", b"ended"


class FirstRank:
    """Wait for rank 0 through the store of the default process group. Every rank creates one instance per operation."""

    def __init__(self) -> None:
        store = _get_default_store()
        # counted in the store, so that ranks agree even if a process had another process group before
        number = store.add(f"first_rank/rank {dist.get_rank()}", 1)
        self._store: Any = dist.PrefixStore(f"first_rank/{number}", store)
        self._num_beats = 0

    @contextmanager
    def working(self) -> Iterator[None]:
        """Signal to the other ranks that rank 0 works, until the block ends. Called on rank 0."""
        stop_event = threading.Event()
        thread = threading.Thread(target=self._beat, args=(stop_event,), name="rank 0 works", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop_event.set()
            thread.join()
            self._set(_ENDED)

    def wait(self) -> None:
        """Wait until rank 0 is done. Raises CollectiveError if it sets no key within torch's default timeout of process
        groups, or dies."""
        with collective("wait for rank 0"):
            for beat in itertools.count():
                self._store.wait([str(beat)], default_pg_timeout)
                if self._store.get(str(beat)) == _ENDED:
                    return

    def forget(self) -> None:
        """Delete the keys. Called on rank 0, once all ranks have waited."""
        for beat in range(self._num_beats):
            self._store.delete_key(str(beat))

    def _beat(self, stop_event: threading.Event) -> None:
        while not stop_event.wait(BEAT_S):
            self._set(_WORKS)

    def _set(self, value: bytes) -> None:
        self._store.set(str(self._num_beats), value)
        self._num_beats += 1
