"""GShard's dispatch by two einsums with a `[G, S, E, C]` mask (arXiv 2006.16668, Algorithm 2): the reference for tests,
not for production, since the mask grows with the number of experts."""

import torch
from torch import Tensor

from moe.dispatch.dispatcher import Dispatcher
from moe.experts import LocalExperts, feed_forward_reference
from moe.routing import Assignments, Choices


def combine_weights(assignments: Assignments, group_tokens: int) -> tuple[Tensor, Tensor]:
    """Return each token's weight at its position in each expert's buffer, `combine_GSEC`, and the mask of these
    positions, `dispatch_GSEC`. Groups must be full."""
    rows, num_tokens = assignments, assignments.first_by_token.shape[0]
    capacity = int(rows.position.max()) + 1 if rows.position.numel() else 1
    shape = (num_tokens, rows.load.shape[0], capacity)
    place = (rows.token, rows.expert, rows.position)
    combine = rows.weight.new_zeros(shape).index_put(place, rows.weight)
    dispatch = rows.weight.new_zeros(shape).index_put(place, torch.ones_like(rows.weight))
    by_group = (num_tokens // group_tokens, group_tokens, *shape[1:])
    return combine.view(by_group), dispatch.view(by_group)


class EinsumDispatcher(Dispatcher):
    """Algorithm 2 line by line, in one process, for groups of `group_tokens` tokens."""

    def __init__(self, group_tokens: int) -> None:
        self.group_tokens = group_tokens

    def __call__(self, x: Tensor, choices: Choices, experts: LocalExperts) -> Tensor:
        assignments = choices.to_rows(choices.device_counts.tolist())
        masks = combine_weights(assignments, self.group_tokens)
        combine_GSEC, dispatch_GSEC = (mask.to(x.dtype) for mask in masks)
        x_GSM = x.view(*combine_GSEC.shape[:2], -1)
        x_EGCM = torch.einsum("gsec,gsm->egcm", dispatch_GSEC, x_GSM)
        rows_each = x_EGCM.shape[1] * x_EGCM.shape[2]
        y_EGCM = feed_forward_reference(
            x_EGCM.reshape(-1, x.shape[1]),
            x.new_ones(rows_each * x_EGCM.shape[0]),  # the weights are in the mask
            experts.weights.to(x.dtype),
            [rows_each] * x_EGCM.shape[0],
            experts.activation,
        ).view(x_EGCM.shape)
        return torch.einsum("gsec,egcm->gsm", combine_GSEC, y_EGCM).reshape(x.shape)
