"""Windows of a partition: documents of all sources in proportion, tokenized and packed into a store."""

from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe.data.sequences.corpus import SourceDocument
from moe.data.sequences.documents import is_held_out_document, reader_of
from moe.data.sequences.encoding import encode_documents, id_type
from moe.data.sequences.store import StoreWriter
from moe.data.sequences.stream.order import PieceOrder, SourcePosition, WindowPosition
from moe.data.sequences.stream.plan import StreamPlan
from moe.data.sequences.stream.reading import WAITS_S, ShardTexts
from moe.data.text import as_characters
from moe.data.tokenizer import Tokenizer
from moe.spec import spec_error

SOURCE = "stream"
"""Name of the only source in a window's store: its rows hold documents of all sources."""
TOKENS_BY_SOURCE = "tokens_by_source.npy"
_MIN_RECORDS = 1000
"""Records of which a share may be unusable, even if fewer have been read yet."""
_MAX_EMPTY_PIECES = 64
"""Consecutive pieces without a usable document, in passes through a source, after which it is refused."""


class PartitionReader:
    """Writes the windows of one partition, in order or from any position."""

    def __init__(
        self, plan: StreamPlan, partition: int, tokenizer: Tokenizer, waits_s: Sequence[float] = WAITS_S
    ) -> None:
        self._plan, self._tokenizer = plan, tokenizer
        self._readers = [_SourceReader(plan, index, partition, waits_s) for index in range(len(plan.data.sources))]

    def write_window(self, start: WindowPosition, folder: Path) -> WindowPosition:
        """Write the store of the window that begins at `start` to the new `folder`; return the next one's beginning.
        Raises SpecError for faults of the user's files."""
        for reader, position in zip(self._readers, start.sources, strict=True):
            reader.seek(position)
        lengths, sources = array("q"), array("q")
        tokenizer, number = self._tokenizer, start.number

        def documents() -> Iterator[SourceDocument]:
            nonlocal number
            while not sources:  # a long document may cover several windows
                number += 1
                for index, reader in enumerate(self._readers):
                    for text in reader.texts_until(self._plan.text_bytes(index, number)):
                        sources.append(index)
                        yield SourceDocument(SOURCE, text, False)

        ids = id_type(tokenizer), tokenizer.bos_id, tokenizer.eos_id
        with StoreWriter(folder, [SOURCE], *ids, keeps_text=False) as store:
            for document in encode_documents(tokenizer, documents()):
                store.add(SOURCE, document.ids, b"")
                lengths.append(len(document.ids) + 1)
            for reader in self._readers:
                reader.require_usable()
            store.finish(self._plan.data.max_tokens)
        tokens = _tokens_by_source(folder, np.array(lengths), np.array(sources), len(self._readers))
        np.save(folder / TOKENS_BY_SOURCE, tokens)
        return WindowPosition(number, start.first_row + len(tokens), tuple(reader.position for reader in self._readers))


class _SourceReader:
    """Documents of one source for one partition, piece after piece."""

    def __init__(self, plan: StreamPlan, source: int, partition: int, waits_s: Sequence[float]) -> None:
        self._data, self._partition, self._waits_s = plan.data, partition, waits_s
        self._place = f"data.sources[{source}].{plan.data.sources[source].files_field}"
        self._name = plan.data.source_names[source]
        shards = plan.shards.sources[source]
        self._reader, self._shards = reader_of(plan.data, source, shards.format), shards.shards
        self._is_text = shards.format == "text"
        self._order = PieceOrder(plan.seed, source, len(self._shards), plan.num_partitions)
        self.position = SourcePosition()
        self._texts: tuple[ShardTexts, Iterator[str]] | None = None

    def seek(self, position: SourcePosition) -> None:
        """Continue at a position."""
        if position != self.position:
            self.position, self._texts = position, None

    def texts_until(self, num_bytes: int) -> Iterator[str]:
        """Documents for training until `num_bytes` of text have been read since the beginning of the partition."""
        num_empty = 0
        while self.position.num_bytes < num_bytes:
            before = self.position
            for text in self._piece():
                self.position = self.position._replace(num_bytes=self.position.num_bytes + len(text.encode()))
                yield text
                if self.position.num_bytes >= num_bytes:
                    return
            num_empty = 0 if self.position.num_bytes > before.num_bytes else num_empty + 1
            if num_empty > _MAX_EMPTY_PIECES * self._order.num_pieces:
                places = ", ".join(str(shard.file.location) for shard in self._shards[:3])
                rule = "has no documents with text for training"
                raise spec_error("empty", self._place, places, rule, "add text, or omit it")

    def require_usable(self) -> None:
        """Raise SpecError for unusable records: any, or more than may be skipped."""
        if self._texts is not None:
            self._texts[0].require_usable()
        position, max_share = self.position, self._data.max_bad_share
        if position.num_bad > max_share * max(position.num_records, _MIN_RECORDS):
            rule = f"is below the share of unusable records of {self._name}: {position.num_bad:,} of "
            rule += f"{position.num_records:,} read so far"
            raise spec_error("bad_records", "data.max_bad_share", max_share, rule,
                             "correct the records, or raise this share")  # fmt: skip

    def _piece(self) -> Iterator[str]:
        """The rest of the current piece's documents; then moves on to the next piece."""
        piece = self._order.piece(self._partition, self.position.piece)
        if self._texts is None:
            texts = ShardTexts(
                self._shards[piece.shard],
                self._reader,
                self._data,
                self.position.document,
                is_one_document=self._is_text,
                waits_s=self._waits_s,
            )
            self._texts = texts, iter(texts)
            self._before = self.position
        texts, documents = self._texts
        for text in documents:
            self._move(texts, document=self.position.document + 1)
            if (self.position.document - 1) % piece.num_strides == piece.stride and text.strip():
                text = as_characters(text)
                if not is_held_out_document(text, self._data.held_out):
                    yield text
        self._move(texts, piece=self.position.piece + 1, document=0)
        texts.require_usable()
        self._texts = None

    def _move(self, texts: ShardTexts, **changes: int) -> None:
        records, bad = self._before.num_records + texts.num_records, self._before.num_bad + texts.num_bad
        self.position = self.position._replace(num_records=records, num_bad=bad, **changes)


def _tokens_by_source(
    folder: Path, lengths: NDArray[np.int64], sources: NDArray[np.int64], num_sources: int
) -> NDArray[np.int64]:
    """int64 [num_rows, num_sources]: tokens of each source in each row of a store, from the positions and sources of
    its documents in order."""
    row_starts, piece_starts = np.load(folder / "row_starts.npy"), np.load(folder / "piece_starts.npy")
    document_starts = np.cumsum(lengths + 1) - (lengths + 1)  # each has one id more than positions
    documents = np.searchsorted(document_starts, piece_starts, side="right") - 1
    tokens = np.zeros((len(row_starts) - 1, num_sources), np.int64)
    rows = np.repeat(np.arange(len(tokens)), np.diff(row_starts))
    np.add.at(tokens, (rows, sources[documents]), np.load(folder / "piece_lengths.npy"))
    return tokens
