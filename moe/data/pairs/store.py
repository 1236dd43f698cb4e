"""Tokenised pairs on disk, memory-mapped. (Preparing a corpus needs memory: 2.5 GB for 1.4 million short pairs.)"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe.data.pairs.pair import Pair
from moe.data.ragged import RaggedArray, map_npy, starts_of
from moe.data.tokenizer import EOS

Ids = NDArray[Any]


class TokenStore:
    """Pairs by index, as token ids and as text. Lengths count the EOS that ends every source and target."""

    def __init__(self, folder: str | Path) -> None:
        """Map the files that `write` wrote to `folder`."""
        folder = Path(folder)
        self.langs: tuple[str, ...] = tuple(json.loads((folder / "langs.json").read_text(encoding="utf-8")))
        self.lang_ids = map_npy(folder / "lang_ids.npy")
        """int32 [num_pairs], indices into `langs`."""
        self._ids = {
            side: RaggedArray(map_npy(folder / f"{side}.ids.npy"), map_npy(folder / f"{side}.starts.npy"))
            for side in ("source", "target")
        }
        self._texts = RaggedArray(map_npy(folder / "text.npy"), map_npy(folder / "text.starts.npy"))
        """Source and target of each pair in turn, in UTF-8."""
        self.source_lengths = self._ids["source"].lengths()
        self.target_lengths = self._ids["target"].lengths()

    @property
    def num_pairs(self) -> int:
        return len(self.lang_ids)

    def source(self, index: int) -> NDArray[np.int32]:
        """The source's ids, EOS last: int32 [source_lengths[index]]."""
        return self._ids["source"][index].astype(np.int32)

    def target(self, index: int) -> NDArray[np.int32]:
        """The target's ids, EOS last, which a model learns to predict: int32 [target_lengths[index]]."""
        return self._ids["target"][index].astype(np.int32)

    def text(self, index: int) -> tuple[str, str, str]:
        """(source, target, language) as cleaned."""
        source, target = (self._texts[2 * index + side].tobytes().decode() for side in (0, 1))
        return source, target, self.langs[self.lang_ids[index]]

    def pad_rows(self, side: str, rows: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """One side of several pairs as int64 [len(rows), length], zeros (PAD) after each row's EOS."""
        return self._ids[side].pad_rows(rows, length)

    @staticmethod
    def write(
        folder: Path, pairs: Sequence[Pair], sources: Sequence[Ids], targets: Sequence[Ids], langs: Sequence[str]
    ) -> None:
        """Write pairs with their ids (without EOS) to a new folder."""
        folder.mkdir()
        (folder / "langs.json").write_text(json.dumps(list(langs), ensure_ascii=False), encoding="utf-8")
        lang_ids = {lang: index for index, lang in enumerate(langs)}
        np.save(folder / "lang_ids.npy", np.array([lang_ids[pair.lang] for pair in pairs], np.int32))
        for side, rows in {"source": sources, "target": targets}.items():
            starts = starts_of(len(row) + 1 for row in rows)
            ids = np.full(starts[-1], EOS, np.int32)
            for start, row in zip(starts, rows, strict=False):
                ids[start : start + len(row)] = row
            np.save(folder / f"{side}.starts.npy", starts)
            np.save(folder / f"{side}.ids.npy", ids.astype(np.uint16) if ids.max(initial=0) < 2**16 else ids)
        texts = [text.encode() for pair in pairs for text in (pair.source, pair.target)]
        np.save(folder / "text.starts.npy", starts_of(map(len, texts)))
        np.save(folder / "text.npy", np.frombuffer(b"".join(texts), np.uint8))
