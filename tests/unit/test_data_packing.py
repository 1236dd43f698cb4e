"""Packing: every position once, in rows that are full."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.data.sequences.packing import MAX_WASTE, Packing, pack

lengths = st.lists(st.integers(1, 200), max_size=60)


def packed(document_lengths: list[int], length: int) -> Packing:
    return pack(np.array(document_lengths, np.int64), length)


@given(lengths, st.integers(2, 64))
def test_each_position_of_each_document_is_in_one_piece(document_lengths, length):
    packing = packed(document_lengths, length)
    found = [
        (document, start + place)
        for document, start, size in zip(packing.documents, packing.starts, packing.lengths, strict=True)
        for place in range(size)
    ]
    expected = [(document, place) for document, size in enumerate(document_lengths) for place in range(size)]
    assert sorted(found) == expected


@given(lengths, st.integers(2, 64))
def test_rows_hold_no_more_than_they_have_room_for_and_little_less(document_lengths, length):
    packing = packed(document_lengths, length)
    assert packing.row_starts[0] == 0
    assert packing.row_starts[-1] == len(packing.lengths)
    assert np.all(np.diff(packing.row_starts) > 0)
    sizes = np.diff(np.concatenate([[0], np.cumsum(packing.lengths)])[packing.row_starts])
    assert all(0 < size <= length for size in sizes)
    total = sum(document_lengths)
    assert packing.waste(length) <= MAX_WASTE + 1e-9 or packing.num_rows == -(-total // length)
    if total:
        assert packing.waste(length) == pytest.approx(1 - total / (packing.num_rows * length))


@given(lengths, st.integers(2, 64))
def test_a_document_that_fits_is_cut_only_to_fill_rows_that_best_fit_leaves_empty(document_lengths, length):
    packing = packed(document_lengths, length)
    pieces = np.bincount(packing.documents, minlength=len(document_lengths))
    needed = np.array([-(-size // length) for size in document_lengths], np.int64)
    assert np.all(pieces >= needed)
    if np.any(pieces > needed):
        gaps = packing.num_rows * length - sum(document_lengths)
        assert gaps <= MAX_WASTE * packing.num_rows * length + length


def test_documents_a_little_longer_than_half_a_row_are_cut():
    packing = packed([60] * 100, 100)
    assert packing.waste(100) <= MAX_WASTE
    assert packing.num_rows == 61  # of at least 60, where best fit alone takes 100


def test_real_lengths_are_packed_with_next_to_no_waste_nor_cuts():
    draws = np.random.Philox(key=[3, 4]).random_raw(3000) / 2.0**64
    document_lengths = np.maximum(1, -np.log(draws) * 1000).astype(np.int64)
    packing = pack(document_lengths, 512)
    assert packing.waste(512) < 0.002
    assert len(packing.lengths) == sum(-(-size // 512) for size in document_lengths.tolist())


def test_nothing_is_packed_into_nothing():
    assert packed([], 8).num_rows == 0
    assert packed([], 8).waste(8) == 0.0
