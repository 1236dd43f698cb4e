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
    """Values that ranks along one axis exchange, call by call."""

    def __init__(self, degree: int) -> None:
        self.barrier = threading.Barrier(degree)
        self.values: list[Any] = [None] * degree

    def exchange(self, index: int, value: Any) -> list[Any]:
        self.values[index] = value
        self.barrier.wait(60)
        values = list(self.values)
        self.barrier.wait(60)
        return values


@dataclass(frozen=True)
class ThreadMesh(Mesh):
    degrees: tuple[int, ...]
    indices: tuple[int, ...]
    meetings: tuple[_Meeting, ...]
    log: list[tuple[str, int, int]]
    """(kind, axis, bytes that this rank sent) of its collectives"""
    draws: Draws = field(default_factory=Draws)

    def _exchange(self, kind: str, value: Any, axis: int) -> list[Any]:
        tensor = value[0] if isinstance(value, tuple) else value
        assert tensor.is_contiguous(), kind
        self.log.append((kind, axis, tensor.numel() * tensor.element_size()))
        return self.meetings[axis].exchange(self.indices[axis], value)

    def all_gather(self, rows: Tensor, axis: int) -> Tensor:
        parts = self._exchange("all_gather", rows, axis)
        assert len({part.shape for part in parts}) == 1, [part.shape for part in parts]
        return torch.cat(parts)

    def reduce_scatter(self, rows: Tensor, axis: int) -> Tensor:
        total = torch.stack(self._exchange("reduce_scatter", rows, axis)).sum(0).to(rows.dtype)
        return total.chunk(self.degrees[axis])[self.indices[axis]] if rows.shape[0] else total

    def all_reduce(self, x: Tensor, axis: int, combine: str) -> Tensor:
        parts = torch.stack(self._exchange("all_reduce", x, axis))
        match combine:
            case "sum":
                return parts.sum(0).to(x.dtype)
            case "max":
                return parts.amax(0)
            case _:
                return parts.amin(0)

    def all_to_all(self, rows: Tensor, axis: int, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        messages = self._exchange("all_to_all", (rows, list(send_counts)), axis)
        parts = [sent_rows.split(counts)[self.indices[axis]] for sent_rows, counts in messages]
        assert [part.shape[0] for part in parts] == list(receive_counts)
        return torch.cat(parts)

    def permute(self, rows: Tensor, axis: int, shift: int) -> Callable[[], Tensor]:
        parts = self._exchange("permute", rows, axis)
        received_rows = parts[(self.indices[axis] + shift) % self.degrees[axis]]
        return lambda: received_rows


def on_threads(degrees: Sequence[int], run: Callable[[ThreadMesh], Any]) -> list[Any]:
    """Results of each rank's `run`, in rank order. An error of any rank is raised."""
    ranks = torch.arange(math.prod(degrees)).view(*degrees)
    meetings: dict[tuple[int, ...], _Meeting] = {}
    meshes = []
    for rank in ranks.flatten().tolist():
        indices = tuple((ranks == rank).nonzero()[0].tolist())
        rank_meetings = []
        for axis, degree in enumerate(degrees):
            key = (axis, *indices[:axis], *indices[axis + 1 :])
            rank_meetings.append(meetings.setdefault(key, _Meeting(degree)))
        meshes.append(ThreadMesh(tuple(degrees), indices, tuple(rank_meetings), []))
    results: list[Any] = [None] * len(meshes)
    errors: list[BaseException] = []

    def run_rank(number: int) -> None:
        try:
            results[number] = run(meshes[number])
        except BaseException as error:
            errors.append(error)
            for meeting in meshes[number].meetings:
                meeting.barrier.abort()

    threads = [threading.Thread(target=run_rank, args=(number,)) for number in range(len(meshes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return results
