"""Collectives of plain values over all ranks.

All ranks must call the same one; it raises CollectiveError if a rank does not join. Values are sent as JSON, since
unpickling could run the sender's code. A single process encodes and decodes them too, so results do not depend on the
number of ranks.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe.parallel import collective
from moe.parallel.first_rank import FirstRank


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def broadcast_from_rank0(ask: Callable[[], Any]) -> Any:
    """Call `ask` on rank 0 and return its result on every rank. The others wait as long as rank 0 works, regardless of
    the process group's timeout. Its exception is raised on rank 0, and RuntimeError on the others."""
    if world_size() == 1:
        return json.loads(_text(ask()))
    content, failure = b"", None
    first = FirstRank()
    if rank() == 0:
        try:
            with first.working():
                content = _text({"answer": ask()})
        except Exception as error:
            content, failure = _text({"failed": f"{type(error).__name__}: {error}"}), error
    else:
        first.wait()
    with collective("broadcast of rank 0's answer"):
        size_bytes = _largest(len(content))  # a collective that all ranks join after the wait
        if rank() == 0:
            first.forget()
        buffer = _to_buffer(content, size_bytes)
        dist.broadcast(buffer, src=0, group=cpu_group())
    if failure is not None:
        raise failure
    message = _value(buffer)
    if "failed" in message:
        raise RuntimeError(f"rank 0 failed: {message['failed']}")
    return message["answer"]


def gather_json(value: Any) -> list[Any] | None:
    """Gather every rank's value on rank 0, in rank order; None elsewhere."""
    content = _text(value)
    if world_size() == 1:
        return [json.loads(content)]
    with collective("gathering of values on rank 0"):
        own_buffer = _to_buffer(content, _largest(len(content)))
        buffers = [torch.empty_like(own_buffer) for _ in range(world_size())] if rank() == 0 else None
        dist.gather(own_buffer, buffers, dst=0, group=cpu_group())
    return None if buffers is None else [_value(buffer) for buffer in buffers]


def all_gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather every rank's value on every rank, in rank order. `group`: a CPU process group of all ranks, for calls in
    another thread."""
    content = _text(value)
    if world_size() == 1:
        return [json.loads(content)]
    group = group or cpu_group()
    with collective("gathering of values on every rank"):
        own_buffer = _to_buffer(content, _largest(len(content), group))
        buffers = [torch.empty_like(own_buffer) for _ in range(world_size())]
        dist.all_gather(buffers, own_buffer, group=group)
    return [_value(buffer) for buffer in buffers]


def scatter_json(values: Sequence[Any] | None) -> Any:
    """Return each rank's own value from those on rank 0."""
    contents = [_text(value) for value in values or ()]
    if world_size() == 1:
        return json.loads(contents[0])
    with collective("scattering of values from rank 0"):
        size_bytes = _largest(max(map(len, contents), default=0))
        own_buffer = _to_buffer(b"", size_bytes)
        buffers = [_to_buffer(content, size_bytes) for content in contents] or None
        dist.scatter(own_buffer, buffers, src=0, group=cpu_group())
    return _value(own_buffer)


def all_reduce_sum(*numbers: float) -> list[float]:
    """Sum numbers over all ranks, in float64."""
    totals = torch.tensor(numbers, dtype=torch.float64)
    if world_size() > 1:
        with collective("all-reduce of numbers"):
            dist.all_reduce(totals, group=cpu_group())
    return totals.tolist()


def _text(value: Any) -> bytes:
    return json.dumps(value).encode()


def _largest(size_bytes: int, group: dist.ProcessGroup | None = None) -> int:
    """Maximum of all ranks' sizes, to which buffers are padded: a collective requires equal shapes."""
    largest = torch.tensor(size_bytes)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group or cpu_group())
    return int(largest)


def _to_buffer(content: bytes, size_bytes: int) -> Tensor:
    return torch.frombuffer(bytearray(content.ljust(size_bytes)), dtype=torch.uint8)


def _value(buffer: Tensor) -> Any:
    return json.loads(buffer.numpy().tobytes())  # ignores trailing blanks


def cpu_group() -> dist.ProcessGroup:
    """Return the default process group, or a gloo group of the same ranks if it has no CPU backend, for example after
    `init_process_group("nccl")`. All ranks call it together: the first call creates the gloo group."""
    world = dist.group.WORLD
    assert world is not None
    if "cpu:" in str(dist.get_backend_config()):
        return world
    if world not in _GLOO_GROUPS:
        _GLOO_GROUPS.clear()  # entries of a destroyed default group
        _GLOO_GROUPS[world] = dist.new_group(backend="gloo")
    return _GLOO_GROUPS[world]


_GLOO_GROUPS: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
"""Gloo group by default group, if that has no CPU backend."""
