"""Ray Train's trainer, without torch in the driver and without helper processes that a run has no use for."""

import asyncio
from typing import Any

from ray.runtime_context import RuntimeContext
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.failure_handling import FailurePolicy
from ray.train.v2._internal.execution.worker_group import state, worker_group
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

UNUSED = frozenset(
    {
        "DatasetsCallback",  # hands out Ray datasets; corpora are memory-mapped files here
        "PlacementGroupCleanerCallback",  # frees the gang if Ray Train's controller dies: so does the driver
    }
)


class LeanTrainer(DataParallelTrainer):
    """Starts a worker group sooner: each helper is one more Python process that imports what workers import.

    It is not `ray.train.torch.TorchTrainer`, which imports torch into the driver and only adds a default process group
    that ours would replace. The hooks are not public, and Ray is pinned to the release they were read in.
    """

    def __init__(self, *arguments: Any, failure_policy: FailurePolicy, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._failure_policy = failure_policy

    def _create_default_callbacks(self) -> list[Any]:
        callbacks: list[Any] = super()._create_default_callbacks()
        return [callback for callback in callbacks if type(callback).__name__ not in UNUSED]

    def _initialize_and_run_controller(self, **settings: Any) -> Any:
        """Run the controller here, in the driver, and not in an actor that the driver waits for."""
        # Workers are given a handle of the actor that controls them, to ask it for checkpoints that were reported to
        # it. Ours report none, and ask for none.
        RuntimeContext.current_actor = None  # type: ignore[assignment, method-assign]
        worker_group.SynchronizationActor = _NoBarrier  # type: ignore[misc, assignment]
        state._shutdown_sync_actor = _NoBarrier.end  # type: ignore[assignment]
        controller = TrainController(**{**settings, "failure_policy": self._failure_policy})
        asyncio.run(controller.run())  # type: ignore[no-untyped-call]
        return controller.get_result()


class _NoBarrier:
    """In place of the actor at which workers that report wait for each other: one more process for each worker group,
    which imports what workers import while they do. Ours report nothing."""

    @classmethod
    def options(cls, **_: Any) -> type["_NoBarrier"]:
        return cls

    @staticmethod
    def remote(**_: Any) -> str:
        """Stands in for the actor's handle that workers are given."""
        return "no barrier"

    @staticmethod
    def end(_: str) -> None:
        """Nothing is there to be ended."""
