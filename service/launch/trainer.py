"""Ray Train's trainer for torch, without the helper processes that a run of ours has no use for."""

from typing import Any

from ray.train.torch import TorchTrainer

UNUSED = frozenset(
    {
        "DatasetsCallback",  # hands out Ray datasets; corpora are memory-mapped files here
        "PlacementGroupCleanerCallback",  # frees the gang if Ray Train's controller dies: so does the driver
    }
)


class LeanTrainer(TorchTrainer):
    """Starts a worker group sooner: each helper is one more Python process that imports what workers import.

    The hook is not public, and Ray is pinned to the release it was read in. Where a later release names its
    helpers otherwise, or has no such hook, they are back and all else is the same.
    """

    def _create_default_callbacks(self) -> list[Any]:
        made: list[Any] = super()._create_default_callbacks()  # type: ignore[misc]  # declared as V1's
        return [each for each in made if type(each).__name__ not in UNUSED]
