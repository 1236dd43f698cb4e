"""Windows of a partition: documents of all sources in proportion, tokenized and packed into a store."""

import errno
import os
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe.data.conversations.template import ChatTemplate
from moe.data.faults import Faults
from moe.data.sequences.chat_sources import packing_of
from moe.data.sequences.corpus import SourceDocument
from moe.data.sequences.encoding import encode_documents, id_type
from moe.data.sequences.store import StoreWriter
from moe.data.sequences.stream.order import PieceOrder, SourcePosition, WindowPosition
from moe.data.sequences.stream.plan import StreamPlan
from moe.data.sequences.stream.reading import WAITS_S, ShardRecords
from moe.data.sequences.stream.records import RecordSource, RecordSources, files_place
from moe.data.sequences.truncation import Truncation
from moe.data.tokenizer import Tokenizer
from moe.spec import ChatSpec, spec_error

TOKENS_BY_SOURCE = "tokens_by_source.npy"
_TOGETHER = "stream"
"""Name of the only source in the store of a window of documents: its rows hold documents of all sources."""
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MIN_RECORDS = 1000
"""Records of which a share may be unusable, even if fewer have been read yet."""
_MAX_EMPTY_PIECES = 64
"""Consecutive pieces without a usable document, in passes through a source, after which it is refused."""


class PartitionReader:
    """Writes the windows of one partition, in order or from any position."""

    def __init__(
        self,
        plan: StreamPlan,
        partition: int,
        tokenizer: Tokenizer,
        template: ChatTemplate | None = None,
        waits_s: Sequence[float] = WAITS_S,
    ) -> None:
        """`template`: chat template, if there are conversations."""
        self._plan, self._tokenizer = plan, tokenizer
        sources = RecordSources(plan.data, template)
        self._readers = [
            _SourceReader(plan, index, partition, sources.source(index, shards.format), waits_s)
            for index, shards in enumerate(plan.shards.sources)
        ]
        self._index_of = {name: index for index, name in enumerate(plan.data.source_names)}

    def write_window(self, start: WindowPosition, folder: Path) -> WindowPosition:
        """Write the store of the window that begins at `start` to the new `folder`; return the next one's beginning.
        Raises SpecError for faults of the user's files, and if the window cannot be written."""
        try:
            return self._write(start, folder)
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise
            rule = f"cannot hold another window: {os.strerror(error.errno)}"
            remedy = "free space there and resume the job, or submit one with a lower data.stream.shuffle_bytes"
            windows = folder.parents[1]  # beside those of other processes
            raise spec_error("not_writable", "data.stream", str(windows), rule, remedy) from None

    def _write(self, start: WindowPosition, folder: Path) -> WindowPosition:
        for reader, position in zip(self._readers, start.sources, strict=True):
            reader.seek(position)
        lengths, sources = array("q"), array("q")
        truncation, number = Truncation(self._plan.data.max_tokens), start.number
        with self._store(folder) as store:
            while not sources:  # a long document may cover several windows
                number += 1
                for encoded in encode_documents(self._tokenizer, self._documents(number)):
                    document = encoded.document
                    if document.spans is None:
                        store.add(document.source if self._is_chat else _TOGETHER, encoded.ids, b"")
                        num_positions = len(encoded.ids) + 1
                    elif fitting_documents := truncation.fit([encoded]):
                        store.add_whole(document.source, fitting_documents)
                        num_positions = len(fitting_documents[0].ids) - 1
                    else:
                        continue
                    lengths.append(num_positions)
                    sources.append(self._index_of[document.source])
                if not sources:
                    self._require_progress(start)
            for reader in self._readers:
                reader.require_usable()
            store.finish(self._plan.data.max_tokens)
        tokens = _tokens_by_source(folder, np.array(lengths), np.array(sources), len(self._readers))
        np.save(folder / TOKENS_BY_SOURCE, tokens)
        return WindowPosition(number, start.first_row + len(tokens), tuple(reader.position for reader in self._readers))

    @property
    def _is_chat(self) -> bool:
        return isinstance(self._plan.data, ChatSpec)

    def _store(self, folder: Path) -> StoreWriter:
        ids = id_type(self._tokenizer), self._tokenizer.bos_id, self._tokenizer.eos_id
        data = self._plan.data
        if not isinstance(data, ChatSpec):
            return StoreWriter(folder, [_TOGETHER], *ids, keeps_text=False)
        plain_sources = [
            name for name, shards in zip(data.source_names, self._plan.shards.sources, strict=True) if shards.format
        ]
        return StoreWriter(
            folder,
            data.source_names,
            *ids,
            keeps_text=False,
            has_spans=True,
            plain_sources=plain_sources,
            packing=packing_of(data),
        )

    def _documents(self, number: int) -> Iterator[SourceDocument]:
        """Documents of all sources, source by source, up to the end of window `number`."""
        for index, reader in enumerate(self._readers):
            yield from reader.documents_until(self._plan.text_bytes(index, number))

    def _require_progress(self, start: WindowPosition) -> None:
        """Raise SpecError if whole passes through all sources since `start` gave no document."""
        if all(reader.has_passed(position) for reader, position in zip(self._readers, start.sources, strict=True)):
            rule = "leaves nothing for training: no conversation has an answer within data.max_tokens "
            rule += f"(={self._plan.data.max_tokens})"
            raise spec_error("empty", "data", None, rule, "raise data.max_tokens")


class _SourceReader:
    """Records of one source for one partition, piece after piece, and their documents."""

    def __init__(
        self, plan: StreamPlan, index: int, partition: int, source: RecordSource[Any], waits_s: Sequence[float]
    ) -> None:
        self._data, self._partition, self._waits_s = plan.data, partition, waits_s
        self._place, self._name = files_place(plan.data, index), plan.data.source_names[index]
        shards = plan.shards.sources[index]
        self._source, self._shards = source, shards.shards
        self._is_text = shards.format == "text"
        self._order = PieceOrder(plan.seed, index, len(self._shards), plan.num_partitions)
        self._pieces_per_pass = -(-self._order.num_pieces // plan.num_partitions)
        self.position = SourcePosition()
        self._records: tuple[ShardRecords, Iterator[Any]] | None = None

    def seek(self, position: SourcePosition) -> None:
        """Continue at a position."""
        if position != self.position:
            self.position, self._records = position, None

    def has_passed(self, position: SourcePosition) -> bool:
        """Whether every piece has been read since a position."""
        return self.position.piece - position.piece > self._pieces_per_pass

    def documents_until(self, num_bytes: int) -> Iterator[SourceDocument]:
        """Documents for training from the records until `num_bytes` of text have been read since the beginning of the
        partition."""
        position, skips = self.position, self._data.on_bad == "skip"
        faults = Faults(skips=skips, max_share=self._data.max_bad_share)
        if skips:
            faults.num_bad, faults.num_records = position.num_bad, max(position.num_records, _MIN_RECORDS)
        yield from self._source.documents(self._records_until(num_bytes), faults)
        if not skips:
            faults.require_none()
            return
        self._count_refused(faults.num_bad - position.num_bad)

    def require_usable(self) -> None:
        """Raise SpecError for unusable records: any, or more than may be skipped."""
        if self._records is not None:
            self._records[0].require_usable()
        position, max_share = self.position, self._data.max_bad_share
        if position.num_bad > max_share * max(position.num_records, _MIN_RECORDS):
            rule = f"is below the share of unusable records of {self._name}: {position.num_bad:,} of "
            rule += f"{position.num_records:,} read so far"
            raise spec_error("bad_records", "data.max_bad_share", max_share, rule,
                             "correct the records, or raise this share")  # fmt: skip

    def _records_until(self, num_bytes: int) -> Iterator[Any]:
        num_empty = 0
        while self.position.num_bytes < num_bytes:
            before = self.position
            for record, text_bytes in self._piece():
                self.position = self.position._replace(num_bytes=self.position.num_bytes + text_bytes)
                yield record
                if self.position.num_bytes >= num_bytes:
                    return
            num_empty = 0 if self.position.num_bytes > before.num_bytes else num_empty + 1
            if num_empty > _MAX_EMPTY_PIECES * self._order.num_pieces:
                places = ", ".join(str(shard.file.location) for shard in self._shards[:3])
                rule = "has no documents with text for training"
                raise spec_error("empty", self._place, places, rule, "add text, or omit it")

    def _piece(self) -> Iterator[tuple[Any, int]]:
        """The rest of the current piece's records, each with its bytes of text; then moves on to the next piece."""
        piece, source = self._order.piece(self._partition, self.position.piece), self._source
        if self._records is None:
            shard_records = ShardRecords(
                self._shards[piece.shard],
                source,
                self._data,
                self.position.document,
                is_one_document=self._is_text,
                waits_s=self._waits_s,
            )
            self._records = shard_records, iter(shard_records)
            self._before = self.position
        shard_records, records = self._records
        for record in records:
            self._move(shard_records, document=self.position.document + 1)
            is_own = (self.position.document - 1) % piece.num_strides == piece.stride
            if is_own and (text_bytes := source.text_bytes(record)) and not source.is_held_out(record):
                yield record, text_bytes
        self._move(shard_records, piece=self.position.piece + 1, document=0)
        shard_records.require_usable()
        self._records = None

    def _move(self, shard_records: ShardRecords, **changes: int) -> None:
        num_records = self._before.num_records + shard_records.num_records
        num_bad = self._before.num_bad + shard_records.num_bad
        self.position = self.position._replace(num_records=num_records, num_bad=num_bad, **changes)

    def _count_refused(self, number: int) -> None:
        """Count records that were read but have no document."""
        if self._records is not None:
            self._before = self._before._replace(num_bad=self._before.num_bad + number)
        self.position = self.position._replace(num_bad=self.position.num_bad + number)


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
