"""GShard's own form of dispatch, two einsums with a `[G, S, E, C]` mask: the oracle, not for production.

The mask grows with the number of experts; what it computes is plain to see (arXiv 2006.16668, Algorithm 2).
"""

import torch
from torch import Tensor

from moe.dispatch.dispatcher import Dispatcher
from moe.experts import Experts
from moe.routing import Routing


def combine_weights(routing: Routing) -> Tensor:
    """`combine_GSEC`: the weight of each token at its place in each expert's buffer, zero elsewhere."""
    num_tokens, num_experts = routing.expert.shape[0], routing.load.shape[0]
    capacity = routing.capacity
    if capacity is None:
        capacity = int(routing.position.max()) + 1 if num_tokens else 1
    combine = routing.weight.new_zeros(num_tokens, num_experts, capacity)
    for preference in range(routing.expert.shape[1]):
        kept = routing.kept[:, preference]
        token = torch.arange(num_tokens, device=kept.device)[kept]
        place = (token, routing.expert[kept, preference], routing.position[kept, preference])
        combine = combine.index_put(place, routing.weight[kept, preference], accumulate=True)
    return combine.view(routing.num_groups, -1, num_experts, capacity)


class EinsumDispatcher(Dispatcher):
    """Algorithm 2, line by line, on one process."""

    def __call__(self, x: Tensor, routing: Routing, experts: Experts) -> Tensor:
        combine_GSEC = combine_weights(routing).to(x.dtype)
        dispatch_GSEC = (combine_GSEC != 0).to(x.dtype)
        x_GSM = x.view(*combine_GSEC.shape[:2], -1)
        x_EGCM = torch.einsum("gsec,gsm->egcm", dispatch_GSEC, x_GSM)
        hidden_EGCH = torch.einsum("egcm,emh->egch", x_EGCM, experts.w_in.to(x.dtype)).relu()
        y_EGCM = torch.einsum("egch,ehm->egcm", hidden_EGCH, experts.w_out.to(x.dtype))
        return torch.einsum("gsec,egcm->gsm", combine_GSEC, y_EGCM).reshape(x.shape)
