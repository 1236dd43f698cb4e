"""Packing: every position once, in full rows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.data.sequences.packing import MAX_WASTE, Packing, pack


def pack_lengths(document_lengths: list[int], length: int) -> Packing:
    return pack(np.array(document_lengths, np.int64), length)


@given(st.lists(st.integers(1, 200), max_size=60), st.integers(2, 64))
def test_rows_hold_each_position_once_and_are_nearly_full(document_lengths, length):
    packing = pack_lengths(document_lengths, length)
    positions = [
        (document, start + place)
        for document, start, size in zip(packing.documents, packing.starts, packing.lengths, strict=True)
        for place in range(size)
    ]
    assert sorted(positions) == [
        (document, position) for document, size in enumerate(document_lengths) for position in range(size)
    ]
    assert packing.row_starts[0] == 0
    assert packing.row_starts[-1] == len(packing.lengths)
    assert np.all(np.diff(packing.row_starts) > 0)
    sizes = np.diff(np.concatenate([[0], np.cumsum(packing.lengths)])[packing.row_starts])
    assert all(0 < size <= length for size in sizes)
    total, capacity = sum(document_lengths), packing.num_rows * length
    assert packing.waste(length) <= MAX_WASTE + 1e-9 or packing.num_rows == -(-total // length)
    assert packing.waste(length) == pytest.approx(1 - total / capacity if total else 0.0)
    # A document that would fit is cut only to fill space that best fit would waste.
    pieces = np.bincount(packing.documents, minlength=len(document_lengths))
    min_pieces = np.array([-(-size // length) for size in document_lengths], np.int64)
    assert np.all(pieces >= min_pieces)
    assert not np.any(pieces > min_pieces) or capacity - total <= MAX_WASTE * capacity + length


def test_documents_are_cut_where_best_fit_alone_wastes_rows():
    packing = pack_lengths([60] * 100, 100)
    assert packing.waste(100) <= MAX_WASTE
    assert packing.num_rows == 61  # at least 60; best fit alone takes 100
    draws = np.random.Philox(key=[3, 4]).random_raw(3000) / 2.0**64
    document_lengths = np.maximum(1, -np.log(draws) * 1000).astype(np.int64).tolist()  # as in real documents
    packing = pack_lengths(document_lengths, 512)
    assert packing.waste(512) < 0.002
    assert len(packing.lengths) == sum(-(-size // 512) for size in document_lengths)
