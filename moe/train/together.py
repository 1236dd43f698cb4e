"""Plain values between ranks, over the default process group; on one process each is a no-op.

All ranks call each of these together; each raises CollectiveError where another does not come. Values are pickled
between processes of one job, never from storage.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from moe.parallel import collective

Value = TypeVar("Value")


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def from_first(ask: Callable[[], Value]) -> Value:
    """Rank 0's answer on every rank; the others are not asked."""
    answer: list[Any] = [ask() if rank() == 0 else None]
    if world_size() > 1:
        with collective("broadcast of rank 0's answer"):
            dist.broadcast_object_list(answer, src=0)
    return answer[0]


def gathered(value: Value) -> list[Value] | None:
    """Every rank's value on rank 0, in rank order; None elsewhere."""
    if world_size() == 1:
        return [value]
    values: list[Any] | None = [None] * world_size() if rank() == 0 else None
    with collective("gathering of values on rank 0"):
        dist.gather_object(value, values, dst=0)
    return values


def all_gathered(value: Value) -> list[Value]:
    """Every rank's value on every rank, in rank order."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    with collective("gathering of values on every rank"):
        dist.all_gather_object(values, value)
    return values


def scattered(values: list[Value] | None) -> Value:
    """Each rank's own of the values that rank 0 has."""
    if world_size() == 1:
        assert values is not None, "rank 0 has the values"
        return values[0]
    mine: list[Any] = [None]
    with collective("scattering of values from rank 0"):
        dist.scatter_object_list(mine, values, src=0)
    return mine[0]


def summed(*numbers: float) -> list[float]:
    """The sums of numbers over all ranks, in float64."""
    totals = torch.tensor(numbers, dtype=torch.float64)
    if world_size() > 1:
        with collective("all-reduce of numbers"):
            dist.all_reduce(totals)
    return totals.tolist()
