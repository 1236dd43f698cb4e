"""Ray Train's trainer for torch, without the helper processes that a run of ours has no use for."""

import asyncio
from typing import Any

from ray.runtime_context import RuntimeContext
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.execution.controller import TrainController

UNUSED = frozenset(
    {
        "DatasetsCallback",  # hands out Ray datasets; corpora are memory-mapped files here
        "PlacementGroupCleanerCallback",  # frees the gang if Ray Train's controller dies: so does the driver
    }
)


class LeanTrainer(TorchTrainer):
    """Starts a worker group sooner: each helper is one more Python process that imports what workers import.

    The hooks are not public, and Ray is pinned to the release they were read in.
    """

    def _create_default_callbacks(self) -> list[Any]:
        made: list[Any] = super()._create_default_callbacks()  # type: ignore[misc]  # declared as V1's
        return [each for each in made if type(each).__name__ not in UNUSED]

    def _initialize_and_run_controller(self, **settings: Any) -> Any:
        """Run the controller here, in the driver, and not in an actor that the driver waits for."""
        # Workers are given a handle of the actor that controls them, to ask it for checkpoints that were reported to
        # it. Ours report none, and ask for none.
        RuntimeContext.current_actor = None  # type: ignore[assignment, method-assign]
        controller = TrainController(**settings)
        asyncio.run(controller.run())  # type: ignore[no-untyped-call]
        return controller.get_result()
