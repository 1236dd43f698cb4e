"""Translations by any choice of tokens: drawn ones, or a search. Evaluation decodes greedily (`greedy_decode`)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from moe.spec.generation import GenerationSpec
from moe.tasks.decoding import beam_search, one_by_one
from moe.tasks.translation.greedy import BOS, EOS
from moe.tasks.translation.model import PAD, TranslationModel


class Translating:
    """Rows of target tokens that a model goes on from, as `moe.tasks.decoding` takes them."""

    def __init__(self, model: TranslationModel, source: Tensor, max_tokens: int) -> None:
        """Begins one for each row of `source` int64 `[B, L]`."""
        self._model, self._state = model, model.start_decoding(source, max_tokens)
        self.logits = self.next(torch.full_like(source[:, 0], BOS))
        """`[B, V]`, of each row's first token."""

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
    """The tokens of each row's translation, without EOS: at most as many as `max_tokens` says of it, which is where
    those are cut short that have as many. Draws are keyed by `texts`, as in `one_by_one`."""
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
