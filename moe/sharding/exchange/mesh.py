"""This rank's place on a mesh, and the collectives along one of its axes."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh

from moe.parallel.collective import all_gather_single, collective, reduce_scatter_single
from moe.sharding.placement import Combine


@dataclass
class Draws:
    """Seed and step of the random numbers that programs draw. The caller of a program sets the step."""

    seed: int = 0
    step: int = 0

    @contextmanager
    def set_to(self, source: "Draws") -> Iterator[None]:
        """Context with another seed and step: a backward pass draws the same numbers as its forward pass, whatever ran
        in between."""
        original = self.seed, self.step
        self.seed, self.step = source.seed, source.step
        try:
            yield
        finally:
            self.seed, self.step = original


_COMBINE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Mesh(ABC):
    """Interface of a rank's place on a mesh. All ranks along an axis make the same calls in the same order. Tensors are
    contiguous, and are not changed except with `in_place`."""

    degrees: tuple[int, ...]
    """Ranks along each axis, outermost first."""
    indices: tuple[int, ...]
    """This rank's index along each axis."""
    draws: Draws
    """Seed and step of random numbers: the same on all ranks, and set for each step."""
    device_mesh: DeviceMesh | None = None
    """The same mesh for DTensors; None if parameters are plain tensors, as on one device."""

    @property
    def num_ranks(self) -> int:
        return math.prod(self.degrees)

    @abstractmethod
    def all_gather(self, rows: Tensor, axis: int) -> Tensor:
        """Returns `[degree * n, ...]` for `rows` `[n, ...]`, in the order of ranks."""

    @abstractmethod
    def reduce_scatter(self, rows: Tensor, axis: int) -> Tensor:
        """`[n, ...]`: this rank's share of the sum of `rows` `[degree * n, ...]`."""

    @abstractmethod
    def all_reduce(self, x: Tensor, axis: int, combine: Combine) -> Tensor:
        """The sum, maximum or minimum of `x` over the ranks."""

    @abstractmethod
    def all_to_all(self, rows: Tensor, axis: int, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        """Returns `[sum(receive_counts), ...]` for `rows` `[sum(send_counts), ...]`: `send_counts[r]` rows go to rank
        r, and `receive_counts[r]` rows come from it."""

    def begin_all_gather(self, rows: Tensor, axis: int) -> Callable[[], Tensor]:
        """Starts an all-gather, and returns a function that waits for it. Where it cannot overlap, it is done at
        once."""
        gathered_rows = self.all_gather(rows, axis)
        return lambda: gathered_rows

    def begin_reduce_scatter(self, rows: Tensor, axis: int) -> Callable[[], Tensor]:
        """The same for a reduce-scatter."""
        part = self.reduce_scatter(rows, axis)
        return lambda: part

    def begin_all_reduce(
        self, x: Tensor, axis: int, combine: Combine, *, in_place: bool = False
    ) -> Callable[[], Tensor]:
        """The same for an all-reduce; with `in_place`, `x` may be changed."""
        total = self.all_reduce(x, axis, combine)
        return lambda: total

    def begin_all_to_all(
        self, rows: Tensor, axis: int, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Callable[[], Tensor]:
        """The same for an all-to-all."""
        result = self.all_to_all(rows, axis, send_counts, receive_counts)
        return lambda: result

    @abstractmethod
    def permute(self, rows: Tensor, axis: int, shift: int) -> Callable[[], Tensor]:
        """Starts to send `rows` to the rank whose index is `shift` lower, in a ring. Returns a function that waits for
        the rows, of the same shape, of the rank whose index is `shift` higher."""

    def first(self, size: int, axes: Sequence[int]) -> int:
        """First position of this rank's part of a dimension of this size that these axes split."""
        first = 0
        for axis in axes:
            size = -(-size // self.degrees[axis])
            first += self.indices[axis] * size
        return first

    def valid(self, size: int, axes: Sequence[int]) -> int:
        """Length of this rank's part without padding."""
        valid = size
        for axis in axes:
            size = -(-size // self.degrees[axis])
            valid = min(max(valid - self.indices[axis] * size, 0), size)
        return valid

    def is_first(self, axes: Sequence[int]) -> bool:
        """Whether this rank is the first along all of these axes."""
        return all(self.indices[axis] == 0 for axis in axes)


@dataclass(frozen=True)
class OneDevice(Mesh):
    """A mesh of one device."""

    degrees: tuple[int, ...] = (1,)
    indices: tuple[int, ...] = (0,)
    draws: Draws = field(default_factory=Draws)

    def all_gather(self, rows: Tensor, axis: int) -> Tensor:
        return rows

    def reduce_scatter(self, rows: Tensor, axis: int) -> Tensor:
        return rows

    def all_reduce(self, x: Tensor, axis: int, combine: Combine) -> Tensor:
        return x

    def all_to_all(self, rows: Tensor, axis: int, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        return rows

    def permute(self, rows: Tensor, axis: int, shift: int) -> Callable[[], Tensor]:
        return lambda: rows


@dataclass(frozen=True)
class ShardingMesh(Mesh):
    """A rank on a mesh of processes, with collectives over NCCL or gloo."""

    degrees: tuple[int, ...]
    indices: tuple[int, ...]
    groups: tuple[dist.ProcessGroup | None, ...]
    """Process group along each axis: the ranks that differ from this one along it only; None for an axis of one
    rank."""
    draws: Draws = field(default_factory=Draws)
    device_mesh: DeviceMesh | None = None

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh) -> "ShardingMesh":
        """This rank's place on a DeviceMesh, whose process groups it uses. Raises ValueError if the rank is not on the
        mesh."""
        indices = mesh.get_coordinate()
        if indices is None:
            raise ValueError(f"rank {dist.get_rank()} is not on the mesh {mesh}")
        groups = (mesh.get_group(axis) if size > 1 else None for axis, size in enumerate(mesh.shape))
        return cls(tuple(mesh.shape), tuple(indices), tuple(groups), device_mesh=mesh)

    @classmethod
    def from_degrees(
        cls,
        degrees: Sequence[int],
        names: Sequence[str] | None = None,
        device_type: str = "cpu",
        devices: Sequence[int] = (),
    ) -> "ShardingMesh":
        """This rank's place on a mesh of all ranks, whose last axis joins consecutive ranks, or consecutive entries of
        `devices`. All ranks call it. Raises ValueError if the degrees do not multiply to the number of ranks.

        Process groups are created once and live as long as the default one: DTensor caches operations by equal meshes,
        together with the groups of the first of them.
        """
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        if num_ranks != math.prod(degrees):
            raise ValueError(f"the product of degrees {tuple(degrees)} must be the number of ranks (={num_ranks})")
        rank = dist.get_rank() if num_ranks > 1 else 0
        indices = _indices(devices.index(rank) if devices else rank, degrees)
        if num_ranks == 1:
            return cls(tuple(degrees), indices, (None,) * len(degrees))
        axes = tuple(names or (f"axis{axis}" for axis in range(len(degrees))))
        world, key = dist.group.WORLD, (tuple(degrees), axes, device_type, tuple(devices))
        if key not in _JOINED or _JOINED[key].world is not world:
            _JOINED[key] = _create_groups(world, *key)
        mesh_groups = _JOINED[key]
        return cls(tuple(degrees), indices, mesh_groups.groups, device_mesh=mesh_groups.device_mesh)

    def all_gather(self, rows: Tensor, axis: int) -> Tensor:
        return self.begin_all_gather(rows, axis)()

    def reduce_scatter(self, rows: Tensor, axis: int) -> Tensor:
        return self.begin_reduce_scatter(rows, axis)()

    def all_reduce(self, x: Tensor, axis: int, combine: Combine) -> Tensor:
        return self.begin_all_reduce(x, axis, combine)()

    def begin_all_gather(self, rows: Tensor, axis: int) -> Callable[[], Tensor]:
        if (group := self.groups[axis]) is None:
            return lambda: rows
        gathered_rows = rows.new_empty(self.degrees[axis] * rows.shape[0], *rows.shape[1:])
        with self._label("all-gather", rows, axis):
            work = all_gather_single(gathered_rows, rows, group=group, async_op=True)
        return self._waiting("all-gather", work, gathered_rows, rows, axis)

    def begin_reduce_scatter(self, rows: Tensor, axis: int) -> Callable[[], Tensor]:
        if (group := self.groups[axis]) is None:
            return lambda: rows
        part = rows.new_empty(rows.shape[0] // self.degrees[axis], *rows.shape[1:])
        with self._label("reduce-scatter", rows, axis):
            work = reduce_scatter_single(part, rows, group=group, async_op=True)
        return self._waiting("reduce-scatter", work, part, rows, axis)

    def begin_all_reduce(
        self, x: Tensor, axis: int, combine: Combine, *, in_place: bool = False
    ) -> Callable[[], Tensor]:
        if (group := self.groups[axis]) is None:
            return lambda: x
        total = x if in_place else x.clone(memory_format=torch.contiguous_format)
        with self._label("all-reduce", x, axis):
            work = dist.all_reduce(total, _COMBINE[combine], group=group, async_op=True)
        return self._waiting("all-reduce", work, total, x, axis)

    def _waiting(self, name: str, work: Any, result: Tensor, operand: Tensor, axis: int) -> Callable[[], Tensor]:
        """A function that waits for a collective, and keeps its operand alive until then."""

        def wait() -> Tensor:
            with self._label(name, operand, axis):
                work.wait()
            return result

        return wait

    def all_to_all(self, rows: Tensor, axis: int, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        return self.begin_all_to_all(rows, axis, send_counts, receive_counts)()

    def begin_all_to_all(
        self, rows: Tensor, axis: int, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Callable[[], Tensor]:
        if (group := self.groups[axis]) is None:
            return lambda: rows
        result = rows.new_empty(sum(receive_counts), *rows.shape[1:])
        with self._label("all-to-all", rows, axis):
            work = dist.all_to_all_single(
                result, rows, list(receive_counts), list(send_counts), group=group, async_op=True
            )
        return self._waiting("all-to-all", work, result, rows, axis)

    def permute(self, rows: Tensor, axis: int, shift: int) -> Callable[[], Tensor]:
        group, degree, index = self.groups[axis], self.degrees[axis], self.indices[axis]
        if group is None or shift % degree == 0:
            return lambda: rows
        result = torch.empty_like(rows)
        with self._label("permutation", rows, axis):
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, rows, group=group, group_peer=(index - shift) % degree),
                    dist.P2POp(dist.irecv, result, group=group, group_peer=(index + shift) % degree),
                ]
            )

        def wait() -> Tensor:
            with self._label("permutation", rows, axis):  # which keeps `rows` until they are sent
                for work in works:
                    work.wait()
            return result

        return wait

    def _label(self, name: str, x: Tensor, axis: int) -> AbstractContextManager[None]:
        return collective(f"{name} of {list(x.shape)} along axis {axis} of a mesh of {self.degrees}")


@dataclass(frozen=True)
class _MeshGroups:
    """Process groups of a mesh, and the DeviceMesh of them."""

    world: Any
    """The default process group when they were created."""
    groups: tuple[dist.ProcessGroup | None, ...]
    device_mesh: DeviceMesh


_JOINED: dict[tuple[tuple[int, ...], tuple[str, ...], str, tuple[int, ...]], _MeshGroups] = {}
"""Groups by degrees, names of axes, type of device and order of ranks."""


def _indices(rank: int, degrees: Sequence[int]) -> tuple[int, ...]:
    indices: list[int] = []
    for degree in reversed(degrees):
        rank, index = divmod(rank, degree)
        indices.insert(0, index)
    return tuple(indices)


def _create_groups(
    world: Any, degrees: Sequence[int], axes: tuple[str, ...], device_type: str, devices: Sequence[int]
) -> _MeshGroups:
    rank, ranks = dist.get_rank(), torch.tensor(devices or range(math.prod(degrees))).view(*degrees)
    groups: list[dist.ProcessGroup | None] = []
    for axis, degree in enumerate(degrees):
        rank_group = None
        for members in ranks.movedim(axis, -1).reshape(-1, degree).tolist() if degree > 1 else ():
            group = dist.new_group(members, sort_ranks=False)  # in the order of the axis
            rank_group = group if rank in members else rank_group
        groups.append(rank_group)
    all_groups = [  # an axis of one rank has a group of that rank alone
        dist.new_group([rank], use_local_synchronization=True) if group is None else group for group in groups
    ]
    if len(all_groups) == 1:
        device_mesh = DeviceMesh.from_group(all_groups[0], device_type, mesh_dim_names=axes)
    else:
        device_mesh = DeviceMesh.from_group(all_groups, device_type, ranks.to(torch.int), mesh_dim_names=axes)
    return _MeshGroups(world, tuple(groups), device_mesh)
