"""Dispatch of few tokens without gradients: decoding one token at a time."""

from functools import partial

import torch
from torch import Tensor

from moe.experts import ExpertWeights, LocalExperts, Work
from moe.experts.feed_forward import forward_pass

FEW_ROWS = 64
"""Number of rows up to which sorting on the host is faster than a dozen tensor operations."""


def dispatch_small(x: Tensor, expert: Tensor, weight: Tensor, experts: LocalExperts) -> Tensor | None:
    """Return `[T, M]`: the sum of each token's K expert outputs, in order of preference, times `weight` `[T, K]`; None
    if the experts need padding rows. No gradients are tracked.

    `x` `[T, M]` and `expert` int64 `[T, K]` are on the CPU, and all experts are local.
    """
    num_choices, per_token = expert.numel(), expert.shape[1]
    if num_choices == 0:
        return torch.zeros_like(x)
    of_choice: list[int] = expert.reshape(-1).tolist()
    counts = [0] * experts.weights.w_in.shape[0]
    for expert_index in of_choice:
        counts[expert_index] += 1
    work = experts.work_on(counts)
    if work.counts != counts:
        return None
    order = torch.tensor(sorted(range(num_choices), key=of_choice.__getitem__))
    outputs = experts(x[order // per_token], weight.reshape(-1)[order], partial(_forward, work=work))
    return torch.empty_like(outputs).index_copy_(0, order, outputs).unflatten(0, (-1, per_token)).sum(1)


def _forward(rows: Tensor, scale: Tensor, weights: ExpertWeights, work: Work) -> Tensor:
    return forward_pass(rows, scale, weights.narrow(rows.dtype), work)[0]
