"""Next-token selection: greedy, or sampling with temperature, top-k and top-p."""

import torch
from torch import Tensor

from moe.random import Purpose, fold, gumbel
from moe.spec.generation import GenerationSpec


def choose_tokens(logits: Tensor, spec: GenerationSpec, texts: Tensor, position: int) -> Tensor:
    """int64 `[B]`: next token of each row of `logits` `[B, V]`; ties go to the lower id.

    Sampling is keyed by seed, text number (`texts` int64 `[B]`) and `position`: other rows and the layout do not
    matter.
    """
    if not spec.temperature:
        return logits.argmax(dim=-1)
    scores = logits.to(torch.float64)
    # Shift the maximum to 0, so that a tiny temperature does not overflow.
    scores = (scores - scores.amax(dim=-1, keepdim=True)) / spec.temperature
    scores = scores.masked_fill(~_eligible_tokens(scores, spec), -torch.inf)
    noise = gumbel(fold(spec.seed, position, Purpose.GENERATION), texts, logits.shape[-1])
    return (scores + noise).argmax(dim=-1)


def _eligible_tokens(scores: Tensor, spec: GenerationSpec) -> Tensor:
    """bool `[B, V]`: tokens within top-k and top-p; always includes the most likely one."""
    if spec.top_k is None and spec.top_p == 1:
        return torch.ones_like(scores, dtype=torch.bool)
    sorted_scores, index = scores.sort(dim=-1, descending=True, stable=True)
    places = torch.arange(scores.shape[-1], device=scores.device)
    is_eligible = places < (spec.top_k or scores.shape[-1])
    if spec.top_p < 1:
        within = sorted_scores.masked_fill(~is_eligible, -torch.inf).softmax(dim=-1)
        is_eligible = is_eligible & (within.cumsum(dim=-1) - within < spec.top_p)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, index, is_eligible.expand_as(scores).contiguous())
