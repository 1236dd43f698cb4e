"""The choice of the next token from logits."""

import torch
from torch import Tensor

from moe.random import Purpose, fold, gumbel
from moe.spec.generation import GenerationSpec


def choose_tokens(logits: Tensor, spec: GenerationSpec, texts: Tensor, position: int) -> Tensor:
    """int64 `[B]`: the token of each row of `logits` `[B, V]`, at `position` of the texts with the numbers `texts`
    int64 `[B]`. Of equal logits the lower token is taken.

    A draw is keyed by the seed, the text's number and the position: no other row and no layout changes it.
    """
    if not spec.temperature:
        return logits.argmax(dim=-1)
    scores = logits.to(torch.float64)
    # The largest becomes 0, which no temperature, however small, makes infinite.
    scores = (scores - scores.amax(dim=-1, keepdim=True)) / spec.temperature
    scores = scores.masked_fill(~_standing(scores, spec), -torch.inf)
    noise = gumbel(fold(spec.seed, position, Purpose.GENERATION), texts, logits.shape[-1])
    return (scores + noise).argmax(dim=-1)


def _standing(scores: Tensor, spec: GenerationSpec) -> Tensor:
    """bool `[B, V]`: the tokens that may be drawn, the likeliest always among them."""
    if spec.top_k is None and spec.top_p == 1:
        return torch.ones_like(scores, dtype=torch.bool)
    sorted_scores, index = scores.sort(dim=-1, descending=True, stable=True)
    places = torch.arange(scores.shape[-1], device=scores.device)
    stands = places < (spec.top_k or scores.shape[-1])
    if spec.top_p < 1:
        within = sorted_scores.masked_fill(~stands, -torch.inf).softmax(dim=-1)
        stands = stands & (within.cumsum(dim=-1) - within < spec.top_p)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(
        -1, index, stands.expand_as(scores).contiguous()
    )
