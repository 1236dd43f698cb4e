"""The k best of many, the same ones whoever asks."""

import torch
from torch import Tensor
from torch.nn import functional

from moe.parallel.accelerator import accelerator

_ROUNDING = 64
"""Distance to which rounding may bring logarithms of equal probabilities, in units of the dtype's epsilon times the
largest logit. In float32 it is a hundredth of the distance at which a few thousand tokens lie."""


def top_k(scores: Tensor, k: int) -> Tensor:
    """int64 `[..., k]`: where the k highest of the last dimension are, best first, ties to the lower index.

    torch's own leaves open which of equal entries it takes, and may take others for another number of rows.
    """
    num_best = min(k + 1, scores.shape[-1])
    best, index = scores.detach().topk(num_best, dim=-1)
    if _may_hold(scores.device, best[..., 1:] == best[..., :-1]):
        index = scores.detach().sort(dim=-1, descending=True, stable=True).indices
    return index[..., :k]


def top_k_of_close(scores: Tensor, k: int, within: Tensor, then: Tensor) -> Tensor:
    """The same where scores less than `within` apart count as equal: ties go by `then`, whose values count as equal
    likewise, and only then to the lower index.

    `scores` and `then` `[..., E]`, `within` `[..., 1]`. Equal are those that a run of such neighbours connects.
    """
    num_best = min(k + 1, scores.shape[-1])
    best, index = scores.detach().topk(num_best, dim=-1)
    if not _may_hold(scores.device, best[..., :-1] - best[..., 1:] <= within):
        return index[..., :k]
    num_scores = scores.shape[-1]
    return top_k(-_places(scores.detach(), within) * num_scores - _places(then.detach(), within), k)


def rounding_unit(logits: Tensor, real: Tensor) -> Tensor:
    """`[G]`: the dtype's epsilon times the size of each group's `logits` `[G, S, E]`, those of `real` tokens. No
    group may be empty."""
    largest_G = logits.detach().abs().masked_fill(~real[..., None], 0.0).flatten(1).amax(1)
    return torch.finfo(logits.dtype).eps * (1 + largest_G)


def places_of_close(probabilities: Tensor, logits: Tensor, real: Tensor) -> Tensor:
    """int64 `[G, ..., n]`: the place of each of `probabilities` `[G, ..., n]`, 0 for the highest; the same for those
    that are as close as rounding brings equal ones, whose size follows from the `logits` `[G, S, E]` of `real` tokens
    `[G, S]`.

    Tokens that are equal in exact arithmetic, such as the first ones of two documents, differ by rounding on ranks that
    add up in another order. Whoever takes the best of several tokens, ties in their order, takes the same everywhere.
    """
    if not probabilities.numel():
        return torch.zeros_like(probabilities, dtype=torch.int64)
    within_G = _ROUNDING * rounding_unit(logits, real)
    return _places(probabilities.detach().log(), within_G.view(-1, *[1] * (probabilities.dim() - 1)))


def _may_hold(device: torch.device, conditions: Tensor) -> bool:
    """Whether any of these holds; on a GPU, which would have to be waited for, it is taken for granted."""
    return accelerator(device).runs_ahead or bool(conditions.any())


def _places(scores: Tensor, within: Tensor) -> Tensor:
    """int64 `[..., E]`: 0 for the highest, counting up; the same for equal ones."""
    sorted_scores, index = scores.sort(dim=-1, descending=True)
    steps = functional.pad(sorted_scores[..., :-1] - sorted_scores[..., 1:] > within, (1, 0))
    return torch.empty_like(index).scatter_(-1, index, steps.cumsum(-1))
