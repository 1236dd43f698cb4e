"""Top-k selection with deterministic ties."""

import torch
from torch import Tensor
from torch.nn import functional

from moe.parallel.accelerator import accelerator

_ROUNDING = 64
"""Tolerance for log-probabilities that are equal up to rounding, in units of the dtype's epsilon times the largest
logit; in float32 a hundredth of the distance between a few thousand tokens."""


def top_k(scores: Tensor, k: int) -> Tensor:
    """int64 `[..., k]`: indices of the k highest scores in the last dimension, best first; ties go to the lower index.

    `torch.topk` leaves the order of ties undefined, and it may change with the number of rows.
    """
    num_best = min(k + 1, scores.shape[-1])
    best, index = scores.detach().topk(num_best, dim=-1)
    if _may_hold(scores.device, best[..., 1:] == best[..., :-1]):
        index = scores.detach().sort(dim=-1, descending=True, stable=True).indices
    return index[..., :k]


def top_k_of_close(scores: Tensor, k: int, within: Tensor, then: Tensor) -> Tensor:
    """`top_k` in which scores at most `within` apart are equal: ties go to the higher value in `then`, with the same
    tolerance, and then to the lower index.

    `scores` and `then` `[..., E]`, `within` `[..., 1]`. Equality is transitive: a chain of close scores is one tie.
    """
    num_best = min(k + 1, scores.shape[-1])
    best, index = scores.detach().topk(num_best, dim=-1)
    if not _may_hold(scores.device, best[..., :-1] - best[..., 1:] <= within):
        return index[..., :k]
    num_scores = scores.shape[-1]
    return top_k(-_places(scores.detach(), within) * num_scores - _places(then.detach(), within), k)


def rounding_unit(logits: Tensor, real: Tensor) -> Tensor:
    """`[G]`: the dtype's epsilon times 1 plus the largest absolute value of each group's `logits` `[G, S, E]` of `real`
    tokens. Groups must not be empty."""
    largest_G = logits.detach().abs().masked_fill(~real[..., None], 0.0).flatten(1).amax(1)
    return torch.finfo(logits.dtype).eps * (1 + largest_G)


def places_of_close(probabilities: Tensor, logits: Tensor, real: Tensor) -> Tensor:
    """int64 `[G, ..., n]`: dense rank of each of `probabilities` `[G, ..., n]` in the last dimension, 0 for the
    highest, equal for values that are equal up to rounding. The tolerance follows from the `logits` `[G, S, E]` of
    `real` tokens `[G, S]`.

    Tokens that are equal in exact arithmetic, such as the first of two documents, differ by rounding on ranks that sum
    in another order. Selection by these ranks, with ties in token order, is the same everywhere.
    """
    if not probabilities.numel():
        return torch.zeros_like(probabilities, dtype=torch.int64)
    within_G = _ROUNDING * rounding_unit(logits, real)
    return _places(probabilities.detach().log(), within_G.view(-1, *[1] * (probabilities.dim() - 1)))


def _may_hold(device: torch.device, conditions: Tensor) -> bool:
    """Whether any of `conditions` is True; assumed on a GPU, to avoid a synchronization."""
    return accelerator(device).runs_ahead or bool(conditions.any())


def _places(scores: Tensor, within: Tensor) -> Tensor:
    """int64 `[..., E]`: dense rank, 0 for the highest; scores at most `within` apart have the same rank."""
    sorted_scores, index = scores.sort(dim=-1, descending=True)
    steps = functional.pad(sorted_scores[..., :-1] - sorted_scores[..., 1:] > within, (1, 0))
    return torch.empty_like(index).scatter_(-1, index, steps.cumsum(-1))
