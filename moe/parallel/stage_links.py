"""Point-to-point transfers between the ranks of consecutive pipeline stages.

Each pair of stages has a process group for each direction, so that transfers between two stages take place in the order
of their micro-batches, and wait for no others.
"""

from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from moe.parallel.collective import collective
from moe.parallel.mesh import Layout


class Transfer:
    """A transfer in progress, which keeps its tensor alive."""

    def __init__(self, tensor: Tensor, work: dist.Work | None, name: str) -> None:
        self.tensor, self._work, self._name = tensor, work, name

    def wait(self) -> Tensor:
        """The tensor, once it has been received, or may be overwritten. Raises CollectiveError."""
        if self._work is not None:
            with collective(self._name):
                self._work.wait()
        return self.tensor

    def is_completed(self) -> bool:
        """Whether `wait` would return at once. Gloo does not know it of a send."""
        return self._work is None or self._work.is_completed()


class _OwnTransfer(Transfer):
    """Transfer between two stages of one rank: the tensor at the head of a queue once it is waited for."""

    def __init__(self, queue: deque[Tensor], name: str) -> None:
        self._queue, self._name, self._work = queue, name, None

    def wait(self) -> Tensor:
        return self._queue.popleft()


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
            return Transfer(x, None, name)
        return Transfer(x, self._begin(dist.isend, x, rank, source, destination), name)

    def receive(
        self, source: int, destination: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Transfer:
        """Begin to receive a tensor for a stage of this rank from the stage `source`."""
        rank, name = self._layout.rank_of_stage(source), self._name(source, destination)
        if rank == self._layout.rank:
            return _OwnTransfer(self._queue(source, destination), name)
        x = torch.empty(shape, dtype=dtype, device=device)
        return Transfer(x, self._begin(dist.irecv, x, rank, source, destination), name)

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
