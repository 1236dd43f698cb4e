"""Hierarchical dispatch: a token crosses to another node once, however many of its experts are there.

It is sent to the rank at the same position in that node, and from there to its experts. Their outputs are summed within
the node and sent back once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe.dispatch.dispatcher import (
    Combiner,
    CountingDispatcher,
    DirectDispatcher,
    DispatchedRows,
    PendingCounts,
    rows_to_tokens,
    tokens_to_rows,
)
from moe.dispatch.row_exchange import AllToAll, Traffic, exchange_rows
from moe.experts import LocalExperts
from moe.parallel.accelerator import accelerator
from moe.routing import Assignments, Choices
from moe.routing.assignments import true_indices


@dataclass(frozen=True)
class CrossNodeCombiner(Combiner):
    """Combiner of rows that crossed to this node: sums within it, then returns the sums."""

    intra_node: Combiner
    inter_node: AllToAll
    crossing: Assignments
    """Rows sent to the nodes, one per (token, node) pair."""
    send_counts: list[int]
    """Rows sent to each node."""
    receive_counts: list[int]
    """Rows received from each node."""

    def combine(self, outputs: Tensor) -> Tensor:
        node_sums = self.intra_node.combine(outputs)
        return rows_to_tokens(
            exchange_rows(node_sums, self.receive_counts, self.send_counts, self.inter_node), self.crossing
        )


class HierarchicalDispatcher(CountingDispatcher):
    """Two-stage dispatcher: between nodes by `inter_node`, then within this node by `intra_node`.

    `inter_node` connects the ranks at the same position of each node, in node order. Nodes hold equal
    numbers of consecutive experts. A rank receives each token of its peers at most once.
    """

    def __init__(self, inter_node: AllToAll, intra_node: DirectDispatcher) -> None:
        self.inter_node, self.intra_node = inter_node, intra_node

    def begin_counts(self, choices: Choices) -> PendingCounts:
        crosses = choices.reaches(self.inter_node.num_ranks)
        leaving = choices.load.view(self.inter_node.num_ranks, -1)
        crossing_load = crosses.sum(1)
        arriving = self.inter_node.exchange_counts(torch.cat((crossing_load[:, None], leaving), 1))
        node_load = arriving[:, 1:].sum(0)
        return PendingCounts(
            choices.device_counts, crossing_load, arriving, self.intra_node.counts(node_load),
            device_tensors=(crosses, crossing_load, node_load),
        )  # fmt: skip

    def __call__(self, x: Tensor, choices: Choices, experts: LocalExperts) -> DispatchedRows:
        counts = self.take_counts(choices)
        crosses, crossing_load, node_load = counts.device_tensors
        host_counts, send_counts, arrivals, intra_node_counts = counts.wait()
        leaving = choices.load.view(self.inter_node.num_ranks, -1)
        assignments, sent_rows = choices.to_rows(host_counts.tolist()), send_counts.tolist()
        crossing, row_of_choice = deduplicate_by_node(assignments, crosses, crossing_load, sent_rows)
        sent_choices = torch.tensor(assignments.counts).view(leaving.shape).sum(1).tolist()
        num_received_rows, num_received_choices = arrivals[:, 0], arrivals[:, 1:].sum(1)

        # For each choice: its token's row among those sent to the node, and its expert's index there.
        experts_per_node = leaving.shape[1]
        node = assignments.expert // experts_per_node
        first_row = crossing_load.cumsum(0) - crossing_load
        choice_table = torch.stack((row_of_choice - first_row[node], assignments.expert % experts_per_node), 1)
        choice_table = self.inter_node.start(choice_table, sent_choices, num_received_choices.tolist()).wait()
        weight = exchange_rows(assignments.weight, sent_choices, num_received_choices.tolist(), self.inter_node)
        rows = exchange_rows(tokens_to_rows(x, crossing), sent_rows, num_received_rows.tolist(), self.inter_node)

        offset = (num_received_rows.cumsum(0) - num_received_rows).repeat_interleave(num_received_choices)
        token, expert = choice_table[:, 0] + accelerator(x.device).take(offset), choice_table[:, 1]
        order = expert.argsort(stable=True)
        local_assignments = Assignments.from_sorted_rows(
            token[order], expert[order], weight[order], torch.zeros_like(token), rows.shape[0], node_load,
            arrivals[:, 1:].sum(0).tolist(),
        )  # fmt: skip
        x, weight, computation, combiner = self.intra_node.gather_rows(
            rows, local_assignments, intra_node_counts, experts
        )
        combiner = CrossNodeCombiner(combiner, self.inter_node, crossing, sent_rows, num_received_rows.tolist())
        return DispatchedRows(x, weight, computation, combiner)

    def take_traffic(self) -> Traffic:
        return self.inter_node.take_traffic() + self.intra_node.take_traffic()


def deduplicate_by_node(
    assignments: Assignments, crosses: Tensor, load: Tensor, counts: list[int]
) -> tuple[Assignments, Tensor]:
    """Return (one row per (token, node) pair, sorted by node, with nodes in place of experts; int64 `[n]`, the row of
    each choice).

    `crosses` bool `[nodes, T]` marks the pairs; `load` `[nodes]` and `counts` are the pairs per node.
    """
    num_nodes, num_tokens = crosses.shape
    pairs = crosses.reshape(-1)
    pair = true_indices(pairs, sum(counts))
    token, node = pair % max(1, num_tokens), pair // max(1, num_tokens)
    pair_of_choice = assignments.expert // (assignments.load.numel() // num_nodes) * num_tokens
    row_of_choice = (pairs.cumsum(0) - 1)[pair_of_choice + assignments.token]
    weight = assignments.weight.new_ones(pair.shape)
    crossing = Assignments.from_sorted_rows(token, node, weight, torch.zeros_like(token), num_tokens, load, counts)
    return crossing, row_of_choice
