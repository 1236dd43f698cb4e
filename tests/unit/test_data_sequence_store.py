"""Rows as they are read: inputs, the documents they are of, and labels."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.data.tokenizer import BOS, EOS, PAD
from tests.unit.documents import store_of

sources = st.lists(st.lists(st.integers(1, 40), max_size=12), min_size=1, max_size=3)


def made(lengths, max_tokens):
    with tempfile.TemporaryDirectory() as folder:  # the store stays mapped when it is gone
        named = {f"s{index}": each for index, each in enumerate(lengths)}
        return named, store_of(Path(folder) / "store", named, max_tokens)


@given(sources, st.integers(2, 24))
def test_pieces_put_together_are_the_documents_and_each_label_is_what_follows(lengths, max_tokens):
    """Of a document d0..dn-1 the inputs are BOS d0..dn-1 and the labels d0..dn-1 EOS, wherever it is cut."""
    named, store = made(lengths, max_tokens)
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
    for length in (length for each in named.values() for length in each):
        ids = list(range(first, first + length - 1))
        expected += list(zip([BOS, *ids], [*ids, EOS], strict=True))
        first += length - 1
    assert sorted(pairs) == sorted(expected)
    assert store.num_tokens == len(expected) == store.row_lengths.sum()


@given(sources, st.integers(2, 24), st.data())
def test_rows_are_read_in_any_order_and_number(lengths, max_tokens, data):
    _, store = made(lengths, max_tokens)
    whole = store.rows(np.arange(store.num_rows))
    asked = data.draw(st.lists(st.integers(0, store.num_rows - 1), max_size=8)) if store.num_rows else []
    for found, every in zip(store.rows(asked), whole, strict=True):
        assert np.array_equal(found, every[asked])


@given(sources, st.integers(2, 24))
def test_each_row_is_of_one_source(lengths, max_tokens):
    named, store = made(lengths, max_tokens)
    assert store.sources == tuple(named)
    firsts = np.cumsum([4, *(sum(length - 1 for length in each) for each in named.values())])
    for index, (start, end) in enumerate(zip(store.source_rows[:-1], store.source_rows[1:], strict=True)):
        ids = store.rows(range(start, end)).labels
        ids = ids[ids >= 4]
        assert np.all((ids >= firsts[index]) & (ids < firsts[index + 1]))


@given(sources, st.integers(2, 24))
def test_labels_are_counted(lengths, max_tokens):
    _, store = made(lengths, max_tokens)
    labels = store.rows(np.arange(store.num_rows)).labels
    assert np.array_equal(store.label_counts(2000), np.bincount(labels[labels >= 0], minlength=2000))


def test_texts_are_kept(tmp_path):
    store = store_of(tmp_path / "x", {"a": [3, 5], "b": [2]}, 8)
    assert list(store.texts()) == list(store.texts(max_bytes=10)) == [b"a 4", b"a 6", b"b 10"]
    assert list(store.texts(max_bytes=9)) == [b"a 4", b"b 10"]
    assert list(store.texts(max_bytes=2)) == [b"a "]
    assert store.num_bytes == 10


def test_documents_come_source_by_source(tmp_path):
    from moe.data.sequences.store import StoreWriter

    with StoreWriter(tmp_path / "x", ["a", "b"], np.dtype(np.uint16), BOS, EOS, keeps_text=False) as writer:
        writer.add("b", np.array([5]), b"")
        with pytest.raises(ValueError, match="a document of a follows"):
            writer.add("a", np.array([5]), b"")
