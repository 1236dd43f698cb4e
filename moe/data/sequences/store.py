"""Packed sequences on disk, memory-mapped.

A document is stored as BOS, its ids and EOS; one with spans as its ids alone. The inputs of a piece are its own
positions, and its labels are the ids one position later.
"""

import json
from array import array
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe.data.conversations.conversation import NO_ROLE
from moe.data.ragged import RaggedArray, map_npy, map_raw, starts_of
from moe.data.sequences.encoding import EncodedDocument
from moe.data.sequences.packing import Packing, pack, pack_apart, pack_whole
from moe.data.tokenizer import PAD

_CHUNK_IDS = 1 << 22
TOGETHER = "together"
"""Name of the rows of all sources, unless each source has rows of its own."""


class SequenceRows(NamedTuple):
    """b sequences of L positions."""

    tokens: NDArray[np.int64]
    """[b, L], inputs; PAD where padded."""
    documents: NDArray[np.int32]
    """[b, L], index of each position's piece in its row, from 0; -1 where padded."""
    labels: NDArray[np.int64]
    """[b, L], labels; -1 where padded or not learned."""


class SequenceStore:
    """Sequences by index, those of a source together, and their documents' text if stored."""

    def __init__(self, folder: str | Path) -> None:
        """Map the files that a `StoreWriter` wrote to `folder`."""
        folder = Path(folder)
        facts = json.loads((folder / "store.json").read_text(encoding="utf-8"))
        self.max_tokens: int = facts["max_tokens"]
        """L"""
        self.sources: tuple[str, ...] = tuple(facts["sources"])
        self.source_rows: tuple[int, ...] = tuple(facts["source_rows"])
        """The first row of each source, and the number of rows."""
        self.source_counts: dict[str, dict[str, int]] = facts.get("source_counts", {})
        """Documents, tokens and targets by source; empty in stores of earlier releases."""
        self.num_documents: int = facts["num_documents"]
        self.num_tokens: int = facts["num_tokens"]
        """Positions in use."""
        self.num_targets: int = facts.get("num_targets", self.num_tokens)
        """Positions with a label: all in use, if everything is learned."""
        self.num_linked: int = facts.get("num_each", 1)
        """Number of consecutive pieces of a row that belong together: 2 are a pair, the preferred one first."""
        self.num_bytes: int = facts["num_bytes"]
        """Bytes of the documents' text in UTF-8, or of the learned text if not all is learned."""
        self.bos_id: int = facts["bos_id"]
        self._ids = map_raw(folder / "ids.bin", np.dtype(facts["dtype"]))
        self._piece_starts = map_npy(folder / "piece_starts.npy")
        self._piece_lengths = map_npy(folder / "piece_lengths.npy")
        self._row_starts = map_npy(folder / "row_starts.npy")
        self.row_lengths = map_npy(folder / "row_lengths.npy")
        """int32 [num_rows], positions in use."""
        self._label_mask = None
        self.row_targets = self.row_lengths
        """int32 [num_rows], labels; of pairs or labelled documents, their number."""
        if (folder / "learned.bin").exists():
            self._label_mask = map_raw(folder / "learned.bin", np.dtype(np.bool_))
            self.row_targets = map_npy(folder / "row_targets.npy")
        self._roles = None
        if (folder / "roles.bin").exists():
            self._roles = map_raw(folder / "roles.bin", np.dtype(np.uint8))
        self._desirable = None
        if (folder / "desirable.npy").exists():
            self._desirable = map_npy(folder / "desirable.npy")
        self._texts: RaggedArray | None = None
        if (folder / "text.starts.npy").exists():
            content = map_raw(folder / "text.bin", np.dtype(np.uint8))
            self._texts = RaggedArray(content, map_npy(folder / "text.starts.npy"))

    @property
    def num_rows(self) -> int:
        return len(self.row_lengths)

    def rows(self, indices: NDArray[np.int64] | Sequence[int]) -> SequenceRows:
        """The sequences of some rows, in that order."""
        shape, flat_positions, positions, numbers = self._positions_of(indices)
        tokens, labels = np.full(shape, PAD, np.int64), np.full(shape, -1, np.int64)
        documents = np.full(shape, -1, np.int32)
        tokens.reshape(-1)[flat_positions] = self._ids[positions]
        labels.reshape(-1)[flat_positions] = self._labels(positions)
        documents.reshape(-1)[flat_positions] = numbers
        return SequenceRows(tokens, documents, labels)

    def roles(self, indices: NDArray[np.int64] | Sequence[int]) -> NDArray[np.uint8]:
        """[b, L], roles of the tokens of some rows: index in `TOKEN_ROLES`, or `NO_ROLE`, also where padded."""
        assert self._roles is not None
        shape, flat_positions, positions, _ = self._positions_of(indices)
        roles = np.full(shape, NO_ROLE, np.uint8)
        roles.reshape(-1)[flat_positions] = self._roles[positions]
        return roles

    def _positions_of(
        self, indices: NDArray[np.int64] | Sequence[int]
    ) -> tuple[tuple[int, int], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Shape [b, L] of some rows; for each position in use, its index in the flattened rows, its index on disk, and
        the index of its piece in its row."""
        rows = np.asarray(indices, np.int64)
        first = self._row_starts[rows]
        num_pieces = self._row_starts[rows + 1] - first
        row_of_piece = np.repeat(np.arange(len(rows)), num_pieces)
        number = _counts_within(num_pieces)
        pieces = np.repeat(first, num_pieces) + number
        lengths = self._piece_lengths[pieces].astype(np.int64)
        offsets = _counts_within(lengths)
        # The pieces of a row are contiguous.
        flat_positions = np.repeat(row_of_piece * self.max_tokens, lengths) + _counts_within(
            np.bincount(row_of_piece, weights=lengths, minlength=len(rows)).astype(np.int64)
        )
        positions = np.repeat(self._piece_starts[pieces], lengths) + offsets
        return (len(rows), self.max_tokens), flat_positions, positions, np.repeat(number, lengths)

    def desirable(self, indices: NDArray[np.int64] | Sequence[int]) -> NDArray[np.bool_]:
        """bool [b, P], labels of the documents of some rows; False where a row has fewer than P."""
        assert self._desirable is not None
        rows = np.asarray(indices, np.int64)
        first = self._row_starts[rows]
        num_pieces = self._row_starts[rows + 1] - first
        labels = np.zeros((len(rows), int(num_pieces.max(initial=0))), np.bool_)
        for row, (start, number) in enumerate(zip(first, num_pieces, strict=True)):
            labels[row, :number] = self._desirable[start : start + number]
        return labels

    @property
    def has_labels(self) -> bool:
        """Whether documents are desirable or undesirable answers."""
        return self._desirable is not None

    @cached_property
    def role_indices(self) -> tuple[int, ...]:
        """Roles of all tokens on disk, ascending; none in stores for training, or of documents."""
        return () if self._roles is None else tuple(np.unique(self._roles).tolist())

    @property
    def has_spans(self) -> bool:
        """Whether documents have spans, and are stored whole."""
        return self._label_mask is not None

    def _labels(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        ids = self._ids[positions + 1].astype(np.int64)
        return ids if self._label_mask is None else np.where(self._label_mask[positions + 1], ids, -1)

    def beginning(self, index: int) -> NDArray[np.int64]:
        """Ids of a document with spans before the first learned one; of a pair, those of the preferred document."""
        assert self._label_mask is not None
        start, stop = self._document_starts[index * self.num_linked : index * self.num_linked + 2]
        first = int(np.argmax(self._label_mask[start + 1 : stop])) + 1
        return self._ids[start : start + first].astype(np.int64)

    @cached_property
    def _document_starts(self) -> NDArray[np.int64]:
        order = np.argsort(self._piece_starts)
        last = self._piece_starts[order[-1:]] + self._piece_lengths[order[-1:]] + 1
        return np.concatenate([self._piece_starts[order], last])

    def text(self, index: int) -> bytes:
        """Text of a document in UTF-8. Only stores of held-out documents have it."""
        if self._texts is None:
            raise ValueError("this store has no text: only held-out stores do")
        return bytes(self._texts[index].tobytes())

    def texts(self, max_bytes: int | None = None) -> Iterator[bytes]:
        """Texts of all documents in UTF-8; if they have more than about `max_bytes`, of evenly spaced documents, each
        cut to `max_bytes`."""
        stride = 1 if max_bytes is None else max(1, -(-self.num_bytes // max_bytes))
        return (self.text(index)[:max_bytes] for index in range(0, self.num_documents, stride))

    def label_counts(self, num_ids: int) -> NDArray[np.int64]:
        """[num_ids], how often each id is a label."""
        counts = np.zeros(num_ids, np.int64)
        if self._label_mask is not None:
            for start in range(0, len(self._ids), _CHUNK_IDS):
                chunk = slice(start, start + _CHUNK_IDS)
                counts += np.bincount(self._ids[chunk][self._label_mask[chunk]], minlength=num_ids)
            return counts
        for start in range(0, len(self._ids), _CHUNK_IDS):
            counts += np.bincount(self._ids[start : start + _CHUNK_IDS], minlength=num_ids)
        counts[self.bos_id] -= self.num_documents  # only the first id of a document has no preceding id
        return counts


class StoreWriter:
    """Writes a store, document by document; the documents of a source must be consecutive."""

    def __init__(
        self,
        folder: Path,
        sources: Sequence[str],
        dtype: np.dtype[Any],
        bos_id: int,
        eos_id: int,
        *,
        keeps_text: bool,
        num_linked: int = 1,
        has_spans: bool = False,
        has_labels: bool = False,
        has_roles: bool = False,
        plain_sources: Collection[str] = (),
        packing: str = "by_source",
    ) -> None:
        """`plain_sources`: those without spans among others; `packing` as of `DocumentCorpus`."""
        folder.mkdir()
        self._has_labels = has_labels
        self._desirable = [array("b") for _ in sources]
        self._plain_sources, self._packing = frozenset(plain_sources), packing
        self._num_linked = num_linked
        self._folder, self._sources, self._dtype = folder, list(sources), dtype
        self._bos_id, self._eos_id = bos_id, eos_id
        self._lengths = [array("q") for _ in sources]
        self._text_starts = array("q", [0]) if keeps_text else None
        self._num_bytes = 0
        self._open = ExitStack()
        self._ids = self._open.enter_context((folder / "ids.bin").open("wb"))
        self._text = self._open.enter_context((folder / "text.bin").open("wb")) if keeps_text else None
        self._label_mask = self._open.enter_context((folder / "learned.bin").open("wb")) if has_spans else None
        self._roles = self._open.enter_context((folder / "roles.bin").open("wb")) if has_roles else None
        self._num_learned = [array("q") for _ in sources]

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def add(self, source: str, ids: NDArray[Any], text: bytes) -> None:
        """Append a document. Raises ValueError if its source is out of order."""
        index = self._place_of(source)
        num_labels = len(ids) + 1
        self._lengths[index].append(num_labels)
        self._num_learned[index].append(num_labels)
        for part_ids in ([self._bos_id], ids, [self._eos_id]):
            self._ids.write(np.asarray(part_ids, self._dtype).tobytes())
        if self._label_mask is not None:
            self._label_mask.write(b"\0" + b"\1" * num_labels)  # nothing predicts the first
        self._add_text(text)

    def add_whole(self, source: str, linked_documents: Sequence[EncodedDocument]) -> None:
        """Append documents with spans that belong together. Raises ValueError if their source is out of order."""
        index = self._place_of(source)
        assert self._label_mask is not None
        for document in linked_documents:
            assert document.label_mask is not None
            self._ids.write(document.ids.astype(self._dtype).tobytes())
            self._label_mask.write(
                np.concatenate([[False], document.label_mask[1:]]).tobytes()
            )  # nothing predicts the first
            if self._roles is not None:
                assert document.roles is not None
                self._roles.write(document.roles.tobytes())
            self._lengths[index].append(len(document.ids) - 1)
            self._num_learned[index].append(document.num_learned)
            self._desirable[index].append(bool(document.document.is_desirable))
        self._add_text(linked_documents[0].text)

    def _place_of(self, source: str) -> int:
        index = self._sources.index(source)
        if any(self._lengths[index + 1 :]):
            raise ValueError(f"a document of {source} follows those of another source")
        return index

    def _add_text(self, text: bytes) -> None:
        self._num_bytes += len(text)
        if self._text is not None and self._text_starts is not None:
            self._text.write(text)
            self._text_starts.append(self._num_bytes)

    def num_documents(self, source: str) -> int:
        """Number of documents added of a source."""
        return len(self._lengths[self._sources.index(source)]) // self._num_linked

    def _pack(self, source: str, lengths: NDArray[np.int64], max_tokens: int) -> Packing:
        if self._packing == "none":
            return pack_apart(lengths, max_tokens)
        if self._packing == "together":
            return pack(lengths, max_tokens, cuts_to_fill=False)
        if self._label_mask is None or source in self._plain_sources:
            return pack(lengths, max_tokens)
        return pack_whole(lengths, max_tokens, self._num_linked)

    def _source_counts(self) -> dict[str, dict[str, int]]:
        return {
            name: {"documents": len(lengths) // self._num_linked, "tokens": sum(lengths), "targets": sum(num_learned)}
            for name, lengths, num_learned in zip(self._sources, self._lengths, self._num_learned, strict=True)
        }

    def finish(self, max_tokens: int) -> None:
        """Pack what was added into rows of `max_tokens` positions, each of one source unless packed otherwise."""
        self._open.close()
        sources, lengths = self._sources, [np.array(source_lengths, np.int64) for source_lengths in self._lengths]
        source_counts = self._source_counts()
        if self._packing == "together":
            sources, lengths = [TOGETHER], [np.concatenate(lengths)]
        packings = [self._pack(name, part, max_tokens) for name, part in zip(sources, lengths, strict=True)]
        firsts = starts_of(map(len, lengths))
        first_pieces = starts_of(len(part.lengths) for part in packings)
        packing = Packing(
            np.concatenate([part.documents + first for part, first in zip(packings, firsts, strict=False)]),
            np.concatenate([part.starts for part in packings]),
            np.concatenate([part.lengths for part in packings]),
            np.concatenate(
                [*(part.row_starts[:-1] + first for part, first in zip(packings, first_pieces, strict=False)),
                 first_pieces[-1:]]
            ),
        )  # fmt: skip
        document_lengths = np.concatenate(lengths)
        document_starts = np.cumsum(document_lengths + 1) - (
            document_lengths + 1
        )  # each has one id more than positions
        folder, extra_facts = self._folder, dict[str, int]()
        np.save(folder / "piece_starts.npy", document_starts[packing.documents] + packing.starts)
        np.save(folder / "piece_lengths.npy", packing.lengths.astype(np.int32))
        np.save(folder / "row_starts.npy", packing.row_starts)
        ends = np.concatenate([[0], np.cumsum(packing.lengths)])[packing.row_starts]
        np.save(folder / "row_lengths.npy", np.diff(ends).astype(np.int32))
        if self._label_mask is not None:
            num_learned = np.concatenate([np.array(source_counts, np.int64) for source_counts in self._num_learned])
            counts_tokens = self._num_linked == 1 and not self._has_labels
            piece_targets = num_learned[packing.documents] if counts_tokens else np.ones(len(document_lengths))
            if self._plain_sources:
                is_plain = np.repeat([name in self._plain_sources for name in self._sources],
                                     [len(part) for part in self._lengths])[packing.documents]  # fmt: skip
                piece_targets = np.where(is_plain, packing.lengths, piece_targets)
            sums = np.concatenate([[0], np.cumsum(piece_targets)])[packing.row_starts]
            np.save(folder / "row_targets.npy", (np.diff(sums) / self._num_linked).astype(np.int32))
            extra_facts = {"num_targets": int(num_learned.sum()), "num_each": self._num_linked}
        if self._has_labels:
            labels = np.concatenate([np.array(source_labels, np.bool_) for source_labels in self._desirable])
            np.save(folder / "desirable.npy", labels[packing.documents])
        if self._text_starts is not None:
            np.save(folder / "text.starts.npy", np.array(self._text_starts, np.int64))
        facts = {
            "max_tokens": max_tokens,
            "sources": sources,
            "source_counts": source_counts,
            "source_rows": starts_of(part.num_rows for part in packings).tolist(),
            "num_documents": len(document_lengths) // self._num_linked,
            "num_tokens": int(document_lengths.sum()),
            "num_bytes": self._num_bytes,
            "bos_id": self._bos_id,
            "dtype": self._dtype.str,
            **extra_facts,
        }
        (folder / "store.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")


def _counts_within(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1, 2, ... for each of several consecutive runs: int64 [sum of lengths]."""
    starts = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) - np.repeat(starts, lengths)
