"""GShard's dispatch by two einsums with a `[G, S, E, C]` mask (arXiv 2006.16668, Algorithm 2): the reference for tests,
not for production, since the mask grows with the number of experts."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe.dispatch.dispatcher import Combiner, DispatchedRows, Dispatcher
from moe.experts import LocalExperts
from moe.experts.feed_forward import ReferenceComputation
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


@dataclass(frozen=True)
class EinsumCombiner(Combiner):
    """Combiner of rows by expert, group and position in the expert's buffer."""

    combine_GSEC: Tensor

    def combine(self, outputs: Tensor) -> Tensor:
        num_groups, group_tokens, num_experts, capacity = self.combine_GSEC.shape
        y_EGCM = outputs.view(num_experts, num_groups, capacity, -1)
        y_GSM = torch.einsum("gsec,egcm->gsm", self.combine_GSEC, y_EGCM)
        return y_GSM.reshape(num_groups * group_tokens, -1)


class EinsumDispatcher(Dispatcher):
    """Algorithm 2 line by line, in one process, for groups of `group_tokens` tokens."""

    def __init__(self, group_tokens: int) -> None:
        self.group_tokens = group_tokens

    def __call__(self, x: Tensor, choices: Choices, experts: LocalExperts) -> DispatchedRows:
        assignments = choices.to_rows(choices.device_counts.tolist())
        masks = combine_weights(assignments, self.group_tokens)
        combine_GSEC, dispatch_GSEC = (mask.to(x.dtype) for mask in masks)
        if experts.scales_inputs:
            combine_GSEC, dispatch_GSEC = dispatch_GSEC, combine_GSEC
        x_GSM = x.view(*combine_GSEC.shape[:2], -1)
        x_EGCM = torch.einsum("gsec,gsm->egcm", dispatch_GSEC, x_GSM)
        num_experts, rows_per_expert = x_EGCM.shape[0], x_EGCM.shape[1] * x_EGCM.shape[2]
        counts = [rows_per_expert] * num_experts
        computation = ReferenceComputation(counts, experts.local_computation(counts).activation)
        weight = x.new_ones(num_experts * rows_per_expert)  # the weights are in the mask
        return DispatchedRows(x_EGCM.reshape(-1, x.shape[1]), weight, computation, EinsumCombiner(combine_GSEC))
