"""Dispatch over nodes: a token crosses to another node once, however many of its experts live there.

Tokens go across first, each to the rank of the other node that has this one's place in it, and from there to their
experts within the node. What the experts of a node give for a token is added up there, and crosses back once.
"""

import torch
from torch import Tensor

from moe.dispatch.dispatcher import Dispatcher
from moe.dispatch.permute import rows_to_tokens, tokens_to_rows
from moe.dispatch.rows import AllToAll, Traffic, exchange_rows
from moe.experts import Experts
from moe.routing import Assignments


class HierarchicalDispatcher(Dispatcher):
    """`across` is between the ranks that have the same place in each node, in the order of nodes; `within` carries
    tokens to the experts of this one. Nodes hold consecutive experts, as many each.

    A rank takes a token of its peers in other nodes at most once each: at most as many rows as they have tokens.
    """

    def __init__(self, across: AllToAll, within: Dispatcher) -> None:
        self.across, self.within = across, within

    def __call__(self, x: Tensor, assignments: Assignments, experts: Experts) -> Tensor:
        num_nodes = self.across.num_ranks
        crossing, row_of_choice = once_a_node(assignments, num_nodes)
        num_choices = assignments.load.view(num_nodes, -1).sum(1)
        arriving = self.across.exchange_counts(torch.stack((crossing.load, num_choices), 1))
        sent_rows = crossing.counts
        sent_choices = torch.tensor(assignments.counts).view(num_nodes, -1).sum(1).tolist()
        rows_here, choices_here = arriving.t().tolist()

        # Of each choice: which of the rows that cross to its node it is of, and its expert's number there.
        experts_each = assignments.load.numel() // num_nodes
        first_row = crossing.load.cumsum(0) - crossing.load
        node = assignments.expert // experts_each
        what = torch.stack((row_of_choice - first_row[node], assignments.expert % experts_each), 1)
        what = self.across.start(what, sent_choices, choices_here).wait()
        weight = exchange_rows(assignments.weight, sent_choices, choices_here, self.across)
        rows = exchange_rows(tokens_to_rows(x, crossing), sent_rows, rows_here, self.across)

        offset = torch.tensor(rows_here).cumsum(0) - torch.tensor(rows_here)
        offset = offset.repeat_interleave(torch.tensor(choices_here)).to(x.device)
        here = _assignments(what[:, 0] + offset, what[:, 1], weight, rows.shape[0], experts_each)
        y = self.within(rows, here, experts)
        return rows_to_tokens(exchange_rows(y, rows_here, sent_rows, self.across), crossing)

    def take_traffic(self) -> Traffic:
        return self.across.take_traffic() + self.within.take_traffic()


def once_a_node(assignments: Assignments, num_nodes: int) -> tuple[Assignments, Tensor]:
    """(a row for each pair of a token and a node where it has an expert, ordered by node, with nodes in the place of
    experts; int64 `[n]`, the row that each choice is of)."""
    num_tokens = assignments.first_by_token.shape[0]
    node = assignments.expert // (assignments.load.numel() // num_nodes)
    pairs, row_of_choice = (node * num_tokens + assignments.token).unique(return_inverse=True)
    token, node = pairs % max(1, num_tokens), pairs // max(1, num_tokens)
    weight = assignments.weight.new_ones(pairs.shape)
    return _assignments(token, node, weight, num_tokens, num_nodes), row_of_choice


def _assignments(
    token: Tensor, expert: Tensor, weight: Tensor, num_tokens: int, num_experts: int
) -> Assignments:
    """Choices in any order, put in order of experts."""
    order = expert.argsort(stable=True)
    token, expert, weight = token[order], expert[order], weight[order]
    return Assignments.in_order(token, expert, weight, torch.zeros_like(token), num_tokens, num_experts)
