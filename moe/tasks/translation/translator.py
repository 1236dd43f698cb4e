"""Translation of texts with a trained model, in one process."""

import collections.abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from moe.data.pairs import Tokenizers
from moe.data.tokenizer import EOS, PAD
from moe.records import Ending, Reason
from moe.spec import spec_error
from moe.spec.generation import GenerationSpec
from moe.tasks.decoding.text import before_stop
from moe.tasks.task import Generator
from moe.tasks.translation.decoding import max_target_tokens, translate
from moe.tasks.translation.model import TranslationModel

_BATCH_ROWS = 128


@dataclass(frozen=True)
class _Translation:
    tokens: list[int]
    has_ended: bool
    """Otherwise it was truncated."""


class Translator(Generator):
    """Translates texts with a trained model."""

    def __init__(self, model: TranslationModel, tokenizers: Tokenizers, max_tokens: int) -> None:
        self._model, self._tokenizers, self._max_tokens = model, tokenizers, max_tokens

    @classmethod
    def from_files(cls, model: nn.Module, max_tokens: int, read: Callable[[str], bytes]) -> "Translator":
        """Translator with the tokenizers that `read` returns by file name."""
        assert isinstance(model, TranslationModel)
        return cls(model, Tokenizers.read(read), max_tokens)

    def generate(self, texts: Sequence[str], spec: GenerationSpec | None = None) -> list[str]:
        """Translation of each text; greedy decoding without `spec`. Empty texts stay empty.

        Sources are truncated to the training length (`data.max_tokens`); so are translations, which are also truncated
        if much longer than their source.
        """
        return [text for text, _ in self._translate(texts, spec)]

    def stream(self, text: str, spec: GenerationSpec | None = None) -> collections.abc.Generator[str, None, Ending]:
        """Translation in one piece: it is short, and beam search knows it only at the end."""
        ((translation, ending),) = self._translate([text], spec)
        if translation:
            yield translation
        return ending

    def save_tokenizers(self, folder: Path) -> None:
        self._tokenizers.save(folder)

    def _translate(self, texts: Sequence[str], spec: GenerationSpec | None) -> list[tuple[str, Ending]]:
        """Translation of each text and how it ended. Raises SpecError for requests of chat or log-probabilities."""
        for option in ("chat", "log_probs"):
            if spec is not None and getattr(spec, option):
                raise spec_error("not_applicable", option, True, "does not apply to a translation model",
                                 "omit it, or use a language model")  # fmt: skip
        source_ids = [ids[: self._max_tokens - 1] for ids in self._tokenizers.source.encode_batch(list(texts))]
        order = sorted((row for row, ids in enumerate(source_ids) if ids), key=lambda row: len(source_ids[row]))
        translations = [("", Ending("end", 0))] * len(texts)
        for start in range(0, len(order), _BATCH_ROWS):
            rows = order[start : start + _BATCH_ROWS]
            for row, output in zip(rows, self._decode_batch(rows, source_ids, spec), strict=True):
                text = self._tokenizers.target.decode(output.tokens)
                cut = before_stop(text, spec.stop if spec else ())
                reason: Reason = "stop" if cut is not None else "end" if output.has_ended else "max_tokens"
                translations[row] = text if cut is None else cut, Ending(reason, len(output.tokens))
        return translations

    def _decode_batch(
        self, rows: list[int], source_ids: list[list[int]], spec: GenerationSpec | None
    ) -> list[_Translation]:
        """Decode the sources with the numbers `rows`."""
        source = self._pad([source_ids[row] for row in rows])
        longest = self._max_tokens if spec is None else min(spec.max_tokens, self._max_tokens)
        limits = [min(max_target_tokens(len(source_ids[row]) + 1), longest) for row in rows]
        spec = (spec or GenerationSpec()).model_copy(update={"max_tokens": max(limits)})
        outputs = translate(self._model, source, spec, limits, text_numbers=rows)
        return [_Translation(ids, len(ids) < limit) for ids, limit in zip(outputs, limits, strict=True)]

    def _pad(self, sources: list[list[int]]) -> torch.Tensor:
        """int64 [B, L]: source ids with EOS and padding."""
        length = max(map(len, sources)) + 1
        rows = [[*ids, EOS, *[PAD] * (length - len(ids) - 1)] for ids in sources]
        return torch.tensor(rows, device=self._model.source_embedding.device)
