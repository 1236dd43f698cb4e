"""Packing of documents into sequences of L positions: long ones are cut, and the rest is packed by best fit, longest
first ("Fewer Truncations Improve Language Modeling", arXiv 2404.10830). Conversations are packed likewise, and not cut
here.

If best fit leaves too many positions empty, for example if all documents are a little longer than half a sequence, the
emptiest sequences are dissolved and their pieces cut to fill the others.
"""

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_WASTE = 0.02
"""Share of positions that may be empty, if that is more than one sequence."""


@dataclass(frozen=True)
class Packing:
    """Pieces of documents in rows, in order: P pieces, R rows."""

    documents: NDArray[np.int64]
    """[P], document of each piece."""
    starts: NDArray[np.int64]
    """[P], first position of each piece in its document."""
    lengths: NDArray[np.int64]
    """[P], number of positions of each piece."""
    row_starts: NDArray[np.int64]
    """[R + 1], the first piece of each row, and P."""

    @property
    def num_rows(self) -> int:
        return len(self.row_starts) - 1

    def waste(self, length: int) -> float:
        """Share of empty positions."""
        positions = self.num_rows * length
        return 1 - float(self.lengths.sum()) / positions if positions else 0.0


def pack(document_lengths: NDArray[np.int64], length: int, *, cuts_to_fill: bool = True) -> Packing:
    """Pack documents of these lengths (int64 [D], at least 1 each) into rows of `length` positions.

    Every position of every document is in one piece. At most MAX_WASTE of the rows' positions are empty, or the number
    of rows is minimal; without `cuts_to_fill`, only documents longer than a row are cut. The same for the same lengths,
    on any machine.
    """
    num_full, remainders = np.divmod(document_lengths, length)
    full_documents = np.repeat(np.arange(len(document_lengths)), num_full)
    first_full = np.cumsum(num_full) - num_full
    full_starts = (np.arange(len(full_documents)) - np.repeat(first_full, num_full)) * length
    remainder_documents = np.flatnonzero(remainders)

    total = int(document_lengths.sum())
    max_rows = max(-(-total // length), 100 * total // (length * round(100 * (1 - MAX_WASTE))))
    pieces = [
        (int(document), int(num_full[document]) * length, int(remainders[document])) for document in remainder_documents
    ]
    row_of, free = _best_fit([piece[2] for piece in pieces], length)
    num_excess = len(full_documents) + len(free) - max_rows
    if num_excess > 0 and cuts_to_fill:
        pieces, row_of = _cut_to_fill(pieces, row_of, free, num_excess)

    piece_table = np.array(pieces, np.int64).reshape(-1, 3)
    documents = np.concatenate([full_documents, piece_table[:, 0]])
    starts = np.concatenate([full_starts, piece_table[:, 1]])
    lengths = np.concatenate([np.full(len(full_documents), length, np.int64), piece_table[:, 2]])
    rows = np.concatenate([np.arange(len(full_documents)), len(full_documents) + np.array(row_of, np.int64)])
    return _sort_rows(documents, starts, lengths, rows)


def pack_whole(piece_lengths: NDArray[np.int64], length: int, num_linked: int = 1) -> Packing:
    """Pack pieces of the given lengths (int64 `[P]`) into rows of `length` positions, without splitting a piece. Every
    `num_linked` consecutive pieces form a group, which shares a row."""
    lengths_by_link = piece_lengths.reshape(-1, num_linked)
    row_of, _ = _best_fit(lengths_by_link.sum(1).tolist(), length)
    piece_indices = np.arange(len(piece_lengths))
    return _sort_rows(
        piece_indices, np.zeros_like(piece_indices), piece_lengths, np.repeat(np.array(row_of, np.int64), num_linked)
    )


def pack_apart(document_lengths: NDArray[np.int64], length: int) -> Packing:
    """Pack documents of these lengths (int64 `[D]`) into rows of their own; longer ones are cut into several."""
    num_rows = -(-document_lengths // length)
    documents = np.repeat(np.arange(len(document_lengths)), num_rows)
    first_rows = np.cumsum(num_rows) - num_rows
    starts = (np.arange(len(documents)) - np.repeat(first_rows, num_rows)) * length
    lengths = np.minimum(document_lengths[documents] - starts, length)
    return Packing(documents, starts, lengths, np.arange(len(documents) + 1))


def _best_fit(lengths: list[int], length: int) -> tuple[list[int], list[int]]:
    """Row of each piece, placed longest first into the fullest row with room for it; and the free positions of each
    row."""
    row_of, free = [0] * len(lengths), list[int]()
    sizes: list[int] = []
    """Free sizes of rows, ascending."""
    rows_with: dict[int, list[int]] = {}
    for piece in sorted(range(len(lengths)), key=lambda piece: (-lengths[piece], piece)):
        index = bisect_left(sizes, lengths[piece])
        if index < len(sizes):
            size = sizes[index]
            row = rows_with[size].pop()
            if not rows_with[size]:
                del rows_with[size], sizes[index]
        else:
            size, row = length, len(free)
            free.append(length)
        row_of[piece] = row
        free[row] = num_free = size - lengths[piece]
        if num_free and num_free not in rows_with:
            insort(sizes, num_free)
            rows_with[num_free] = []
        if num_free:
            rows_with[num_free].append(row)
    return row_of, free


def _cut_to_fill(
    pieces: list[tuple[int, int, int]], row_of: list[int], free: list[int], num_excess: int
) -> tuple[list[tuple[int, int, int]], list[int]]:
    """The same packing without the `num_excess` emptiest rows, whose pieces are cut to fill the largest gaps of the
    others."""
    emptiest = sorted(range(len(free)), key=lambda row: (-free[row], row))
    dissolved_rows = set(emptiest[:num_excess])
    names = {row: name for name, row in enumerate(row for row in range(len(free)) if row not in dissolved_rows)}
    gaps = [(-free[row], name) for row, name in names.items() if free[row]]
    heapq.heapify(gaps)
    cut_pieces: list[tuple[int, int, int]] = []
    rows: list[int] = []
    dissolved_pieces = []
    for piece, row in zip(pieces, row_of, strict=True):
        if row in dissolved_rows:
            dissolved_pieces.append(piece)
        else:
            cut_pieces.append(piece)
            rows.append(names[row])
    for document, start, num_left in sorted(dissolved_pieces, key=lambda piece: (-piece[2], piece)):
        while num_left:
            gap, row = heapq.heappop(gaps)
            num_taken = min(-gap, num_left)
            cut_pieces.append((document, start, num_taken))
            rows.append(row)
            start, num_left = start + num_taken, num_left - num_taken
            if -gap > num_taken:
                heapq.heappush(gaps, (gap + num_taken, row))
    return cut_pieces, rows


def _sort_rows(
    documents: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64], rows: NDArray[np.int64]
) -> Packing:
    """Packing with rows sorted by their first documents, and the pieces of a row by theirs: what is read together is
    stored together."""
    order = np.lexsort((starts, documents, rows))
    documents, starts, lengths, rows = documents[order], starts[order], lengths[order], rows[order]
    num_pieces = np.bincount(rows) if len(rows) else np.zeros(0, np.int64)
    first = np.cumsum(num_pieces) - num_pieces
    by_document = np.lexsort((starts[first], documents[first]))
    num_pieces = num_pieces[by_document]
    row_starts = np.concatenate([[0], np.cumsum(num_pieces)]).astype(np.int64)
    order = np.repeat(first[by_document] - row_starts[:-1], num_pieces) + np.arange(len(rows))
    return Packing(documents[order], starts[order], lengths[order], row_starts)
