"""Decoding steps of a model with KV caches."""

from collections.abc import Sequence

import torch
from torch import Tensor

from moe.tasks.sequence_model import DecodingState, SequenceModel


class ModelSteps:
    """Rows of tokens and their KV caches: `DecodingSteps` of a sequence model."""

    @torch.no_grad()
    def __init__(
        self,
        model: SequenceModel,
        state: DecodingState,
        tokens: Tensor,
        padding: Tensor | None = None,
        *,
        excluded: Sequence[int] = (),
    ) -> None:
        """Append the first `tokens` int64 `[B, N]`, padded as in `extend`. `excluded`: tokens that are never chosen."""
        self._model, self._state, self._excluded = model, state, list(excluded)
        self.logits = self._extend(tokens, padding)
        """`[B, V]`: logits of each row's first new token."""

    def next(self, tokens: Tensor) -> Tensor:
        return self._extend(tokens[:, None])

    def take_rows(self, rows: Tensor) -> None:
        self._state.take_rows(rows)

    def _extend(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        logits = self._model.extend(tokens, self._state, padding)
        if self._excluded:
            logits[:, self._excluded] = -torch.inf
        return logits
