"""Rows to the ranks of their experts and back: exchange and arithmetic take turns.

Rows are exchanged in chunks. While the experts work on one, the next is on its way and what they gave for the one
before is going back, in the backward pass as in the forward one. So a rank has at most two chunks of rows that came
from others, and what its experts gave for two, at a time; where what came is not kept for the backward pass, it is
exchanged once more in it.
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
    """Rows that are exchanged at once."""

    first: int
    """First of them among all rows of the rank that they come from."""
    sent: list[int]
    """Number that goes to each rank, in rank order."""
    arriving: Tensor
    """int64 `[ranks, experts here]`, on the CPU: how many come from each rank for each expert."""

    @property
    def here(self) -> slice:
        return slice(self.first, self.first + sum(self.sent))

    @property
    def received(self) -> list[int]:
        return self.arriving.sum(1).tolist()


WorkOn = Callable[[list[int]], Work]
"""Arithmetic for so many rows of each expert, those that fill up included."""


@dataclass(frozen=True)
class ExpertExchange:
    """The experts of all ranks, for rows that lie chunk by chunk, ordered by expert in each."""

    over: RowExchange
    chunks: list[Chunk]
    keep: bool
    """Whether arrived rows are kept for the backward pass."""
    work_on: WorkOn
    first: OnTheWay | None = None
    """The first chunk's rows, where they were sent before the call."""

    def with_first_sent(self, rows: Tensor, scale: Tensor) -> "ExpertExchange":
        """The same exchange with its first chunk's rows on their way; to be called with the same arguments."""
        return replace(self, first=_send(self.over, self.chunks[0], rows.detach(), scale.detach()))

    def __call__(self, rows: Tensor, scale: Tensor, weights: ExpertWeights) -> Tensor:
        """`[n, M]`: outputs for `rows` `[n, M]`, times `scale` `[n]`; differentiable in both and in `weights`, those of
        this rank's experts."""
        return _ExchangeRows.apply(rows, scale, self, weights.settings, *weights.tensors)


@dataclass(frozen=True)
class _ExpertOrder:
    """Order of a chunk's rows: they arrive by rank, and are laid out by expert with padding."""

    by_expert: Tensor
    """int64 `[padded]`: which arrived row lies there; any, where it fills up."""
    by_rank: Tensor
    """int64 `[arrived]`: where each arrived row lies."""
    filling: Tensor | None
    """int64: the rows that fill up."""
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
        """Rows by expert, zeros where they fill up."""
        laid_out = rows.index_select(0, self.by_expert)
        return laid_out if self.filling is None else laid_out.index_fill_(0, self.filling, 0)

    def arrange(self, rows: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Rows that fill up are zeros and weigh nothing: neither outputs nor gradients know of them."""
        laid_out = scale.new_zeros(self.by_expert.shape[0])
        return self.lay_out(rows), laid_out.index_copy_(0, self.by_rank, scale)

    def bring_back(self, rows: Tensor) -> Tensor:
        return rows.index_select(0, self.by_rank)


_KEPT_A_CHUNK = 7
"""Its rows and their scale, what the first matrices gave, both orders, and what fills up."""


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
        exchange = replace(exchange, first=None)  # so that the context of the backward pass holds no rows
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
            del x, y, products  # the next chunk is worked on without them
        back.append(returning.pop().wait())
        ctx.save_for_backward(*weights.tensors, *(forward_tensors if exchange.keep else (rows, scale)))
        ctx.settings, ctx.works, ctx.num_weights = (exchange, settings), works, len(tensors)
        ctx.parameters, ctx.scale_dtype = tensors, scale.dtype
        return _concatenate(back)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        exchange, settings = ctx.settings
        over, d_out = exchange.over, gradients[0].contiguous()
        saved_tensors = ctx.saved_tensors  # once: recomputation gives them out only once
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
            del x, up, gate, d_y, d_x, d_weight, home  # the next chunk is worked on without them
        back.append(returning.pop().wait())
        d_rows, d_scale = _unpack(_concatenate(back), ctx.scale_dtype)
        return d_rows, d_scale, None, None, *weight_gradients.give()


Begun = TypeVar("Begun")


def _ahead(
    chunks: list[Chunk], begin: Callable[[Chunk], Begun], first: Begun | None = None
) -> Iterator[tuple[Chunk, Begun]]:
    """Each chunk with what was begun for it, while the chunk before it was still being worked on. `first`: what was
    begun for the first chunk, if it was already."""
    pending = begin(chunks[0]) if first is None else first
    for chunk, following in zip(chunks, [*chunks[1:], None], strict=True):
        current = pending
        if following is not None:
            pending = begin(following)
        yield chunk, current


def _send(over: RowExchange, chunk: Chunk, rows: Tensor, scale: Tensor) -> OnTheWay:
    return over.start(_pack(rows[chunk.here], scale[chunk.here]), chunk.sent, chunk.received)


def _pack(rows: Tensor, scale: Tensor) -> Tensor:
    """`[n, M + 1 or 2]`: rows with their scale at the end, bit for bit, so that one exchange takes both."""
    return torch.cat((rows, scale[:, None].view(rows.dtype)), 1)


def _unpack(packed_rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows `[n, M]` and their scale `[n]` in `dtype`, from what `_pack` made."""
    width = packed_rows.shape[1] - dtype.itemsize // packed_rows.dtype.itemsize
    # A copy whatever it looks like: a wider dtype must begin at an even place.
    scale = packed_rows[:, width:].clone(memory_format=torch.contiguous_format)
    return packed_rows[:, :width], scale.view(dtype).squeeze(1)


def _concatenate(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def orders(arriving: Tensor, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """int64 `[n]` on `device`: index of rows that came by (rank, expert) in the order (expert, rank), and its inverse.

    `arriving` int64 `[ranks, experts here]`, on the CPU, counts them.
    """
    num_ranks, num_experts = arriving.shape
    num_rows = int(arriving.sum())  # told to the device, which would have to be asked for it
    expert_of_block = torch.arange(num_experts, device=device).repeat(num_ranks)
    counts = accelerator(device).take(arriving.reshape(-1))
    expert = expert_of_block.repeat_interleave(counts, output_size=num_rows)
    by_expert = expert.argsort(stable=True)
    by_rank = torch.empty_like(by_expert)
    by_rank[by_expert] = torch.arange(num_rows, device=device)
    return by_expert, by_rank
