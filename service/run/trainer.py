"""Ray Train trainer without torch in the driver and without unneeded processes."""

import asyncio
from typing import Any

import pyarrow.fs
from fsspec.implementations.memory import MemoryFileSystem
from ray.runtime_context import RuntimeContext
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.failure_handling import FailurePolicy
from ray.train.v2._internal.execution.worker_group import state, worker_group
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

UNUSED = frozenset(
    {
        "DatasetsCallback",  # distributes Ray datasets; our corpora are memory-mapped files
        "PlacementGroupCleanerCallback",  # frees the workers if Ray Train's controller dies; so does the driver's end
    }
)


def memory_file_system() -> pyarrow.fs.FileSystem:
    """File system for Ray Train's own files, forgotten with its process: our workers report no checkpoints to it.

    On the job's storage, it would need pyarrow's credentials beside fsspec's, and leave marks of folders in buckets.
    """
    return pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(MemoryFileSystem()))


class LeanTrainer(DataParallelTrainer):
    """Starts worker groups faster: each helper is a Python process with slow imports.

    `ray.train.torch.TorchTrainer` would import torch into the driver and add a process group that ours replaces. The
    hooks are private API, so Ray's release is pinned.
    """

    def __init__(self, *arguments: Any, failure_policy: FailurePolicy, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._failure_policy = failure_policy

    def _create_default_callbacks(self) -> list[Any]:
        callbacks: list[Any] = super()._create_default_callbacks()
        return [callback for callback in callbacks if type(callback).__name__ not in UNUSED]

    def _initialize_and_run_controller(self, **settings: Any) -> Any:
        """Run the controller in the driver, not in an actor."""
        # Workers get a handle of the controller actor, to query reported checkpoints. Ours report none and query none.
        RuntimeContext.current_actor = None  # type: ignore[assignment, method-assign]
        worker_group.SynchronizationActor = _NoBarrier  # type: ignore[misc, assignment]
        state._shutdown_sync_actor = _NoBarrier.end  # type: ignore[assignment]
        controller = TrainController(**{**settings, "failure_policy": self._failure_policy})
        asyncio.run(controller.run())  # type: ignore[no-untyped-call]
        return controller.get_result()


class _NoBarrier:
    """Replaces the actor at which reporting workers synchronize. Ours report nothing."""

    @classmethod
    def options(cls, **_: Any) -> type["_NoBarrier"]:
        return cls

    @staticmethod
    def remote(**_: Any) -> str:
        """Placeholder for the actor handle that workers get."""
        return "no barrier"

    @staticmethod
    def end(_: str) -> None:
        """Nothing to end."""
