"""All-to-all dispatch, for experts spread over ranks."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from moe.dispatch.dispatcher import DirectDispatcher, on_host
from moe.dispatch.exchange import Chunk, ExpertExchange
from moe.dispatch.permute import rows_to_tokens, tokens_to_rows
from moe.dispatch.rows import RowExchange, Traffic
from moe.experts import LocalExperts
from moe.routing import Assignments, Choices


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
        self,
        over: RowExchange,
        *,
        parts_per_expert: int = 1,
        num_chunks: int = 1,
        max_rows: int | None = None,
    ) -> None:
        self.over, self.parts_per_expert = over, parts_per_expert
        self.num_chunks, self.max_rows = num_chunks, max_rows

    def counts(self, load: Tensor) -> Tensor:
        """`[ranks, local experts]`: rows arriving from each rank; with `max_rows`, `[ranks, ranks, local experts]`:
        rows between all ranks, from which all compute the same number of chunks."""
        leaving = self._by_rank(load)
        return (
            self.over.exchange_counts(leaving) if self.max_rows is None else self.over.gather_counts(leaving)
        )

    def begin(self, x: Tensor, choices: Choices, experts: LocalExperts) -> Callable[[], Tensor]:
        """Start sending the first chunk. The returned function finishes the dispatch and returns `[T, M]`."""
        host_counts, counts = on_host(choices.device_counts, self.counts(choices.load))
        assignments, exchange = self._exchange(choices.to_rows(host_counts.tolist()), counts, experts)
        rows = tokens_to_rows(x, assignments)
        started_exchange = exchange.with_first_sent(rows, assignments.weight)
        return lambda: rows_to_tokens(experts(rows, assignments.weight, started_exchange), assignments)

    def carry(self, x: Tensor, assignments: Assignments, counts: Tensor, experts: LocalExperts) -> Tensor:
        assignments, exchange = self._exchange(assignments, counts, experts)
        rows = experts(tokens_to_rows(x, assignments), assignments.weight, exchange)
        return rows_to_tokens(rows, assignments)

    def _exchange(
        self, assignments: Assignments, counts: Tensor, experts: LocalExperts
    ) -> tuple[Assignments, ExpertExchange]:
        """(rows in send order, their exchange)."""
        # Ranks hold consecutive experts, so rows sorted by expert are sorted by rank.
        leaving = self._by_rank(torch.tensor(assignments.counts))
        num_chunks, keep, arriving = self.num_chunks, True, counts
        if self.max_rows is not None:
            min_num_chunks = min_chunks(counts.transpose(0, 1), self.max_rows)
            num_chunks, keep = max(min_num_chunks, num_chunks), min_num_chunks <= num_chunks
            arriving = counts[:, self.over.rank]
        chunks = _chunks(leaving, arriving, num_chunks)
        if num_chunks > 1 or self.parts_per_expert > 1:
            assignments = _in_chunks(assignments, num_chunks, leaving.shape[1], self.parts_per_expert)
        return assignments, ExpertExchange(self.over, chunks, keep, experts.work_on)

    def _by_rank(self, counts: Tensor) -> Tensor:
        """`[ranks, local experts]`: rows to send to each rank for each expert, from `counts` `[E]`."""
        by_expert = counts.view(self.over.num_ranks // self.parts_per_expert, -1)
        return by_expert[:, None].expand(-1, self.parts_per_expert, -1).flatten(0, 1)

    def take_traffic(self) -> Traffic:
        return self.over.take_traffic()


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


def _in_chunks(
    assignments: Assignments, num_chunks: int, experts_each: int, parts_per_expert: int
) -> Assignments:
    """Rows in send order: by chunk, rank and expert, with a copy for each part of the expert."""
    load, expert = assignments.load, assignments.expert
    place = torch.arange(expert.numel(), device=expert.device) - (load.cumsum(0) - load)[expert]
    # The chunk into which `_part` puts a position: the first that ends after it.
    chunk = ((place + 1) * num_chunks - 1) // load[expert].clamp(min=1)
    part = torch.arange(parts_per_expert, device=expert.device)
    rank = (expert // experts_each)[:, None] * parts_per_expert + part
    key = chunk[:, None] * (load.numel() * parts_per_expert) + rank
    order = key.reshape(-1).argsort(stable=True)
    place_of_copy = torch.empty_like(order).index_copy_(
        0, order, torch.arange(order.numel(), device=order.device)
    )
    copies = place_of_copy.view(-1, parts_per_expert)
    once = torch.arange(expert.numel(), device=expert.device)
    original = order // parts_per_expert
    one_each = replace(
        assignments, token=original, rows_by_token=copies.reshape(-1), first_by_token=once * parts_per_expert
    )
    return replace(
        assignments,
        token=assignments.token[original],
        expert=expert[original],
        position=assignments.position[original],
        weight=tokens_to_rows(assignments.weight[:, None], one_each).squeeze(1),
        rows_by_token=copies[assignments.rows_by_token].reshape(-1),
        first_by_token=assignments.first_by_token * parts_per_expert,
    )
