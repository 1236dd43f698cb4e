"""Prefetching of this rank's part of each global batch, one step ahead."""

import time
from collections.abc import Callable
from typing import Any

from moe.tasks.task import RankBatch, StreamedBatches
from moe.train.background import BackgroundCall


class BatchPrefetcher:
    """Returns a run's batches in step order; a thread prefetches the next one with `make`."""

    def __init__(self, make: Callable[[int], RankBatch[Any]]) -> None:
        self._make = make
        self._prefetched: tuple[int, BackgroundCall[RankBatch[Any]]] | None = None
        self.waited_s = 0.0
        """Seconds that the last `take` waited for its batch."""

    def seek(self, step: int, position: Any) -> str | None:
        """Continue a stream before `step`, at a position of `position` or at its beginning (None); return a note for
        the user."""
        return self._make.seek(step, position) if isinstance(self._make, StreamedBatches) else None

    def position(self, step: int) -> Any:
        """Position of a stream before `step`, to be stored; None if batches need none. Collective."""
        return self._make.position(step) if isinstance(self._make, StreamedBatches) else None

    def take(self, step: int) -> RankBatch[Any]:
        """Batch of `step`; starts prefetching the next one. Raises what `make` raised."""
        began = time.perf_counter()
        if self._prefetched is not None and self._prefetched[0] == step:
            batch = self._prefetched[1].result()
        else:
            batch = self._make(step)
        self.waited_s = time.perf_counter() - began
        self._prefetched = (step + 1, BackgroundCall(lambda: self._make(step + 1), "next-batch"))
        return batch

    def close(self) -> None:
        """Wait for the pending prefetch, and close a stream."""
        if self._prefetched is not None:
            self._prefetched[1].wait()
        if isinstance(self._make, StreamedBatches):
            self._make.close()
