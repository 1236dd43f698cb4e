"""Repetition penalty (CTRL, arXiv 1909.05858, section 4.1), as in transformers."""

from collections.abc import Sequence

import torch
from torch import Tensor


class RepetitionPenalty:
    """Penalty on the tokens that a row already has, of its prompt and new ones."""

    def __init__(self, penalty: float, prompts: Sequence[Sequence[int]], vocab_size: int, device: torch.device) -> None:
        self._penalty = penalty
        self._is_seen_BV = torch.zeros(len(prompts), vocab_size, dtype=torch.bool, device=device)
        for row, prompt in enumerate(prompts):
            self._is_seen_BV[row, torch.tensor(prompt, dtype=torch.int64, device=device)] = True

    def apply(self, scores_BV: Tensor) -> Tensor:
        """Scores in float64: those of a row's tokens are divided by the penalty if positive, else multiplied."""
        scores_BV = scores_BV.to(torch.float64)
        penalized_BV = torch.where(scores_BV < 0, scores_BV * self._penalty, scores_BV / self._penalty)
        return torch.where(self._is_seen_BV, penalized_BV, scores_BV)

    def take_rows(self, rows: Tensor) -> None:
        """Select rows by int64 index, in this order; indices may repeat."""
        self._is_seen_BV = self._is_seen_BV[rows]

    def append(self, tokens: Tensor) -> None:
        """Append `tokens` int64 `[B]` to the rows."""
        self._is_seen_BV.scatter_(1, tokens[:, None], True)
