"""A trained model as a translator, in one process."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from moe.data.pairs import Tokenizers
from moe.data.tokenizer import EOS, PAD
from moe.tasks.task import Generator
from moe.tasks.translation.greedy import greedy_decode
from moe.tasks.translation.model import TranslationModel

_BATCH_ROWS = 128


class Translator(Generator):
    """Translates texts with a trained model."""

    def __init__(self, model: TranslationModel, tokenizers: Tokenizers, max_tokens: int) -> None:
        self._model, self._tokenizers, self._max_tokens = model, tokenizers, max_tokens

    @classmethod
    def of(cls, model: nn.Module, max_tokens: int, read: Callable[[str], bytes]) -> "Translator":
        """The translator whose tokenizers `read` gives by the names of their files."""
        assert isinstance(model, TranslationModel)
        return cls(model, Tokenizers.read(read), max_tokens)

    def generate(self, texts: Sequence[str]) -> list[str]:
        """The likeliest translation of each text, found greedily; an empty text stays empty.

        A source longer than what the model was trained on (`data.max_tokens`) is cut there.
        """
        encoded = [ids[: self._max_tokens - 1] for ids in self._tokenizers.source.encode_batch(list(texts))]
        order = sorted((row for row, ids in enumerate(encoded) if ids), key=lambda row: len(encoded[row]))
        translations = [""] * len(texts)
        for start in range(0, len(order), _BATCH_ROWS):
            rows = order[start : start + _BATCH_ROWS]
            decoded = greedy_decode(
                self._model, self._padded([encoded[row] for row in rows]), self._max_tokens
            )
            for row, ids in zip(rows, decoded.tolist(), strict=True):
                translations[row] = self._tokenizers.target.decode(ids)
        return translations

    def save_tokenizers(self, folder: Path) -> None:
        self._tokenizers.save(folder)

    def _padded(self, sources: list[list[int]]) -> torch.Tensor:
        """int64 [B, L], each row ended by EOS."""
        length = max(map(len, sources)) + 1
        rows = [[*ids, EOS, *[PAD] * (length - len(ids) - 1)] for ids in sources]
        return torch.tensor(rows, device=self._model.source_embedding.device)
