"""Attention over the context ranks of a sequence, by a ring with online softmax (Ring Attention, arXiv 2310.01889).

In step s of a ring of c ranks, rank i attends to the keys and values of rank i - s while those of the next step are on
their way. The backward pass receives them again, and returns their gradients. Two things differ from the paper:

- Keys and values come from their own rank, rather than through those between. A rank receives only the chunks that its
  queries see: under a causal mask three quarters of what a ring passes on, in a sliding window those of its neighbours.
  Gradients return in one hop, and are summed in full precision where the keys are.
- Chunks are balanced for causal masks (zigzag order, as in arXiv 2311.09431, figure 2).

torch's `torch.distributed.tensor.experimental.context_parallel` does not carry this: its ring has no documents,
windows, sinks, chunks of unequal length or CPUs, and is private API.

Shapes: B rows, n query heads, m key and value heads (n a multiple of m), N positions of this rank, of L in all, d and
dv head widths.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe.layers.attention_mask import AttentionMask
from moe.layers.block_attention import BlockKernel, kernel_for
from moe.layers.mask_blocks import Block, MaskBlocks, segments_of
from moe.layers.online_softmax import OnlineSoftmax, QueryGradients, sinks_gradient
from moe.parallel.collective import collective
from moe.parallel.context import ContextShard
from moe.parallel.zigzag import ZigzagChunks


def ring_attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    context: ContextShard,
    scale: float,
    attention_mask: AttentionMask,
    sinks: Tensor | None = None,
) -> Tensor:
    """`moe.layers.softmax_attention.attend` over context ranks, `[B, n, N, dv]`.

    `queries` `[B, n, N, d]`, `keys` `[B, m, N, d]` and `values` `[B, m, N, dv]` are those of this rank's positions;
    `attention_mask` is that of whole rows. The gradient of `sinks` `[n]` is that of this rank's queries. Collective.
    Raises CollectiveError if an exchange fails.
    """
    mask = MaskBlocks.of(attention_mask, context.num_positions, queries.device)
    kernel = kernel_for(queries, mask, scale)
    steps = attention_mask.get_or_make(
        MaskBlocks.key(attention_mask, "ring", context.chunks, kernel.needs_tiles),
        lambda: plan_steps(mask, context.chunks, context.group.rank(), in_tiles=kernel.needs_tiles),
    )
    outputs: Tensor = _RingAttention.apply(queries, keys, values, sinks, kernel, steps, _Exchange(context))
    return outputs


def attend_to_gathered(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    context: ContextShard,
    scale: float,
    attention_mask: AttentionMask,
    sinks: Tensor | None = None,
) -> Tensor:
    """`ring_attend` with `keys` `[B, m, L, d]` and `values` `[B, m, L, dv]` of whole rows, as a ring of one step: no
    exchange, and no mask of more than some hundred queries in memory."""
    mask = MaskBlocks.of(attention_mask, context.num_positions, queries.device)
    kernel = kernel_for(queries, mask, scale)

    def plan() -> tuple[RingStep, ...]:
        query_segments = segments_of(context.chunks.rank_chunks(context.group.rank()))
        key_segments = segments_of(map(context.chunks.chunk, range(2 * context.num_ranks)))
        return (RingStep(tuple(mask.blocks(query_segments, key_segments, in_tiles=kernel.needs_tiles))),)

    key = MaskBlocks.key(attention_mask, "gathered", context.chunks, kernel.needs_tiles)
    steps = attention_mask.get_or_make(key, plan)
    outputs: Tensor = _RingAttention.apply(queries, keys, values, sinks, kernel, steps, _Exchange(context))
    return outputs


@dataclass(frozen=True)
class RingStep:
    """Work of one rank in one step."""

    blocks: tuple[Block, ...]
    """Blocks of this rank's queries and the received keys."""
    source: int = 0
    """Rank that sends keys."""
    received: range = range(0)
    """Indices of the received keys among the source's; none in the step of this rank's own keys."""
    destination: int = 0
    """Rank that receives keys of this rank."""
    sent: range = range(0)
    """Indices of the sent keys among this rank's."""


def plan_steps(mask: MaskBlocks, chunks: ZigzagChunks, rank: int, *, in_tiles: bool) -> tuple[RingStep, ...]:
    """Steps of a rank. The first is that of its own keys. Every rank has all steps, even those in which it exchanges
    nothing, so that any two ranks exchange in one order."""
    num_ranks = chunks.num_ranks
    segments = [segments_of(chunks.rank_chunks(peer)) for peer in range(num_ranks)]

    def sent(source: int, receiver: int) -> range:
        """Positions of `source` that queries of `receiver` see, with those between."""
        sees = mask.sees(*([segment.positions for segment in segments[peer]] for peer in (receiver, source)))
        seen = [segments[source][int(index)] for index in np.flatnonzero(sees.any(axis=0))]
        if not seen:
            return range(0)
        first, last = (segment.indices(segment.positions) for segment in (seen[0], seen[-1]))
        return range(first.start, last.stop)

    steps = []
    for shift in range(num_ranks):
        source, destination = (rank - shift) % num_ranks, (rank + shift) % num_ranks
        blocks = mask.blocks(segments[rank], segments[source], in_tiles=in_tiles)
        if shift == 0:
            steps.append(RingStep(tuple(blocks)))
            continue
        received = sent(source, rank)
        blocks = [block.shift_keys(-received.start) for block in blocks]
        steps.append(RingStep(tuple(blocks), source, received, destination, sent(rank, destination)))
    return tuple(steps)


class _RingTransfer:
    """Tensors on their way between ranks."""

    def __init__(self, name: str, works: list[dist.Work], sent: list[Tensor], received: tuple[Tensor, ...]) -> None:
        self._name, self._works, self._sent, self._received = name, works, sent, received

    def wait(self) -> tuple[Tensor, ...]:
        """The received tensors."""
        with collective(self._name):
            for work in self._works:
                work.wait()
        return self._received


@dataclass(frozen=True)
class _Exchange:
    """Exchanges between the ranks of a ring."""

    context: ContextShard

    def receive_keys(
        self, steps: Sequence[RingStep], *tensors: Tensor
    ) -> Iterator[tuple[RingStep, tuple[Tensor, ...]]]:
        """Yield each step with its keys and values, and receive those of the next step meanwhile. `tensors`: this
        rank's keys and values."""
        step_tensors = tensors
        for step, following in zip(steps, (*steps[1:], None), strict=True):
            transfer = None if following is None else self._start_keys(following, tensors)
            yield step, step_tensors
            if transfer is not None:
                step_tensors = transfer.wait()

    def _start_keys(self, step: RingStep, tensors: Sequence[Tensor]) -> _RingTransfer:
        sent = [tensor[:, :, step.sent.start : step.sent.stop] for tensor in tensors]
        return self._start("keys and values", step.destination, sent, step.source, len(step.received))

    def start_gradients(self, step: RingStep, gradients: Sequence[Tensor]) -> _RingTransfer:
        """Return the gradients of a step's keys and values to their rank, and receive those of this rank's."""
        return self._start("gradients of keys and values", step.source, gradients, step.destination, len(step.sent))

    def _start(
        self, noun: str, destination: int, sent: Sequence[Tensor], source: int, num_received: int
    ) -> _RingTransfer:
        """Send tensors `[B, m, K, d]`, and receive as many with `num_received` positions."""
        name = f"ring exchange of {noun}, {self.context.label}"
        received = tuple(tensor.new_empty(*tensor.shape[:2], num_received, tensor.shape[3]) for tensor in sent)
        sent = [tensor.contiguous() for tensor in sent]
        operations = [
            dist.P2POp(function, tensor, group=self.context.group, group_peer=peer)
            for function, peer, tensors in ((dist.isend, destination, sent), (dist.irecv, source, received))
            for tensor in tensors
            if tensor.numel()
        ]
        with collective(name):
            works = dist.batch_isend_irecv(operations) if operations else []
        return _RingTransfer(name, works, sent, received)


class _RingAttention(torch.autograd.Function):
    """Ring attention of one rank, with the gradients of its queries, keys, values and sinks."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        sinks: Tensor | None,
        kernel: BlockKernel,
        steps: tuple[RingStep, ...],
        exchange: _Exchange,
    ) -> Tensor:
        softmax = OnlineSoftmax(queries, values.shape[-1])
        for step, (step_keys, step_values) in exchange.receive_keys(steps, keys, values):
            softmax.add_blocks(kernel, step.blocks, queries, step_keys, step_values)
        outputs, log_sums = softmax.finish(sinks, queries.dtype)
        ctx.save_for_backward(queries, keys, values, sinks, outputs, log_sums)
        ctx.settings = kernel, steps, exchange
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, sinks, outputs, log_sums = ctx.saved_tensors
        kernel, steps, exchange = ctx.settings
        query_gradients = QueryGradients(gradients[0], outputs, log_sums, queries)
        totals = tuple[Tensor, ...]()
        returning: tuple[RingStep, _RingTransfer] | None = None
        for step, tensors in exchange.receive_keys(steps, keys, values):
            parts = query_gradients.add_blocks(kernel, step.blocks, *tensors)
            if not totals:  # of this rank's own keys
                totals = parts
                continue
            if returning is not None:
                _add_returned(totals, *returning)
            returning = step, exchange.start_gradients(step, [part.to(keys.dtype) for part in parts])
        if returning is not None:
            _add_returned(totals, *returning)
        d_keys, d_values = (total.to(keys.dtype) for total in totals)
        d_sinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            d_sinks = sinks_gradient(sinks, gradients[0], outputs, log_sums)
        return query_gradients.finish(), d_keys, d_values, d_sinks, None, None, None


def _add_returned(totals: tuple[Tensor, ...], step: RingStep, transfer: _RingTransfer) -> None:
    """Add the gradients of the keys and values that were sent in a step."""
    for total, gradient in zip(totals, transfer.wait(), strict=True):
        total[:, :, step.sent.start : step.sent.stop] += gradient
