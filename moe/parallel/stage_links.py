"""Point-to-point transfers between the ranks of consecutive pipeline stages.

Each pair of stages has a process group for each direction, so that transfers between two stages take place in the order
of their micro-batches, and wait for no others.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from moe.parallel.collective import collective
from moe.parallel.mesh import Layout


class Transfer(ABC):
    """A transfer in progress."""

    @abstractmethod
    def wait(self) -> Tensor:
        """The tensor, once it has been received, or may be overwritten. Raises CollectiveError."""

    @abstractmethod
    def is_completed(self) -> bool:
        """Whether `wait` would return at once. Gloo does not know it of a send."""


class _TransferBetweenRanks(Transfer):
    """Transfer by torch.distributed, or of a tensor that takes none. Keeps the tensor alive."""

    def __init__(self, tensor: Tensor, work: dist.Work | None, name: str) -> None:
        self._tensor, self._work, self._name = tensor, work, name

    def wait(self) -> Tensor:
        if self._work is not None:
            with collective(self._name):
                self._work.wait()
        return self._tensor

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()


class _TransferWithinRank(Transfer):
    """Receipt from another stage of this rank: the tensor at the head of a queue once it is waited for."""

    def __init__(self, queue: deque[Tensor]) -> None:
        self._queue = queue

    def wait(self) -> Tensor:
        return self._queue.popleft()

    def is_completed(self) -> bool:
        return bool(self._queue)


class StageLinks:
    """Transfers from and to this rank's stages. Tensors without elements are not sent."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._own_queues: dict[tuple[int, int], deque[Tensor]] = {}
        """Tensors between two stages of this rank, by (source, destination)."""

    def send(self, source: int, destination: int, x: Tensor) -> Transfer:
        """Begin to send `x` from a stage of this rank to the stage `destination`."""
        x, rank = x.detach().contiguous(), self._layout.rank_of_stage(destination)
        name = self._name(source, destination)
        if rank == self._layout.rank:
            self._queue(source, destination).append(x)
            return _TransferBetweenRanks(x, None, name)
        return _TransferBetweenRanks(x, self._begin(dist.isend, x, rank, source, destination), name)

    def receive(
        self, source: int, destination: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Transfer:
        """Begin to receive a tensor for a stage of this rank from the stage `source`."""
        rank, name = self._layout.rank_of_stage(source), self._name(source, destination)
        if rank == self._layout.rank:
            return _TransferWithinRank(self._queue(source, destination))
        x = torch.empty(shape, dtype=dtype, device=device)
        return _TransferBetweenRanks(x, self._begin(dist.irecv, x, rank, source, destination), name)

    def _queue(self, source: int, destination: int) -> deque[Tensor]:
        return self._own_queues.setdefault((source, destination), deque())

    def _begin(
        self, operation: Callable[..., dist.Work | None], x: Tensor, rank: int, source: int, destination: int
    ) -> dist.Work | None:
        if not x.numel():
            return None
        with collective(self._name(source, destination)):
            return operation(x, rank, group=self._layout.stage_group(source, destination))

    def _name(self, source: int, destination: int) -> str:
        kind = "hidden states" if source < destination else "gradients"
        ends = (f"stage {stage} on rank {self._layout.rank_of_stage(stage)}" for stage in (source, destination))
        return f"transfer of {kind} from {' to '.join(ends)}"
