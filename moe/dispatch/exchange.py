"""Exchange of rows with the ranks of their experts, overlapped with the computation of experts.

While the experts compute one chunk of rows, the next is arriving and the previous outputs are returning, in both
passes. A rank holds at most two chunks of received rows and two of outputs. Received rows that are not saved are
exchanged again in the backward pass.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from moe.dispatch.row_exchange import PendingRows, RowExchange
from moe.experts import ExpertComputation, ExpertWeights, LocalComputation
from moe.experts.feed_forward import SavedProducts, backward_pass, forward_pass
from moe.experts.products import padded_slots, padding_slots
from moe.experts.weight_gradients import WeightGradients
from moe.experts.weights import ExpertSettings
from moe.parallel.accelerator import accelerator


@dataclass(frozen=True)
class Chunk:
    """Rows exchanged together."""

    first: int
    """Index of the first row among the rows of the sending rank."""
    send_counts: list[int]
    """Rows sent to each rank, in rank order."""
    arriving: Tensor
    """int64 `[ranks, local experts]`, on the CPU: rows arriving from each rank for each expert."""

    @property
    def send_slice(self) -> slice:
        return slice(self.first, self.first + sum(self.send_counts))

    @property
    def receive_counts(self) -> list[int]:
        return self.arriving.sum(1).tolist()


class ChunkComputation(ABC):
    """Computation of one received chunk by this rank's experts. Rows arrive, and outputs leave, sorted by source rank,
    then expert."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The `NUM_INDEX_TENSORS` index tensors that define the row order, saved for the backward pass."""

    @property
    @abstractmethod
    def restore(self) -> "Callable[[Sequence[Tensor | None]], ChunkComputation]":
        """Function that rebuilds this computation from its saved `tensors`; holds no tensor itself."""

    @abstractmethod
    def arrange(self, rows: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return (`x`, `weight`), the inputs of both passes, from received rows `[n, M]` and their scale `[n]`."""

    @abstractmethod
    def forward_pass(
        self, x: Tensor, weight: Tensor, weights: ExpertWeights, *, saves: bool
    ) -> tuple[Tensor, SavedProducts]:
        """Return (outputs `[n, M]` of the received rows, products for `backward_pass`, which may be None unless it
        `saves` them)."""

    @abstractmethod
    def backward_pass(
        self,
        d_out: Tensor,
        x: Tensor,
        weight: Tensor,
        weights: ExpertWeights,
        products: SavedProducts,
        gradients: WeightGradients,
    ) -> tuple[Tensor, Tensor]:
        """Return (gradient of the received rows `[n, M]`, gradient of their scale `[n]`), given the gradient `d_out`
        `[n, M]` of the outputs. Weight gradients are added to `gradients`."""


NUM_INDEX_TENSORS = 4
ChunkComputationChoice = Callable[[Tensor, torch.device], ChunkComputation]
"""Builds the computation of a chunk from int64 `[ranks, local experts]`, the rows that arrive, and their device."""


@dataclass(frozen=True)
class ExpertExchange(ExpertComputation):
    """Computation by the experts of all ranks, of rows sorted by chunk, then expert."""

    transport: RowExchange
    chunks: list[Chunk]
    saves_rows: bool
    """Save arrived rows for the backward pass."""
    choose_computation: ChunkComputationChoice
    first: PendingRows | None = None
    """Rows of the first chunk, if already sent."""

    def send_first_chunk(self, rows: Tensor, scale: Tensor) -> "ExpertExchange":
        """Send the first chunk's rows. The returned exchange must be run with the same arguments."""
        return replace(self, first=_send(self.transport, self.chunks[0], rows.detach(), scale.detach()))

    def run(self, rows: Tensor, scale: Tensor, weights: ExpertWeights) -> Tensor:
        return _ExchangeRows.apply(rows, scale, self, weights.settings, *weights.tensors)


@dataclass(frozen=True)
class SortedChunk(ChunkComputation):
    """Computation that sorts received rows by expert, with padding, and puts outputs back in rank order."""

    by_expert: Tensor
    """int64 `[padded]`: arrived row at each place; arbitrary for padding."""
    by_rank: Tensor
    """int64 `[arrived]`: place of each arrived row."""
    padding: Tensor | None
    """int64: places of padding rows; None without padding."""
    computation: LocalComputation

    @classmethod
    def from_arriving(
        cls, choose_computation: Callable[[list[int]], LocalComputation], arriving: Tensor, device: torch.device
    ) -> "SortedChunk":
        """`choose_computation` maps rows per expert to a computation, whose counts include padding."""
        by_expert, by_rank = expert_and_rank_order(arriving, device)
        counts = arriving.sum(0).tolist()
        computation, padding = choose_computation(counts), None
        if computation.counts != counts:
            slot, padding = (
                padded_slots(counts, computation.counts, device),
                padding_slots(counts, computation.counts, device),
            )
            by_expert = by_expert.new_zeros(sum(computation.counts)).index_copy_(0, slot, by_expert)
            by_rank = slot[by_rank]
        return cls(by_expert, by_rank, padding, computation)

    def to_expert_order(self, rows: Tensor) -> Tensor:
        """Rows in expert order, with zeros for padding."""
        sorted_rows = rows.index_select(0, self.by_expert)
        return sorted_rows if self.padding is None else sorted_rows.index_fill_(0, self.padding, 0)

    def arrange(self, rows: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Rows and scale in expert order, both zero for padding, which affects neither outputs nor gradients."""
        sorted_scale = scale.new_zeros(self.by_expert.shape[0])
        return self.to_expert_order(rows), sorted_scale.index_copy_(0, self.by_rank, scale)

    def to_rank_order(self, rows: Tensor) -> Tensor:
        return rows.index_select(0, self.by_rank)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.by_expert, self.by_rank, self.padding, None

    @property
    def restore(self) -> Callable[[Sequence[Tensor | None]], ChunkComputation]:
        return partial(_restore_sorted, self.computation)

    def forward_pass(
        self, x: Tensor, weight: Tensor, weights: ExpertWeights, *, saves: bool
    ) -> tuple[Tensor, SavedProducts]:
        outputs, products = forward_pass(x, weight, weights, self.computation)
        return self.to_rank_order(outputs), products

    def backward_pass(
        self,
        d_out: Tensor,
        x: Tensor,
        weight: Tensor,
        weights: ExpertWeights,
        products: SavedProducts,
        gradients: WeightGradients,
    ) -> tuple[Tensor, Tensor]:
        d_outputs = self.to_expert_order(d_out)
        d_x, d_weight = backward_pass(d_outputs, x, weight, weights, products, self.computation, gradients)
        return self.to_rank_order(d_x), self.to_rank_order(d_weight)


def _restore_sorted(computation: LocalComputation, tensors: Sequence[Tensor | None]) -> SortedChunk:
    by_expert, by_rank, padding, _ = tensors
    assert by_expert is not None
    assert by_rank is not None
    return SortedChunk(by_expert, by_rank, padding, computation)


_SAVED_PER_CHUNK = 4 + NUM_INDEX_TENSORS
"""Rows, their scale, up and gate products, and the order of rows."""


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
        weights, transport = (ExpertWeights.from_tensors(tensors, settings).narrow(rows.dtype), exchange.transport)
        forward_tensors: list[Tensor | None] = []
        restorations: list[Callable[[Sequence[Tensor | None]], ChunkComputation]] = []
        returning: list[PendingRows] = []
        outputs: list[Tensor] = []
        first, saves = exchange.first, exchange.saves_rows and any(ctx.needs_input_grad)
        exchange = replace(exchange, first=None)  # so that the autograd context holds no rows
        for chunk, pending in _prefetch(exchange.chunks, lambda chunk: _send(transport, chunk, rows, scale), first):
            computation = exchange.choose_computation(chunk.arriving, rows.device)
            x, weight = computation.arrange(*_unpack(pending.wait(), scale.dtype))
            y, products = computation.forward_pass(x, weight, weights, saves=saves)
            if returning:
                outputs.append(returning.pop().wait())
            returning.append(transport.start(y, chunk.receive_counts, chunk.send_counts))
            if saves:
                forward_tensors += [x, weight, *products, *computation.tensors]
                restorations.append(computation.restore)
            del x, y, products  # freed before the next chunk
        outputs.append(returning.pop().wait())
        ctx.save_for_backward(*weights.tensors, *(forward_tensors if exchange.saves_rows else (rows, scale)))
        ctx.settings, ctx.restorations, ctx.num_weights = (exchange, settings), restorations, len(tensors)
        ctx.parameters, ctx.scale_dtype = tensors, scale.dtype
        return _concatenate(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        exchange, settings = ctx.settings
        transport, d_out = exchange.transport, gradients[0].contiguous()
        saved_tensors = ctx.saved_tensors  # once: under recomputation they can be read only once
        tensors, forward_tensors = saved_tensors[: ctx.num_weights], saved_tensors[ctx.num_weights :]
        weights = ExpertWeights.from_tensors(tensors, settings)
        weight_gradients = WeightGradients(ctx.parameters, sums_chunks=len(exchange.chunks) > 1)
        returning: list[PendingRows] = []
        row_gradients: list[Tensor] = []

        def send(chunk: Chunk) -> tuple[PendingRows, PendingRows | None]:
            resent = None if exchange.saves_rows else _send(transport, chunk, *forward_tensors)
            return transport.start(d_out[chunk.send_slice], chunk.send_counts, chunk.receive_counts), resent

        for number, (chunk, (pending_gradient, resent)) in enumerate(_prefetch(exchange.chunks, send)):
            if resent is None:
                chunk_tensors = forward_tensors[_SAVED_PER_CHUNK * number : _SAVED_PER_CHUNK * (number + 1)]
                x, weight, up, gate, *index_tensors = chunk_tensors
                computation = ctx.restorations[number](index_tensors)
            else:
                computation = exchange.choose_computation(chunk.arriving, d_out.device)
                (x, weight), up, gate = computation.arrange(*_unpack(resent.wait(), ctx.scale_dtype)), None, None
            d_y = pending_gradient.wait()
            d_x, d_weight = computation.backward_pass(d_y, x, weight, weights, (up, gate), weight_gradients)
            if returning:
                row_gradients.append(returning.pop().wait())
            packed_gradients = _pack(d_x, d_weight)
            returning.append(transport.start(packed_gradients, chunk.receive_counts, chunk.send_counts))
            del x, up, gate, d_y, d_x, d_weight, packed_gradients  # freed before the next chunk
        row_gradients.append(returning.pop().wait())
        d_rows, d_scale = _unpack(_concatenate(row_gradients), ctx.scale_dtype)
        return d_rows, d_scale, None, None, *weight_gradients.to_autograd()


Handle = TypeVar("Handle")


def _prefetch(
    chunks: list[Chunk], begin: Callable[[Chunk], Handle], first: Handle | None = None
) -> Iterator[tuple[Chunk, Handle]]:
    """Yield each chunk with the result of `begin`, called one chunk ahead. `first`: that result for the first chunk, if
    it exists already."""
    pending = begin(chunks[0]) if first is None else first
    for chunk, following in zip(chunks, [*chunks[1:], None], strict=True):
        current = pending
        if following is not None:
            pending = begin(following)
        yield chunk, current


def _send(transport: RowExchange, chunk: Chunk, rows: Tensor, scale: Tensor) -> PendingRows:
    return transport.start(
        _pack(rows[chunk.send_slice], scale[chunk.send_slice]), chunk.send_counts, chunk.receive_counts
    )


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


def expert_and_rank_order(arriving: Tensor, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """int64 `[n]` on `device`: permutation of rows from (rank, expert) to (expert, rank) order, and its inverse.

    `arriving` int64 `[ranks, local experts]`, on the CPU: rows per pair.
    """
    by_expert = expert_of_arriving(arriving, device).argsort(stable=True)
    by_rank = torch.empty_like(by_expert)
    by_rank[by_expert] = torch.arange(by_expert.numel(), device=device)
    return by_expert, by_rank


def expert_of_arriving(arriving: Tensor, device: torch.device | str = "cpu") -> Tensor:
    """int64 `[n]` on `device`: local expert of each arrived row. `arriving` is that of `expert_and_rank_order`."""
    num_ranks, num_experts = arriving.shape
    num_rows = int(arriving.sum())  # avoids a device synchronization
    expert_of_block = torch.arange(num_experts, device=device).repeat(num_ranks)
    return expert_of_block.repeat_interleave(accelerator(device).take(arriving.reshape(-1)), output_size=num_rows)
