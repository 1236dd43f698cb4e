"""A mesh whose ranks are threads of one process: collectives by way of shared lists."""

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moe.sharding.exchange.mesh import Draws, Mesh


class _Meeting:
    """What ranks along one axis give one another, call by call."""

    def __init__(self, degree: int) -> None:
        self.barrier = threading.Barrier(degree)
        self.given: list[Any] = [None] * degree

    def exchange(self, index: int, value: Any) -> list[Any]:
        self.given[index] = value
        self.barrier.wait(60)
        every = list(self.given)
        self.barrier.wait(60)
        return every


@dataclass(frozen=True)
class ThreadMesh(Mesh):
    degrees: tuple[int, ...]
    indices: tuple[int, ...]
    meetings: tuple[_Meeting, ...]
    log: list[tuple[str, int, int]]
    """(kind, axis, bytes that this rank gave) of its collectives."""
    draws: Draws = field(default_factory=Draws)

    def _all(self, what: str, value: Any, axis: int) -> list[Any]:
        tensor = value[0] if isinstance(value, tuple) else value
        assert tensor.is_contiguous(), what
        self.log.append((what, axis, tensor.numel() * tensor.element_size()))
        return self.meetings[axis].exchange(self.indices[axis], value)

    def all_gather(self, rows: Tensor, axis: int) -> Tensor:
        every = self._all("all_gather", rows, axis)
        assert len({each.shape for each in every}) == 1, [each.shape for each in every]
        return torch.cat(every)

    def reduce_scatter(self, rows: Tensor, axis: int) -> Tensor:
        total = torch.stack(self._all("reduce_scatter", rows, axis)).sum(0).to(rows.dtype)
        return total.chunk(self.degrees[axis])[self.indices[axis]] if rows.shape[0] else total

    def all_reduce(self, x: Tensor, axis: int, combine: str) -> Tensor:
        every = torch.stack(self._all("all_reduce", x, axis))
        match combine:
            case "sum":
                return every.sum(0).to(x.dtype)
            case "max":
                return every.amax(0)
            case _:
                return every.amin(0)

    def all_to_all(self, rows: Tensor, axis: int, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        every = self._all("all_to_all", (rows, list(send_counts)), axis)
        parts = [each.split(counts)[self.indices[axis]] for each, counts in every]
        assert [part.shape[0] for part in parts] == list(receive_counts)
        return torch.cat(parts)

    def permute(self, rows: Tensor, axis: int, shift: int) -> Callable[[], Tensor]:
        every = self._all("permute", rows, axis)
        arrived = every[(self.indices[axis] + shift) % self.degrees[axis]]
        return lambda: arrived


def on_threads(degrees: Sequence[int], run: Callable[[ThreadMesh], Any]) -> list[Any]:
    """What each rank's `run` returns, in rank order. Raises what one of them raised."""
    ranks = torch.arange(math.prod(degrees)).view(*degrees)
    meetings: dict[tuple[int, ...], _Meeting] = {}
    meshes = []
    for rank in ranks.flatten().tolist():
        indices = tuple((ranks == rank).nonzero()[0].tolist())
        mine = []
        for axis, degree in enumerate(degrees):
            key = (axis, *indices[:axis], *indices[axis + 1 :])
            mine.append(meetings.setdefault(key, _Meeting(degree)))
        meshes.append(ThreadMesh(tuple(degrees), indices, tuple(mine), []))
    found: list[Any] = [None] * len(meshes)
    errors: list[BaseException] = []

    def one(number: int) -> None:
        try:
            found[number] = run(meshes[number])
        except BaseException as error:
            errors.append(error)
            for meeting in meshes[number].meetings:
                meeting.barrier.abort()

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(meshes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return found
