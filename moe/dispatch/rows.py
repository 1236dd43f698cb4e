"""All-to-all of rows over a group of ranks, begun now and waited for later, and what it costs."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from moe.parallel.collective import all_gather_single, collective
from moe.parallel.stopwatch import Stopwatch


@dataclass(frozen=True)
class Traffic:
    """Bytes and seconds of a layer's all-to-alls on one rank."""

    num_bytes: int = 0
    """Sent to other ranks."""
    transfer_s: float = 0.0
    """Waited for rows."""
    waiting_s: float = 0.0
    """Waited for the slowest rank to come: spent on the few numbers that are exchanged first."""

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            self.num_bytes + other.num_bytes,
            self.transfer_s + other.transfer_s,
            self.waiting_s + other.waiting_s,
        )


class OnTheWay(Protocol):
    """Rows that were sent."""

    def wait(self) -> Tensor:
        """The rows, `[sum(received), ...]`, in rank order. Asked for once."""


class RowExchange(ABC):
    """Contract of all-to-alls over some ranks. All of them make the same calls in the same order."""

    num_ranks: int
    rank: int

    @abstractmethod
    def exchange_counts(self, counts: Tensor) -> Tensor:
        """int64 `[ranks, n]`: row r of the result is the row that rank r meant for this one.

        Every pass begins with it, or with `gather_counts`.
        """

    @abstractmethod
    def gather_counts(self, counts: Tensor) -> Tensor:
        """int64 `[ranks, ranks, n]`: row s of result r is what rank r meant for rank s; all ranks have the same."""

    @abstractmethod
    def start(self, rows: Tensor, sent: list[int], received: list[int]) -> OnTheWay:
        """Send `sent[r]` consecutive rows of `rows` `[sum(sent), ...]`, of any dtype, to rank r, and take `received[r]`
        from it; zeros are fine on any side."""

    @abstractmethod
    def take_traffic(self) -> Traffic:
        """The cost since this was last asked for."""


class Pending:
    """Rows on their way."""

    def __init__(
        self, owner: "AllToAll", receive_buffer: Tensor, send_buffer: Tensor, work: dist.Work
    ) -> None:
        self._owner, self._on_way = owner, [(receive_buffer, send_buffer, work)]

    def wait(self) -> Tensor:
        """The rows, `[sum(received), ...]`, in rank order. Asked for once: nothing of them is held here any more."""
        receive_buffer, _send_buffer, work = self._on_way.pop()
        with (
            collective(f"all-to-all of rows, {self._owner.label}"),
            self._owner.counted(self._owner.transfer),
        ):
            work.wait()
        return receive_buffer


class AllToAll(RowExchange):
    """The all-to-alls of one layer over one group."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, label: str = "no layer's") -> None:
        self.group, self.label = group, label
        self.num_ranks, self.rank = group.size(), group.rank()
        self.transfer, self.waiting = Stopwatch(device), Stopwatch(device)
        self._num_bytes = 0
        self._counts_time = True

    def exchange_counts(self, counts: Tensor) -> Tensor:
        # What a pass without gradients exchanges is not counted: it is no part of a step.
        self._counts_time = torch.is_grad_enabled()
        receive_counts = torch.empty_like(counts)
        with collective(f"all-to-all of counts, {self.label}"), self.counted(self.waiting):
            dist.all_to_all_single(receive_counts, counts.contiguous(), group=self.group)
        return receive_counts

    def gather_counts(self, counts: Tensor) -> Tensor:
        self._counts_time = torch.is_grad_enabled()
        gathered_counts = counts.new_empty(self.num_ranks * counts.shape[0], *counts.shape[1:])
        with collective(f"all-gather of counts, {self.label}"), self.counted(self.waiting):
            all_gather_single(gathered_counts, counts.contiguous(), group=self.group)
        return gathered_counts.view(self.num_ranks, *counts.shape)

    def start(self, rows: Tensor, sent: list[int], received: list[int]) -> Pending:
        rows = rows.contiguous()
        receive_buffer = rows.new_empty((sum(received), *rows.shape[1:]))
        if self._counts_time:
            self._num_bytes += (rows.shape[0] - sent[self.rank]) * rows[:1].nbytes
        with collective(f"all-to-all of rows, {self.label}"):
            work = dist.all_to_all_single(
                receive_buffer, rows, received, sent, group=self.group, async_op=True
            )
        assert work is not None
        return Pending(self, receive_buffer, rows, work)

    def counted(self, stopwatch: Stopwatch) -> AbstractContextManager[None]:
        """The stopwatch, running in passes that count."""
        return stopwatch.running() if self._counts_time else nullcontext()

    def take_traffic(self) -> Traffic:
        num_bytes, self._num_bytes = self._num_bytes, 0
        return Traffic(num_bytes, self.transfer.take(), self.waiting.take())


class _AllToAllFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, rows: Tensor, sent: list[int], received: list[int], over: RowExchange) -> Tensor:
        ctx.settings = sent, received, over  # type: ignore[attr-defined]
        return over.start(rows, sent, received).wait()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        send_counts, receive_counts, over = ctx.settings  # type: ignore[attr-defined]
        return over.start(gradients[0], receive_counts, send_counts).wait(), None, None, None


def exchange_rows(rows: Tensor, sent: list[int], received: list[int], over: RowExchange) -> Tensor:
    """The rows from every rank, in rank order, at once. Differentiable: what goes out comes back the way it went."""
    return _AllToAllFunction.apply(rows, sent, received, over)
