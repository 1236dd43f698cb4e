"""All-to-alls of rows along one mesh axis, for local programs."""

from collections.abc import Callable

from torch import Tensor

from moe.dispatch.row_exchange import PendingRows, RowExchange, Traffic
from moe.sharding.exchange.mesh import Mesh


class _PendingMeshRows:
    """Pending all-to-all. `wait` may be called once and frees its buffers."""

    def __init__(self, wait: Callable[[], Tensor]) -> None:
        self._waits = [wait]

    def wait(self) -> Tensor:
        return self._waits.pop()()


class MeshRows(RowExchange):
    """All-to-alls along one mesh axis; traffic is not counted."""

    def __init__(self, mesh: Mesh, axis: int) -> None:
        self._mesh, self._axis = mesh, axis
        self.num_ranks, self.rank = mesh.degrees[axis], mesh.indices[axis]

    def exchange_counts(self, counts: Tensor) -> Tensor:
        one_each = [1] * self.num_ranks
        return self._mesh.all_to_all(counts.contiguous(), self._axis, one_each, one_each)

    def gather_counts(self, counts: Tensor) -> Tensor:
        flat_counts = self._mesh.all_gather(counts.contiguous(), self._axis)
        return flat_counts.view(self.num_ranks, *counts.shape)

    def start(self, rows: Tensor, send_counts: list[int], receive_counts: list[int]) -> PendingRows:
        return _PendingMeshRows(self._mesh.begin_all_to_all(rows.contiguous(), self._axis, send_counts, receive_counts))

    def take_traffic(self) -> Traffic:
        return Traffic()
