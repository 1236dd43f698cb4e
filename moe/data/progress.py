"""Progress of preparing data: which stage it is at, and what share of the whole is done."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

ProgressCallback = Callable[[str, float | None, int], None]
"""Callback with the stage in words, the share of all work that is done (0 to 1, None if unknown), and the number of
texts that the stage has processed."""

T = TypeVar("T")
_EVERY = 1000
"""Items between two reports of a stage."""


class Stages:
    """Stages of a preparation, in order, with the share of its time that each usually takes."""

    def __init__(self, weights: Mapping[str, float], tell: ProgressCallback | None = None) -> None:
        total = sum(weights.values())
        self._weights = {stage: weight / total for stage, weight in weights.items()}
        self._tell: ProgressCallback = tell or (lambda stage, share, num_done: None)

    def report(self, stage: str, share_of_stage: float | None = 0.0, num_done: int = 0) -> None:
        """Report that this share of `stage` is done (None if unknown), and all stages before it."""
        before = 0.0
        for name, weight in self._weights.items():
            if name == stage:
                share = None if share_of_stage is None else before + weight * min(1.0, share_of_stage)
                self._tell(stage, share, num_done)
                return
            before += weight
        raise KeyError(stage)

    def through(
        self, stage: str, items: Iterable[T], share_of: Callable[[int], float | None], interval: int = _EVERY
    ) -> Iterator[T]:
        """The items, with progress reported. `share_of` maps a number of items to a share of the stage."""
        self.report(stage, share_of(0))
        for number, item in enumerate(items, start=1):
            yield item
            if number % interval == 0:
                self.report(stage, share_of(number), number)


def scaled_progress(total: int, before: int = 0) -> Callable[[int], float | None]:
    """Function from a number of items to their share of a known total, `before` items included."""
    return lambda number: (before + number) / total if total else 1.0
