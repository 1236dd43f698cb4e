"""A mesh with a further outermost axis: the loop over micro-batches. The ranks of this axis are the present rank, one
micro-batch after the other."""

from collections.abc import Callable, Sequence

from torch import Tensor

from moe.sharding.exchange.mesh import Mesh
from moe.sharding.placement import Combine


class LoopMesh(Mesh):
    """Mesh whose index along axis 0 is the current micro-batch. Nothing can be exchanged along that axis."""

    def __init__(self, mesh: Mesh, micro_batches: int) -> None:
        self._mesh, self.draws = mesh, mesh.draws
        self.degrees = (micro_batches, *mesh.degrees)
        self.indices = (0, *mesh.indices)

    def go_to(self, micro_batch: int) -> None:
        self.indices = (micro_batch, *self._mesh.indices)

    def _axis(self, axis: int) -> int:
        assert axis > 0, "a loop has no collectives"
        return axis - 1

    def all_gather(self, rows: Tensor, axis: int) -> Tensor:
        return self._mesh.all_gather(rows, self._axis(axis))

    def reduce_scatter(self, rows: Tensor, axis: int) -> Tensor:
        return self._mesh.reduce_scatter(rows, self._axis(axis))

    def all_reduce(self, x: Tensor, axis: int, combine: Combine) -> Tensor:
        return self._mesh.all_reduce(x, self._axis(axis), combine)

    def all_to_all(self, rows: Tensor, axis: int, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        return self._mesh.all_to_all(rows, self._axis(axis), send_counts, receive_counts)

    def begin_all_gather(self, rows: Tensor, axis: int) -> Callable[[], Tensor]:
        return self._mesh.begin_all_gather(rows, self._axis(axis))

    def begin_reduce_scatter(self, rows: Tensor, axis: int) -> Callable[[], Tensor]:
        return self._mesh.begin_reduce_scatter(rows, self._axis(axis))

    def begin_all_reduce(
        self, x: Tensor, axis: int, combine: Combine, *, in_place: bool = False
    ) -> Callable[[], Tensor]:
        return self._mesh.begin_all_reduce(x, self._axis(axis), combine, in_place=in_place)

    def begin_all_to_all(
        self, rows: Tensor, axis: int, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Callable[[], Tensor]:
        return self._mesh.begin_all_to_all(rows, self._axis(axis), send_counts, receive_counts)

    def permute(self, rows: Tensor, axis: int, shift: int) -> Callable[[], Tensor]:
        return self._mesh.permute(rows, self._axis(axis), shift)
