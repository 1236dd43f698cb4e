"""All-to-alls of rows over ranks."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from moe.parallel.collective import all_gather_single, collective
from moe.parallel.side_by_side import give_way
from moe.parallel.stopwatch import Stopwatch


@dataclass(frozen=True)
class Traffic:
    """Bytes and seconds of one layer's all-to-alls on one rank."""

    num_bytes: int = 0
    """Bytes sent to other ranks."""
    transfer_s: float = 0.0
    """Time waiting for rows."""
    waiting_s: float = 0.0
    """Time waiting for the slowest rank, in the exchange of counts that precedes the rows."""

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            self.num_bytes + other.num_bytes, self.transfer_s + other.transfer_s, self.waiting_s + other.waiting_s
        )


class PendingRows(Protocol):
    """Rows in flight."""

    def wait(self) -> Tensor:
        """Return the rows `[sum(received), ...]` in rank order. May be called once."""


class RowExchange(ABC):
    """Base class of all-to-alls over a group of ranks, which make the same calls in the same order."""

    num_ranks: int
    rank: int

    @abstractmethod
    def exchange_counts(self, counts: Tensor) -> Tensor:
        """int64 `[ranks, n]`: what each rank addressed to this one in its `counts`.

        Every pass begins with this or with `gather_counts`.
        """

    @abstractmethod
    def gather_counts(self, counts: Tensor) -> Tensor:
        """int64 `[ranks, ranks, n]`: entry [r, s] is what rank r addressed to rank s; the same on all ranks."""

    @abstractmethod
    def start(self, rows: Tensor, send_counts: list[int], receive_counts: list[int]) -> PendingRows:
        """Start sending `sent[r]` consecutive rows of `rows` `[sum(sent), ...]`, any dtype, to each rank r, and
        receiving `received[r]` from it. Counts may be zero."""

    @abstractmethod
    def take_traffic(self) -> Traffic:
        """Return and reset the traffic."""


class PendingAllToAll:
    """Rows in flight over a process group."""

    def __init__(self, owner: "AllToAll", receive_buffer: Tensor, send_buffer: Tensor, work: dist.Work) -> None:
        self._owner, self._in_flight = owner, [(receive_buffer, send_buffer, work)]

    def wait(self) -> Tensor:
        """Return the rows `[sum(received), ...]` in rank order. May be called once; frees the buffers."""
        give_way()
        receive_buffer, _send_buffer, work = self._in_flight.pop()
        with collective(f"all-to-all of rows, {self._owner.label}"), self._owner.run_stopwatch(self._owner.transfer):
            work.wait()
        return receive_buffer


class AllToAll(RowExchange):
    """All-to-alls of one layer over one process group."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, label: str = "unnamed layer") -> None:
        self.group, self.label = group, label
        self.num_ranks, self.rank = group.size(), group.rank()
        self.transfer, self.waiting = Stopwatch(device), Stopwatch(device)
        self._num_bytes = 0
        self._is_timed = True

    def exchange_counts(self, counts: Tensor) -> Tensor:
        # Exchanges without gradients belong to no training step and are not counted.
        self._is_timed = torch.is_grad_enabled()
        receive_counts = torch.empty_like(counts)
        with collective(f"all-to-all of counts, {self.label}"), self.run_stopwatch(self.waiting):
            dist.all_to_all_single(receive_counts, counts.contiguous(), group=self.group)
        return receive_counts

    def gather_counts(self, counts: Tensor) -> Tensor:
        self._is_timed = torch.is_grad_enabled()
        gathered_counts = counts.new_empty(self.num_ranks * counts.shape[0], *counts.shape[1:])
        with collective(f"all-gather of counts, {self.label}"), self.run_stopwatch(self.waiting):
            all_gather_single(gathered_counts, counts.contiguous(), group=self.group)
        return gathered_counts.view(self.num_ranks, *counts.shape)

    def start(self, rows: Tensor, send_counts: list[int], receive_counts: list[int]) -> PendingRows:
        rows = rows.contiguous()
        receive_buffer = rows.new_empty((sum(receive_counts), *rows.shape[1:]))
        if self._is_timed:
            self._num_bytes += (rows.shape[0] - send_counts[self.rank]) * rows[:1].nbytes
        with collective(f"all-to-all of rows, {self.label}"):
            work = dist.all_to_all_single(
                receive_buffer, rows, receive_counts, send_counts, group=self.group, async_op=True
            )
        assert work is not None
        return PendingAllToAll(self, receive_buffer, rows, work)

    def run_stopwatch(self, stopwatch: Stopwatch) -> AbstractContextManager[None]:
        """Context that runs `stopwatch` in counted passes."""
        return stopwatch.running() if self._is_timed else nullcontext()

    def take_traffic(self) -> Traffic:
        num_bytes, self._num_bytes = self._num_bytes, 0
        return Traffic(num_bytes, self.transfer.take(), self.waiting.take())


class _AllToAllFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: object, rows: Tensor, send_counts: list[int], receive_counts: list[int], transport: RowExchange
    ) -> Tensor:
        ctx.settings = send_counts, receive_counts, transport  # type: ignore[attr-defined]
        return transport.start(rows, send_counts, receive_counts).wait()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        send_counts, receive_counts, transport = ctx.settings  # type: ignore[attr-defined]
        return transport.start(gradients[0], receive_counts, send_counts).wait(), None, None, None


def exchange_rows(rows: Tensor, send_counts: list[int], receive_counts: list[int], transport: RowExchange) -> Tensor:
    """Exchange rows and wait for them; the result is in rank order. Differentiable: gradients return the same way."""
    return _AllToAllFunction.apply(rows, send_counts, receive_counts, transport)
