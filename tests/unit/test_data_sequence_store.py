"""Rows of a store: inputs, documents and labels."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.data.sequences.store import StoreWriter
from moe.data.tokenizer import BOS, EOS, PAD
from tests.unit.documents import store_of

sources = st.lists(st.lists(st.integers(1, 40), max_size=12), min_size=1, max_size=3)


def build(lengths, max_tokens):
    """(lengths of documents by source, store)"""
    by_source = {f"s{index}": of_source for index, of_source in enumerate(lengths)}
    with tempfile.TemporaryDirectory() as folder:  # the store stays mapped after the folder is gone
        return by_source, store_of(Path(folder) / "store", by_source, max_tokens)


@given(sources, st.integers(2, 24))
def test_pieces_make_up_the_documents_and_each_label_is_the_next_token(lengths, max_tokens):
    """For a document d0..dn-1 the inputs are BOS d0..dn-1 and the labels d0..dn-1 EOS, wherever it is cut."""
    by_source, store = build(lengths, max_tokens)
    rows = store.rows(np.arange(store.num_rows))
    assert rows.tokens.dtype == rows.labels.dtype == np.int64
    assert rows.documents.dtype == np.int32
    assert rows.tokens.shape == rows.documents.shape == rows.labels.shape == (store.num_rows, max_tokens)
    pairs = []
    for tokens, documents, labels, length in zip(*rows, store.row_lengths, strict=True):
        assert np.all((documents >= 0) == (np.arange(max_tokens) < length))
        assert np.all((labels >= 0) == (documents >= 0))
        assert np.all(tokens[documents < 0] == PAD)
        real = documents[:length]
        assert real[0] == 0
        assert set(np.diff(real).tolist()) <= {0, 1}
        for piece in range(real[-1] + 1):
            ids, following = tokens[documents == piece], labels[documents == piece]
            assert np.array_equal(ids[1:], following[:-1])
            pairs += list(zip(ids.tolist(), following.tolist(), strict=True))
    expected, first = [], 4
    for length in (length for of_source in by_source.values() for length in of_source):
        ids = list(range(first, first + length - 1))
        expected += list(zip([BOS, *ids], [*ids, EOS], strict=True))
        first += length - 1
    assert sorted(pairs) == sorted(expected)
    assert store.num_tokens == len(expected) == store.row_lengths.sum()


@given(sources, st.integers(2, 24), st.data())
def test_rows_of_one_source_each_are_read_in_any_order_and_their_labels_counted(lengths, max_tokens, data):
    lengths_by_source, store = build(lengths, max_tokens)
    all_rows = store.rows(np.arange(store.num_rows))
    indices = data.draw(st.lists(st.integers(0, store.num_rows - 1), max_size=8)) if store.num_rows else []
    for part, column in zip(store.rows(indices), all_rows, strict=True):
        assert np.array_equal(part, column[indices])
    assert np.array_equal(store.label_counts(2000), np.bincount(all_rows.labels[all_rows.labels >= 0], minlength=2000))
    assert store.sources == tuple(lengths_by_source)
    firsts = np.cumsum(
        [4, *(sum(length - 1 for length in source_lengths) for source_lengths in lengths_by_source.values())]
    )
    for index, (start, end) in enumerate(zip(store.source_rows[:-1], store.source_rows[1:], strict=True)):
        ids = all_rows.labels[start:end]
        assert np.all((ids < 4) | (ids >= firsts[index]) & (ids < firsts[index + 1]))


def test_texts_are_stored_source_by_source(tmp_path):
    store = store_of(tmp_path / "x", {"a": [3, 5], "b": [2]}, 8)
    assert list(store.texts()) == list(store.texts(max_bytes=10)) == [b"a 4", b"a 6", b"b 10"]
    assert list(store.texts(max_bytes=9)) == [b"a 4", b"b 10"]
    assert list(store.texts(max_bytes=2)) == [b"a "]
    assert store.num_bytes == 10
    with StoreWriter(tmp_path / "y", ["a", "b"], np.dtype(np.uint16), BOS, EOS, keeps_text=False) as writer:
        writer.add("b", np.array([5]), b"")
        with pytest.raises(ValueError, match="a document of a follows"):
            writer.add("a", np.array([5]), b"")
