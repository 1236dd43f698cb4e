"""Dispatch of tokens to their experts, and combination of the experts' outputs: on one rank, or by all-to-all.

A dispatcher gathers the tokens into rows, one per kept choice, in the order that the experts want. The layer runs its
experts on them. The combiner of the dispatch then sums the outputs by token.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from moe.dispatch.exchange import Chunk, ExpertExchange
from moe.dispatch.fused import chunk_computation, fused_computation
from moe.dispatch.row_exchange import RowExchange, Traffic
from moe.experts import ExpertComputation, LocalExperts
from moe.experts.products import padded_slots, padding_slots
from moe.parallel.accelerator import accelerator
from moe.routing import Assignments, Choices


class Combiner(ABC):
    """Return of the experts' outputs for one call's rows to their tokens."""

    @abstractmethod
    def combine(self, outputs: Tensor) -> Tensor:
        """Return each token's sum `[T, M]` of its rows' `outputs` `[n, M]`; zero for a token without rows."""


class DispatchedRows(NamedTuple):
    """Rows for the experts: `x` `[n, M]`, their weights `[n]`, the computation to run on them, and the combiner of its
    outputs. For a computation that gathers and sums rows itself, tokens `[T, M]` and weights `[T, K]`."""

    x: Tensor
    weight: Tensor
    computation: ExpertComputation
    combiner: Combiner


class PendingCounts:
    """Counts on their way to the host, in one copy."""

    def __init__(self, *tensors: Tensor, device_tensors: tuple[Tensor, ...] = ()) -> None:
        """Begin to copy int64 tensors, at least one."""
        self.device_tensors = device_tensors
        """Tensors from which they were computed, which stay on the device."""
        self._shapes = [tensor.shape for tensor in tensors]
        parts = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self._copy_on_host = accelerator(parts.device).begin_copy_to_host(parts)

    def wait(self) -> list[Tensor]:
        """The tensors on the host."""
        parts = self._copy_on_host().split([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]


class Dispatcher(ABC):
    """Dispatches tokens to experts."""

    def begin(self, choices: Choices) -> bool:
        """Begin the exchange of counts of the next call, which is for `choices`, if the host of a GPU would have to
        wait for it in that call. If so, return True: work that is launched before the call runs meanwhile."""
        return False

    @abstractmethod
    def __call__(self, x: Tensor, choices: Choices, experts: LocalExperts) -> DispatchedRows:
        """Gather tokens `x` `[T, M]` into rows, one per kept choice. Differentiable in `x` and the weights of
        `choices`."""

    def take_traffic(self) -> Traffic:
        """Return and reset the traffic with other ranks."""
        return Traffic()


@dataclass(frozen=True)
class DirectCombiner(Combiner):
    """Combiner of rows in the order of `assignments`."""

    assignments: Assignments

    def combine(self, outputs: Tensor) -> Tensor:
        return rows_to_tokens(outputs, self.assignments)


class CountingDispatcher(Dispatcher):
    """Dispatcher whose host needs counts to lay out rows: the only synchronization of a dispatch."""

    _begun: tuple[Choices, PendingCounts] | None = None

    def begin(self, choices: Choices) -> bool:
        if not accelerator(choices.load.device).runs_ahead:
            return False
        self._begun = choices, self.begin_counts(choices)
        return True

    def take_counts(self, choices: Choices) -> PendingCounts:
        """Counts of `choices`, whose exchange may have begun."""
        begun, self._begun = self._begun, None
        return begun[1] if begun is not None and begun[0] is choices else self.begin_counts(choices)

    @abstractmethod
    def begin_counts(self, choices: Choices) -> PendingCounts:
        """Exchange counts of `choices` with other ranks, and begin to copy those that the host needs."""


class DirectDispatcher(CountingDispatcher):
    """Dispatcher that sends rows directly to the ranks of their experts."""

    def __call__(self, x: Tensor, choices: Choices, experts: LocalExperts) -> DispatchedRows:
        host_counts, counts = self.take_counts(choices).wait()
        return self.gather_rows(x, choices.to_rows(host_counts.tolist()), counts, experts)

    def begin_counts(self, choices: Choices) -> PendingCounts:
        return PendingCounts(choices.device_counts, self.counts(choices.load))

    @abstractmethod
    def counts(self, load: Tensor) -> Tensor:
        """int64, of any shape: counts the host needs, given `load` `[E]`, the rows leaving for each expert."""

    @abstractmethod
    def gather_rows(self, x: Tensor, assignments: Assignments, counts: Tensor, experts: LocalExperts) -> DispatchedRows:
        """Gather tokens `x` `[T, M]` into rows in the order of `assignments`, padded or copied as the experts want.
        `counts` is the result of the method of that name, on the host."""


class TokenSums(Combiner):
    """Combiner of outputs that are sums by token already."""

    def combine(self, outputs: Tensor) -> Tensor:
        return outputs


class LocalDispatcher(DirectDispatcher):
    """Dispatcher of a rank that has every expert. Sorts rows by expert; on GPUs, kernels gather rows as they
    multiply."""

    def __call__(self, x: Tensor, choices: Choices, experts: LocalExperts) -> DispatchedRows:
        fused = fused_computation(x, choices, experts)
        if fused is None:
            return super().__call__(x, choices, experts)
        by_token, computation = fused
        return DispatchedRows(x, by_token.weight, computation, TokenSums())

    def begin(self, choices: Choices) -> bool:
        return False  # it exchanges nothing, and kernels need no counts

    def counts(self, load: Tensor) -> Tensor:
        return load[:0]

    def gather_rows(self, x: Tensor, assignments: Assignments, counts: Tensor, experts: LocalExperts) -> DispatchedRows:
        computation = experts.local_computation(assignments.counts)
        assignments = pad_assignments(assignments, assignments.counts, computation.counts)
        rows = tokens_to_rows(x, assignments)
        return DispatchedRows(rows, assignments.weight, computation, DirectCombiner(assignments))


class AllToAllDispatcher(DirectDispatcher):
    """Expert-parallel dispatch: rows and their weights go to the ranks of their experts, are sorted by expert there,
    and return as weighted outputs. Rows are neither padded in transit nor dropped.

    Ranks are numbered by expert, then by part: with `parts_per_expert` above 1, a row goes to every part of its expert,
    and their outputs are summed.

    Exchange in `num_chunks` chunks overlaps communication and computation. If a rank would receive more than `max_rows`
    rows per chunk, all ranks use more chunks, and exchange rows again in the backward pass instead of saving them. A
    rank then holds at most two chunks of received rows and two of outputs, each of `max_rows` rows, or of one row per
    (rank, local expert) pair if that is more.
    """

    def __init__(
        self, transport: RowExchange, *, parts_per_expert: int = 1, num_chunks: int = 1, max_rows: int | None = None
    ) -> None:
        self.transport, self.parts_per_expert = transport, parts_per_expert
        self.num_chunks, self.max_rows = num_chunks, max_rows

    def counts(self, load: Tensor) -> Tensor:
        """`[ranks, local experts]`: rows arriving from each rank; with `max_rows`, `[ranks, ranks, local experts]`:
        rows between all ranks, from which all compute the same number of chunks."""
        leaving = self._by_rank(load)
        if self.max_rows is None:
            return self.transport.exchange_counts(leaving)
        return self.transport.gather_counts(leaving)

    def gather_rows(self, x: Tensor, assignments: Assignments, counts: Tensor, experts: LocalExperts) -> DispatchedRows:
        # Ranks hold consecutive experts, so rows sorted by expert are sorted by rank.
        leaving = self._by_rank(torch.tensor(assignments.counts))
        num_chunks, saves_rows, arriving = self.num_chunks, True, counts
        if self.max_rows is not None:
            min_num_chunks = min_chunks(counts.transpose(0, 1), self.max_rows)
            num_chunks, saves_rows = max(min_num_chunks, num_chunks), min_num_chunks <= num_chunks
            arriving = counts[:, self.transport.rank]
        chunks = _chunks(leaving, arriving, num_chunks)
        if num_chunks > 1 or self.parts_per_expert > 1:
            assignments = _order_by_chunk(assignments, num_chunks, leaving.shape[1], self.parts_per_expert)
        exchange = ExpertExchange(self.transport, chunks, saves_rows, chunk_computation(x, experts))
        rows = tokens_to_rows(x, assignments)
        return DispatchedRows(rows, assignments.weight, exchange, DirectCombiner(assignments))

    def _by_rank(self, counts: Tensor) -> Tensor:
        """`[ranks, local experts]`: rows to send to each rank for each expert, from `counts` `[E]`."""
        by_expert = counts.view(self.transport.num_ranks // self.parts_per_expert, -1)
        return by_expert[:, None].expand(-1, self.parts_per_expert, -1).flatten(0, 1)

    def take_traffic(self) -> Traffic:
        return self.transport.take_traffic()


def min_chunks(arriving: Tensor, max_rows: int) -> int:
    """Fewest chunks of at most `max_rows` rows per rank, or of one row per nonempty pair if that is more. `arriving`
    `[..., ranks, experts]`: rows of each (rank, expert) pair, for one rank or for all."""
    pairs = arriving.flatten(-2)
    limit = (pairs > 0).sum(-1).clamp(min=max_rows)
    low, high = 1, max(1, int(pairs.max()))
    while low < high:
        half = (low + high) // 2
        if bool(((-(-pairs // half)).sum(-1) <= limit).all()):
            high = half
        else:
            low = half + 1
    return low


def _chunks(leaving: Tensor, arriving: Tensor, num_chunks: int) -> list[Chunk]:
    """Cut the rows of each (rank, expert) pair into chunks, alike on both sides."""
    chunks, first = [], 0
    for number in range(num_chunks):
        send_counts = _part(leaving, number, num_chunks).sum(1).tolist()
        chunks.append(Chunk(first, send_counts, _part(arriving, number, num_chunks)))
        first += sum(send_counts)
    return chunks


def _part(counts: Tensor, number: int, num_chunks: int) -> Tensor:
    return counts * (number + 1) // num_chunks - counts * number // num_chunks


def _order_by_chunk(
    assignments: Assignments, num_chunks: int, experts_per_rank: int, parts_per_expert: int
) -> Assignments:
    """Rows in send order: by chunk, rank and expert, with a copy for each part of the expert."""
    load, expert = assignments.load, assignments.expert
    place = torch.arange(expert.numel(), device=expert.device) - (load.cumsum(0) - load)[expert]
    # The chunk into which `_part` puts a position: the first that ends after it.
    chunk = ((place + 1) * num_chunks - 1) // load[expert].clamp(min=1)
    part = torch.arange(parts_per_expert, device=expert.device)
    rank = (expert // experts_per_rank)[:, None] * parts_per_expert + part
    key = chunk[:, None] * (load.numel() * parts_per_expert) + rank
    order = key.reshape(-1).argsort(stable=True)
    place_of_copy = torch.empty_like(order).index_copy_(0, order, torch.arange(order.numel(), device=order.device))
    copies = place_of_copy.view(-1, parts_per_expert)
    row = torch.arange(expert.numel(), device=expert.device)
    original = order // parts_per_expert
    copies_by_row = replace(
        assignments, token=original, rows_by_token=copies.reshape(-1), first_by_token=row * parts_per_expert
    )
    return replace(
        assignments,
        token=assignments.token[original],
        expert=expert[original],
        position=assignments.position[original],
        weight=tokens_to_rows(assignments.weight[:, None], copies_by_row).squeeze(1),
        rows_by_token=copies[assignments.rows_by_token].reshape(-1),
        first_by_token=assignments.first_by_token * parts_per_expert,
    )


FEW_ROWS = 64
"""Number of rows up to which sorting on the host is faster than a dozen tensor operations."""


def dispatch_small(x: Tensor, expert: Tensor, weight: Tensor, experts: LocalExperts) -> Tensor | None:
    """Dispatch, experts and combine for few tokens without gradients, decoded one at a time.

    Returns `[T, M]`: the sum of each token's K expert outputs, in order of preference, times `weight` `[T, K]`; None
    if the experts need padding rows. `x` `[T, M]` and `expert` int64 `[T, K]` are on the CPU, and all experts are
    local.
    """
    num_choices, per_token = expert.numel(), expert.shape[1]
    if num_choices == 0:
        return torch.zeros_like(x)
    expert_of_choice: list[int] = expert.reshape(-1).tolist()
    counts = [0] * experts.weights.w_in.shape[0]
    for expert_index in expert_of_choice:
        counts[expert_index] += 1
    computation = experts.local_computation(counts)
    if computation.counts != counts:
        return None
    order = torch.tensor(sorted(range(num_choices), key=expert_of_choice.__getitem__))
    outputs = experts(x[order // per_token], weight.reshape(-1)[order], computation)
    return torch.empty_like(outputs).index_copy_(0, order, outputs).unflatten(0, (-1, per_token)).sum(1)


def tokens_to_rows(x: Tensor, assignments: Assignments) -> Tensor:
    """Gather tokens `x` `[T, M]` into rows `[n, M]`, one per kept choice, in the order of `assignments`."""
    return _TokensToRows.apply(x, assignments)


def rows_to_tokens(rows: Tensor, assignments: Assignments) -> Tensor:
    """Sum rows `[n, M]`, in the order of `assignments`, into tokens `[T, M]`."""
    return _RowsToTokens.apply(rows, assignments)


class _TokensToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, assignments: Assignments) -> Tensor:
        ctx.save_for_backward(assignments.rows_by_token, assignments.first_by_token)
        return _rows_of_tokens(x, assignments.token, assignments.padding_rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _sums_by_token(gradients[0], *ctx.saved_tensors), None


class _RowsToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, assignments: Assignments) -> Tensor:
        ctx.save_for_backward(assignments.token, assignments.padding_rows)
        return _sums_by_token(rows, assignments.rows_by_token, assignments.first_by_token)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _rows_of_tokens(gradients[0], *ctx.saved_tensors), None


def _rows_of_tokens(x: Tensor, token: Tensor, padding_rows: Tensor | None) -> Tensor:
    """`[n, M]`: each row's token. Padding rows are set to zero: scaling by zero would keep NaN and inf."""
    rows = x.index_select(0, token)
    return rows if padding_rows is None else rows.index_fill_(0, padding_rows, 0)


def _sums_by_token(rows: Tensor, rows_by_token: Tensor, first_by_token: Tensor) -> Tensor:
    """`[T, M]`: sum of each token's rows in order; zero for a token without rows."""
    if not rows.numel():
        return rows.new_zeros(first_by_token.shape[0], rows.shape[1])
    return functional.embedding_bag(rows_by_token, rows.contiguous(), first_by_token, mode="sum")


def pad_assignments(assignments: Assignments, counts: list[int], padded_counts: list[int]) -> Assignments:
    """Return `assignments` with each expert's rows padded from `counts[e]` to `padded_counts[e]`. Padding rows have
    weight zero, and affect neither outputs nor gradients; `expert` and `position` list only the kept choices."""
    if padded_counts == counts:
        return assignments
    slot = padded_slots(counts, padded_counts, assignments.token.device)
    zeros = assignments.token.new_zeros(sum(padded_counts))
    return replace(
        assignments,
        token=zeros.index_copy(0, slot, assignments.token),
        weight=assignments.weight.new_zeros(sum(padded_counts)).index_copy(0, slot, assignments.weight),
        rows_by_token=slot[assignments.rows_by_token],
        padding_rows=padding_slots(counts, padded_counts, assignments.token.device),
    )
