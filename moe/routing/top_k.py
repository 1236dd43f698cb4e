"""The k best of many, the same ones whoever asks."""

import torch
from torch import Tensor
from torch.nn import functional

from moe.parallel.accelerator import accelerator


def top_k(scores: Tensor, k: int) -> Tensor:
    """int64 `[..., k]`: where the k highest of the last dimension are, best first, ties to the lower index.

    torch's own leaves open which of equal entries it takes, and may take others for another number of rows.
    """
    several = min(k + 1, scores.shape[-1])
    best, index = scores.detach().topk(several, dim=-1)
    if _may_hold(scores.device, best[..., 1:] == best[..., :-1]):
        index = scores.detach().sort(dim=-1, descending=True, stable=True).indices
    return index[..., :k]


def top_k_of_close(scores: Tensor, k: int, within: Tensor, then: Tensor) -> Tensor:
    """The same where scores less than `within` apart count as equal: ties go by `then`, whose values count as equal
    likewise, and only then to the lower index.

    `scores` and `then` `[..., E]`, `within` `[..., 1]`. Equal are those that a run of such neighbours connects.
    """
    several = min(k + 1, scores.shape[-1])
    best, index = scores.detach().topk(several, dim=-1)
    if not _may_hold(scores.device, best[..., :-1] - best[..., 1:] <= within):
        return index[..., :k]
    num_scores = scores.shape[-1]
    return top_k(-_places(scores.detach(), within) * num_scores - _places(then.detach(), within), k)


def _may_hold(device: torch.device, conditions: Tensor) -> bool:
    """Whether any of these holds; on a GPU, which would have to be waited for, it is taken for granted."""
    return accelerator(device).runs_ahead or bool(conditions.any())


def _places(scores: Tensor, within: Tensor) -> Tensor:
    """int64 `[..., E]`: 0 for the highest, counting up; the same for equal ones."""
    ordered, index = scores.sort(dim=-1, descending=True)
    steps = functional.pad(ordered[..., :-1] - ordered[..., 1:] > within, (1, 0))
    return torch.empty_like(index).scatter_(-1, index, steps.cumsum(-1))
