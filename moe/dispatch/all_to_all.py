"""Dispatch where the experts of a layer are spread over ranks: rows and their weights out, weighted rows back."""

import torch
import torch.distributed as dist
from torch import Tensor

from moe.dispatch.dispatcher import Dispatcher
from moe.dispatch.permute import places, reorder, rows_to_tokens, tokens_to_rows
from moe.experts import Experts
from moe.parallel import exchange_counts, exchange_rows
from moe.routing import Routing


class AllToAllDispatcher(Dispatcher):
    """Rows travel to the rank that holds their expert, are sorted by expert there, and travel back.

    What a rank receives follows from routing alone, so nothing is padded and nothing is dropped here; a rank
    or an expert without tokens takes part with zero rows.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.num_ranks = group.size()

    def __call__(self, x: Tensor, routing: Routing, experts: Experts) -> Tensor:
        # Assignments are ordered by expert and ranks hold consecutive experts: rows are ordered by rank.
        counts = routing.load.view(self.num_ranks, -1)
        arriving = exchange_counts(counts, self.group)
        sent, received = counts.sum(1).tolist(), arriving.sum(1).tolist()

        rows = exchange_rows(tokens_to_rows(x, routing.assignments), sent, received, self.group)
        weight = exchange_rows(routing.assignments.weight, sent, received, self.group)
        by_expert, by_rank = _orders(arriving)
        weight = reorder(weight, by_expert, by_rank)
        here = arriving.sum(0).tolist()
        padded = experts.padded(here)
        if padded != here:
            place, num_padded = places(here, padded, rows.device), sum(padded)
            by_expert = by_expert.new_zeros(num_padded).index_copy(0, place, by_expert)
            weight = weight.new_zeros(num_padded).index_copy(0, place, weight)
            by_rank = place[by_rank]
        outputs = experts(reorder(rows, by_expert, by_rank), weight, padded)
        rows = exchange_rows(reorder(outputs, by_rank, by_expert), received, sent, self.group)
        return rows_to_tokens(rows, routing.assignments)


def _orders(arriving: Tensor) -> tuple[Tensor, Tensor]:
    """Index of rows that came by (rank, expert) in the order (expert, rank), and its inverse.

    `arriving` int64 `[ranks, experts here]` counts them.
    """
    num_ranks, num_experts = arriving.shape
    expert_of_block = torch.arange(num_experts, device=arriving.device).repeat(num_ranks)
    by_expert = expert_of_block.repeat_interleave(arriving.reshape(-1)).argsort(stable=True)
    by_rank = torch.empty_like(by_expert)
    by_rank[by_expert] = torch.arange(by_expert.numel(), device=arriving.device)
    return by_expert, by_rank
