"""A trained model as a translator: one process, no service, no Ray."""

from collections.abc import Sequence

import torch

from moe.data.tokenizer import EOS, PAD
from moe.export.exported import is_exported, load_exported
from moe.export.trained import Trained
from moe.tasks.translation import greedy_decode

_BATCH_ROWS = 128


class Translator:
    """Translates texts with a trained model."""

    def __init__(self, trained: Trained) -> None:
        self.model, self._tokenizers, self._max_tokens = trained.model, trained.tokenizers, trained.max_tokens

    @classmethod
    def load(cls, folder: str, device: torch.device | str = "cpu") -> "Translator":
        """The translator of a checkpoint's folder (as `Trained.load` takes it), or of an exported model's.

        Raises CheckpointError where the checkpoint is not committed or not whole, ExportError.
        """
        return cls(load_exported(folder, device) if is_exported(folder) else Trained.load(folder, device))

    def translate(self, texts: Sequence[str]) -> list[str]:
        """The likeliest translation of each text, found greedily; an empty text stays empty.

        A source longer than what the model was trained on (`data.max_tokens`) is cut there.
        """
        encoded = [ids[: self._max_tokens - 1] for ids in self._tokenizers.source.encode_batch(list(texts))]
        order = sorted((row for row, ids in enumerate(encoded) if ids), key=lambda row: len(encoded[row]))
        translations = [""] * len(texts)
        for start in range(0, len(order), _BATCH_ROWS):
            rows = order[start : start + _BATCH_ROWS]
            decoded = greedy_decode(
                self.model, self._padded([encoded[row] for row in rows]), self._max_tokens
            )
            for row, ids in zip(rows, decoded.tolist(), strict=True):
                translations[row] = self._tokenizers.target.decode(ids)
        return translations

    def _padded(self, sources: list[list[int]]) -> torch.Tensor:
        """int64 [B, L], each row ended by EOS."""
        length = max(map(len, sources)) + 1
        rows = [[*ids, EOS, *[PAD] * (length - len(ids) - 1)] for ids in sources]
        return torch.tensor(rows, device=self.model.source_embedding.device)
