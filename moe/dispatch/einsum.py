"""GShard's own form of dispatch, two einsums with a `[G, S, E, C]` mask: the oracle, not for production.

The mask grows with the number of experts; what it computes is plain to see (arXiv 2006.16668, Algorithm 2).
"""

import torch
from torch import Tensor

from moe.dispatch.dispatcher import Dispatcher
from moe.experts import Experts, feed_forward_reference
from moe.routing import Routing


def combine_weights(routing: Routing, num_tokens: int) -> tuple[Tensor, Tensor]:
    """`combine_GSEC`, the weight of each token at its place in each expert's buffer and zero elsewhere, and the mask
    `dispatch_GSEC` of these places."""
    rows, capacity = routing.assignments, routing.capacity
    if capacity is None:
        capacity = int(rows.position.max()) + 1 if rows.position.numel() else 1
    shape = (num_tokens, routing.load.shape[0], capacity)
    place = (rows.token, rows.expert, rows.position)
    combine = rows.weight.new_zeros(shape).index_put(place, rows.weight)
    dispatch = rows.weight.new_zeros(shape).index_put(place, torch.ones_like(rows.weight))
    by_group = (routing.num_groups, num_tokens // max(1, routing.num_groups), *shape[1:])
    return combine.view(by_group), dispatch.view(by_group)


class EinsumDispatcher(Dispatcher):
    """Algorithm 2, line by line, on one process."""

    def __call__(self, x: Tensor, routing: Routing, experts: Experts) -> Tensor:
        combine_GSEC, dispatch_GSEC = (mask.to(x.dtype) for mask in combine_weights(routing, x.shape[0]))
        x_GSM = x.view(*combine_GSEC.shape[:2], -1)
        x_EGCM = torch.einsum("gsec,gsm->egcm", dispatch_GSEC, x_GSM)
        rows_each = x_EGCM.shape[1] * x_EGCM.shape[2]
        y_EGCM = feed_forward_reference(
            x_EGCM.reshape(-1, x.shape[1]),
            x.new_ones(rows_each * x_EGCM.shape[0]),  # the weights are in the mask
            experts.weights(x.dtype),
            [rows_each] * x_EGCM.shape[0],
            experts.activation,
        ).view(x_EGCM.shape)
        return torch.einsum("gsec,egcm->gsm", combine_GSEC, y_EGCM).reshape(x.shape)
