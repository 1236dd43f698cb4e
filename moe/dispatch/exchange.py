"""Exchange of rows with experts on other ranks, overlapped with expert computation.

While the experts compute one chunk of rows, the next is arriving and the previous outputs are returning, in both
passes. A rank holds at most two chunks of received rows and two of outputs. Received rows that are not saved are
exchanged again in the backward pass.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from moe.dispatch.rows import OnTheWay, RowExchange
from moe.experts import ExpertWeights, Work
from moe.experts.feed_forward import backward_pass, forward_pass
from moe.experts.products import padding_slots, slots
from moe.experts.weights import ExpertSettings, WeightGradients
from moe.parallel.accelerator import accelerator


@dataclass(frozen=True)
class Chunk:
    """Rows exchanged together."""

    first: int
    """Index of the first row among the rows of the sending rank."""
    sent: list[int]
    """Rows sent to each rank, in rank order."""
    arriving: Tensor
    """int64 `[ranks, local experts]`, on the CPU: rows arriving from each rank for each expert."""

    @property
    def here(self) -> slice:
        return slice(self.first, self.first + sum(self.sent))

    @property
    def received(self) -> list[int]:
        return self.arriving.sum(1).tolist()


WorkOn = Callable[[list[int]], Work]
"""Maps rows per expert to a `Work`, whose counts include padding."""


@dataclass(frozen=True)
class ExpertExchange:
    """Experts of all ranks, for rows sorted by chunk, then expert."""

    over: RowExchange
    chunks: list[Chunk]
    keep: bool
    """Save arrived rows for the backward pass."""
    work_on: WorkOn
    first: OnTheWay | None = None
    """Rows of the first chunk, if already sent."""

    def with_first_sent(self, rows: Tensor, scale: Tensor) -> "ExpertExchange":
        """Send the first chunk's rows. The returned exchange must be called with the same arguments."""
        return replace(self, first=_send(self.over, self.chunks[0], rows.detach(), scale.detach()))

    def __call__(self, rows: Tensor, scale: Tensor, weights: ExpertWeights) -> Tensor:
        """Return outputs `[n, M]` for `rows` `[n, M]`, times `scale` `[n]`; differentiable in both and in `weights`, of
        the local experts."""
        return _ExchangeRows.apply(rows, scale, self, weights.settings, *weights.tensors)


@dataclass(frozen=True)
class _ExpertOrder:
    """Permutation of a chunk's rows between rank order, in which they arrive, and expert order with padding."""

    by_expert: Tensor
    """int64 `[padded]`: arrived row at each place; arbitrary for padding."""
    by_rank: Tensor
    """int64 `[arrived]`: place of each arrived row."""
    filling: Tensor | None
    """int64: places of padding rows; None without padding."""
    work: Work

    @classmethod
    def from_arriving(cls, arriving: Tensor, work_on: WorkOn, device: torch.device) -> "_ExpertOrder":
        by_expert, by_rank = orders(arriving, device)
        counts = arriving.sum(0).tolist()
        work, filling = work_on(counts), None
        if work.counts != counts:
            slot, filling = slots(counts, work.counts, device), padding_slots(counts, work.counts, device)
            by_expert = by_expert.new_zeros(sum(work.counts)).index_copy_(0, slot, by_expert)
            by_rank = slot[by_rank]
        return cls(by_expert, by_rank, filling, work)

    def lay_out(self, rows: Tensor) -> Tensor:
        """Rows in expert order, with zeros for padding."""
        laid_out = rows.index_select(0, self.by_expert)
        return laid_out if self.filling is None else laid_out.index_fill_(0, self.filling, 0)

    def arrange(self, rows: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Rows and scale in expert order, both zero for padding, which affects neither outputs nor gradients."""
        laid_out = scale.new_zeros(self.by_expert.shape[0])
        return self.lay_out(rows), laid_out.index_copy_(0, self.by_rank, scale)

    def bring_back(self, rows: Tensor) -> Tensor:
        return rows.index_select(0, self.by_rank)


_KEPT_A_CHUNK = 7
"""Rows, their scale, up and gate products, both permutations, padding."""


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        scale: Tensor,
        exchange: ExpertExchange,
        settings: ExpertSettings,
        *tensors: Tensor | None,
    ) -> Tensor:
        weights, over = ExpertWeights.from_tensors(tensors, settings).narrow(rows.dtype), exchange.over
        forward_tensors: list[Tensor | None] = []
        works: list[Work] = []
        returning: list[OnTheWay] = []
        back: list[Tensor] = []
        first = exchange.first
        exchange = replace(exchange, first=None)  # so that the autograd context holds no rows
        for chunk, on_way in _ahead(exchange.chunks, lambda chunk: _send(over, chunk, rows, scale), first):
            order = _ExpertOrder.from_arriving(chunk.arriving, exchange.work_on, rows.device)
            x, weight = order.arrange(*_unpack(on_way.wait(), scale.dtype))
            y, products = forward_pass(x, weight, weights, order.work)
            if returning:
                back.append(returning.pop().wait())
            returning.append(over.start(order.bring_back(y), chunk.received, chunk.sent))
            if exchange.keep:
                forward_tensors += [x, weight, *products, order.by_expert, order.by_rank, order.filling]
                works.append(order.work)
            del x, y, products  # freed before the next chunk
        back.append(returning.pop().wait())
        ctx.save_for_backward(*weights.tensors, *(forward_tensors if exchange.keep else (rows, scale)))
        ctx.settings, ctx.works, ctx.num_weights = (exchange, settings), works, len(tensors)
        ctx.parameters, ctx.scale_dtype = tensors, scale.dtype
        return _concatenate(back)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        exchange, settings = ctx.settings
        over, d_out = exchange.over, gradients[0].contiguous()
        saved_tensors = ctx.saved_tensors  # once: under recomputation they can be read only once
        tensors, forward_tensors = saved_tensors[: ctx.num_weights], saved_tensors[ctx.num_weights :]
        weights = ExpertWeights.from_tensors(tensors, settings)
        weight_gradients = WeightGradients(ctx.parameters, of_several=len(exchange.chunks) > 1)
        returning: list[OnTheWay] = []
        back: list[Tensor] = []

        def send(chunk: Chunk) -> tuple[OnTheWay, OnTheWay | None]:
            resent = None if exchange.keep else _send(over, chunk, *forward_tensors)
            return over.start(d_out[chunk.here], chunk.sent, chunk.received), resent

        for number, (chunk, (gradient_on_way, resent)) in enumerate(_ahead(exchange.chunks, send)):
            if resent is None:
                of_chunk = forward_tensors[_KEPT_A_CHUNK * number : _KEPT_A_CHUNK * (number + 1)]
                x, weight, up, gate, by_expert, by_rank, filling = of_chunk
                order = _ExpertOrder(by_expert, by_rank, filling, ctx.works[number])
            else:
                order = _ExpertOrder.from_arriving(chunk.arriving, exchange.work_on, d_out.device)
                (x, weight), up, gate = order.arrange(*_unpack(resent.wait(), ctx.scale_dtype)), None, None
            d_y = order.lay_out(gradient_on_way.wait())
            d_x, d_weight = backward_pass(d_y, x, weight, weights, (up, gate), order.work, weight_gradients)
            if returning:
                back.append(returning.pop().wait())
            home = _pack(order.bring_back(d_x), order.bring_back(d_weight))
            returning.append(over.start(home, chunk.received, chunk.sent))
            del x, up, gate, d_y, d_x, d_weight, home  # freed before the next chunk
        back.append(returning.pop().wait())
        d_rows, d_scale = _unpack(_concatenate(back), ctx.scale_dtype)
        return d_rows, d_scale, None, None, *weight_gradients.give()


Begun = TypeVar("Begun")


def _ahead(
    chunks: list[Chunk], begin: Callable[[Chunk], Begun], first: Begun | None = None
) -> Iterator[tuple[Chunk, Begun]]:
    """Yield each chunk with the result of `begin`, called one chunk ahead. `first`: that result for the first chunk, if
    it exists already."""
    pending = begin(chunks[0]) if first is None else first
    for chunk, following in zip(chunks, [*chunks[1:], None], strict=True):
        current = pending
        if following is not None:
            pending = begin(following)
        yield chunk, current


def _send(over: RowExchange, chunk: Chunk, rows: Tensor, scale: Tensor) -> OnTheWay:
    return over.start(_pack(rows[chunk.here], scale[chunk.here]), chunk.sent, chunk.received)


def _pack(rows: Tensor, scale: Tensor) -> Tensor:
    """`[n, M + 1 or 2]`: rows with the bits of their scale appended, for a single exchange."""
    return torch.cat((rows, scale[:, None].view(rows.dtype)), 1)


def _unpack(packed_rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows `[n, M]` and their scale `[n]` in `dtype`, from `_pack`."""
    width = packed_rows.shape[1] - dtype.itemsize // packed_rows.dtype.itemsize
    # Always a copy: viewing as a wider dtype requires alignment.
    scale = packed_rows[:, width:].clone(memory_format=torch.contiguous_format)
    return packed_rows[:, :width], scale.view(dtype).squeeze(1)


def _concatenate(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def orders(arriving: Tensor, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """int64 `[n]` on `device`: permutation of rows from (rank, expert) to (expert, rank) order, and its inverse.

    `arriving` int64 `[ranks, local experts]`, on the CPU: rows per pair.
    """
    num_ranks, num_experts = arriving.shape
    num_rows = int(arriving.sum())  # avoids a device synchronization
    expert_of_block = torch.arange(num_experts, device=device).repeat(num_ranks)
    counts = accelerator(device).take(arriving.reshape(-1))
    expert = expert_of_block.repeat_interleave(counts, output_size=num_rows)
    by_expert = expert.argsort(stable=True)
    by_rank = torch.empty_like(by_expert)
    by_rank[by_expert] = torch.arange(num_rows, device=device)
    return by_expert, by_rank
