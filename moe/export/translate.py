"""A committed checkpoint as a translator: one process, no service, no Ray."""

import json
from collections.abc import Sequence

import torch

from moe.data import EOS, PAD, Tokenizers
from moe.models import TranslationModel, build_model, greedy_decode
from moe.parallel import Layout
from moe.spec import JobSpec
from moe.train import marker as markers
from moe.train import shards
from moe.train.checkpoint import CheckpointError
from moe.train.folder import Folder
from moe.train.run_files import SPEC, TOKENIZERS

_BATCH_ROWS = 128


class Translator:
    """Translates texts with the model of one checkpoint, whatever number of ranks saved it."""

    def __init__(self, model: TranslationModel, tokenizers: Tokenizers, max_tokens: int) -> None:
        self.model, self._tokenizers, self._max_tokens = model, tokenizers, max_tokens

    @classmethod
    def load(cls, checkpoint_folder: str, device: torch.device | str = "cpu") -> "Translator":
        """The translator of a checkpoint's folder (a path or fsspec URL, `.../checkpoints/step-...`).

        Every file is verified against the marker beside the folder before any is used. Raises CheckpointError
        where the checkpoint is not committed or not whole.
        """
        parent, _, name = checkpoint_folder.rstrip("/").rpartition("/")
        checkpoints, held = Folder(parent or "."), Folder(checkpoint_folder)
        _verify(checkpoints, name)
        spec = JobSpec.model_validate(json.loads(held.read(SPEC)))
        model = build_model(
            spec.model,
            Layout.single(device),
            seed=spec.train.seed,
            dtype=getattr(torch, spec.train.dtype),
        )
        shards.load(held.url, {f"model.{name}": each.detach() for name, each in model.named_parameters()})
        return cls(model, Tokenizers.load(held.url_of(TOKENIZERS)), spec.data.max_tokens)

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
        return torch.tensor(rows, device=self.model.layout.device)


def _verify(checkpoints: Folder, name: str) -> None:
    rule = "must be a committed, undamaged checkpoint"
    try:
        fault = markers.fault(checkpoints, markers.read(checkpoints, name))
    except FileNotFoundError:
        fault = f"it has no marker {name}{markers.SUFFIX} beside it"
    except ValueError as error:
        fault = str(error)
    if fault is not None:
        others = ", ".join(markers.committed(checkpoints)) or "none there"
        raise CheckpointError(
            f"{checkpoints.url_of(name)} {rule}, but {fault}; committed in that folder: {others}"
        )
