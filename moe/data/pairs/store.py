"""Tokenised pairs on disk, memory-mapped: training costs only the pages that are read, once for all ranks of a node.

(Preparing a corpus holds it in memory: 2.5 GB for 1.4 million short pairs.)
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe.data.pairs.pair import Pair
from moe.data.tokenizer import EOS

Ids = NDArray[Any]


class TokenStore:
    """Pairs by index, as token ids and as text. Lengths count the EOS that ends every source and target."""

    def __init__(self, folder: str | Path) -> None:
        """Map what `write` left in `folder`."""
        folder = Path(folder)
        self.langs: tuple[str, ...] = tuple(json.loads((folder / "langs.json").read_text(encoding="utf-8")))
        self.lang_ids = _map(folder / "lang_ids.npy")
        """int32 [num_pairs], indices into `langs`."""
        self._ids = {side: _map(folder / f"{side}.ids.npy") for side in ("source", "target")}
        self._starts = {side: _map(folder / f"{side}.starts.npy") for side in ("source", "target")}
        self._text = _map(folder / "text.npy")
        self._text_starts = _map(folder / "text.starts.npy")
        self.source_lengths = np.diff(self._starts["source"]).astype(np.int32)
        self.target_lengths = np.diff(self._starts["target"]).astype(np.int32)

    @property
    def num_pairs(self) -> int:
        return len(self.lang_ids)

    def source(self, index: int) -> NDArray[np.int32]:
        """The source's ids, EOS last: int32 [source_lengths[index]]."""
        return self._token_ids("source", index)

    def target(self, index: int) -> NDArray[np.int32]:
        """The target's ids, EOS last, which is what a model is to predict: int32 [target_lengths[index]]."""
        return self._token_ids("target", index)

    def text(self, index: int) -> tuple[str, str, str]:
        """(source, target, language) as cleaned."""
        start, middle, end = self._text_starts[2 * index : 2 * index + 3]
        source, target = self._text[start:middle].tobytes(), self._text[middle:end].tobytes()
        return source.decode(), target.decode(), self.langs[self.lang_ids[index]]

    def pad_rows(self, side: str, rows: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """One side of several pairs as int64 [len(rows), length], zeros (PAD) after each row's EOS."""
        starts = self._starts[side]
        ends = starts[rows + 1]
        positions = starts[rows][:, None] + np.arange(length)
        real = positions < ends[:, None]
        ids = self._ids[side][np.where(real, positions, 0)]
        return np.where(real, ids, 0).astype(np.int64)

    def _token_ids(self, side: str, index: int) -> NDArray[np.int32]:
        start, end = self._starts[side][index : index + 2]
        return self._ids[side][start:end].astype(np.int32)

    @staticmethod
    def write(
        folder: Path,
        pairs: Sequence[Pair],
        sources: Sequence[Ids],
        targets: Sequence[Ids],
        langs: Sequence[str],
    ) -> None:
        """Write pairs with their ids (EOS not yet there) into a new folder."""
        folder.mkdir()
        (folder / "langs.json").write_text(json.dumps(list(langs), ensure_ascii=False), encoding="utf-8")
        lang_ids = {lang: index for index, lang in enumerate(langs)}
        np.save(folder / "lang_ids.npy", np.array([lang_ids[pair.lang] for pair in pairs], np.int32))
        for side, rows in {"source": sources, "target": targets}.items():
            starts = _starts(len(row) + 1 for row in rows)
            ids = np.full(starts[-1], EOS, np.int32)
            for start, row in zip(starts, rows, strict=False):
                ids[start : start + len(row)] = row
            np.save(folder / f"{side}.starts.npy", starts)
            np.save(folder / f"{side}.ids.npy", ids.astype(np.uint16) if ids.max(initial=0) < 2**16 else ids)
        texts = [text.encode() for pair in pairs for text in (pair.source, pair.target)]
        np.save(folder / "text.starts.npy", _starts(map(len, texts)))
        np.save(folder / "text.npy", np.frombuffer(b"".join(texts), np.uint8))


def _starts(lengths: Iterable[int]) -> NDArray[np.int64]:
    """Beginning of each of several runs that are laid end to end, and the end of the last."""
    return np.cumsum([0, *lengths], dtype=np.int64)


def _map(path: Path) -> NDArray[Any]:
    # Plain arrays over the map: numpy.memmap itself spends microseconds on every slice.
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
