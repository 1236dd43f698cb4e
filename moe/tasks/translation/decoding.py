"""Sampling and beam search for translation. Evaluation uses `greedy_decode`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from moe.spec.generation import GenerationSpec
from moe.tasks.decoding import beam_search, one_by_one
from moe.tasks.translation.greedy import BOS, EOS
from moe.tasks.translation.model import PAD, TranslationModel


class Translating:
    """Target sequences and their caches: `DecodingSteps` of a translation model."""

    def __init__(self, model: TranslationModel, source: Tensor, max_tokens: int) -> None:
        """Encode `source` int64 `[B, L]` and feed BOS to each row."""
        self._model, self._state = model, model.start_decoding(source, max_tokens)
        self.logits = self.next(torch.full_like(source[:, 0], BOS))
        """`[B, V]`: logits of each row's first token."""

    def next(self, tokens: Tensor) -> Tensor:
        logits = self._model.decode_step(tokens, self._state)
        logits[:, [PAD, BOS]] = -torch.inf
        return logits

    def take_rows(self, rows: Tensor) -> None:
        self._state.keep_rows(rows)


@torch.no_grad()
def decode(
    model: TranslationModel,
    source: Tensor,
    spec: GenerationSpec,
    max_tokens: Sequence[int],
    texts: Sequence[int] | None = None,
) -> list[list[int]]:
    """Target tokens of each row, without EOS, truncated to the row's `max_tokens`.

    Sampling is keyed by `texts`, as in `one_by_one`.
    """
    spec = spec.model_copy(update={"max_tokens": max(max_tokens, default=1)})
    rows = Translating(model, source, spec.max_tokens)
    if spec.num_beams > 1:
        return beam_search(rows, rows.logits, spec, {EOS}, max_tokens=max_tokens)
    translations: list[list[int]] = [[] for _ in max_tokens]
    decoding = one_by_one(rows, rows.logits, spec, {EOS}, texts=texts)
    full: list[int] | None = None
    while True:
        try:
            tokens = decoding.send(full)
        except StopIteration:
            return translations
        for row, token in tokens.items():
            if token != EOS:
                translations[row].append(token)
        full = [row for row in tokens if len(translations[row]) >= max_tokens[row]]
