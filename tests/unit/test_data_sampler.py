"""Laws of training and evaluation batches of pairs, on stores of any lengths."""

import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.data.pairs import Sampler, evaluation_batches
from moe.data.pairs.buckets import plan_buckets
from moe.data.tokenizer import BOS, EOS, PAD
from tests.unit.batch_laws import (
    assert_function_of_step,
    assert_missing_groups_are_refused,
    assert_parts_equal_whole,
    cuts_of_groups,
    digest,
)
from tests.unit.data_corpora import job, store_of

MAX_TOKENS = 24
LANGS = ("de", "fr", "ja")


@st.composite
def stores(draw, min_pairs=1):
    """A store in a temporary folder: it stays mapped when the folder is gone."""
    lengths = st.tuples(st.integers(1, MAX_TOKENS), st.integers(1, MAX_TOKENS))
    pairs = draw(st.lists(st.tuples(lengths, st.sampled_from(LANGS)), min_size=min_pairs, max_size=60))
    with tempfile.TemporaryDirectory() as folder:
        return store_of(Path(folder) / "x", [pair[0] for pair in pairs], [pair[1] for pair in pairs])


def spec(group_tokens=64, num_groups=3, seed=0, exponent=0.5):
    data = {"corpus": "catalogs", "max_tokens": MAX_TOKENS, "sampling_exponent": exponent}
    return job(data, group_tokens=group_tokens, batch_tokens=group_tokens * num_groups, seed=seed)


specs = st.builds(
    spec, group_tokens=st.integers(2 * MAX_TOKENS, 300), num_groups=st.integers(1, 5),
    seed=st.sampled_from([0, 1, 2**31, 2**53 - 1]), exponent=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
)  # fmt: skip
steps = st.integers(0, 2**40)


def pad_ids(ids, length):
    return [*map(int, ids), *[PAD] * (length - len(ids))]


@given(stores(), specs, steps, cuts_of_groups)
def test_a_batch_has_its_shape_and_holds_padded_pairs_however_groups_are_divided(store, spec, step, cuts):
    batch, group_tokens = Sampler(store, spec).batch(step), spec.model.moe.group_tokens
    assert batch.num_groups == spec.train.batch_tokens // group_tokens
    assert batch.rows_per_group == group_tokens // (batch.source_length + batch.target_length) >= 1
    assert batch.rows.shape == (batch.num_groups * batch.rows_per_group,)
    assert batch.num_positions <= spec.train.batch_tokens
    assert store.source_lengths[batch.rows].max() <= batch.source_length
    assert store.target_lengths[batch.rows].max() <= batch.target_length
    full_batch = assert_parts_equal_whole(batch, ("source", "target_in", "target_out"), cuts)
    for index, row in enumerate(batch.rows):
        source, target = store.source(row), store.target(row)
        assert source[-1] == target[-1] == EOS
        assert full_batch.source[index].tolist() == pad_ids(source, batch.source_length)
        assert full_batch.target_out[index].tolist() == pad_ids(target, batch.target_length)
        assert full_batch.target_in[index].tolist() == pad_ids([BOS, *target[:-1]], batch.target_length)
    assert batch.num_source_tokens == np.count_nonzero(full_batch.source)
    assert batch.num_target_tokens == np.count_nonzero(full_batch.target_out) == np.count_nonzero(full_batch.target_in)


@given(stores(), specs, st.lists(steps, min_size=1, max_size=5))
def test_a_batch_is_a_function_of_seed_and_step_alone(store, spec, steps):
    assert_function_of_step(lambda: Sampler(store, spec), steps)


@given(stores(), st.integers(2 * MAX_TOKENS, 500), st.integers(1, 4))
def test_length_classes_cover_every_pair_once(store, group_tokens, num_groups):
    weights = Sampler.pair_weights(store, 0.5)
    buckets = plan_buckets(store.source_lengths, store.target_lengths, weights, group_tokens, num_groups)
    assert sorted(np.concatenate([bucket.members for bucket in buckets])) == list(range(store.num_pairs))
    for bucket in buckets:
        assert store.source_lengths[bucket.members].max() == bucket.source_length
        assert store.target_lengths[bucket.members].max() == bucket.target_length


@pytest.fixture
def realistic(tmp_path):
    """A store whose lengths are correlated and long-tailed, in three languages of very different sizes."""
    draws = np.random.Philox(key=[1, 2]).random_raw(3 * 4000).reshape(3, -1) / 2.0**64
    source = np.minimum(MAX_TOKENS, 1 - np.log(draws[0]) * 6).astype(int)
    target = np.clip(source * (0.5 + draws[1]), 1, MAX_TOKENS).astype(int)
    langs = np.where(draws[2] < 0.9, "de", np.where(draws[2] < 0.99, "fr", "ja"))
    return store_of(tmp_path / "x", list(zip(source.tolist(), target.tolist(), strict=True)), langs.tolist())


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0])
def test_pairs_are_drawn_at_the_temperature_of_languages_whatever_their_length(realistic, exponent):
    sampler = Sampler(realistic, spec(group_tokens=128, exponent=exponent))
    batches = [sampler.batch(step) for step in range(5000)]
    assert len({(batch.source_length, batch.target_length) for batch in batches}) > 5
    rows = np.concatenate([batch.rows for batch in batches])
    num_pairs = Counter(realistic.lang_ids.tolist())
    weights = np.array([num_pairs[lang] ** exponent for lang in range(3)])
    share = np.bincount(realistic.lang_ids[rows], minlength=3) / len(rows)
    assert share == pytest.approx(weights / weights.sum(), abs=0.01)
    # Long pairs are as frequent as short ones: their batches are smaller, and so come more often.
    is_long = realistic.source_lengths + realistic.target_lengths > 30
    expected = Sampler.pair_weights(realistic, exponent)[is_long].sum()
    assert np.mean(is_long[rows]) == pytest.approx(expected, abs=0.01)


def test_batches_are_unchanged_nearly_full_and_hardly_repeat_pairs(realistic):
    assert digest(Sampler(realistic, spec(seed=7)), (0, 1, 1000, 2**40)) == "d9494c15e95d8fbd"
    sampler = Sampler(realistic, spec(group_tokens=256, num_groups=2, exponent=1.0))
    batches = [sampler.batch(step) for step in range(1000)]
    assert sum(batch.num_tokens for batch in batches) > 0.85 * sum(batch.num_positions for batch in batches)
    assert sum(len(np.unique(batch.rows)) for batch in batches) > 0.99 * sum(len(batch.rows) for batch in batches)


def test_groups_are_mixtures_of_languages(tmp_path):
    """A group is routed on its own: if languages came in order, its experts would see one language at a time."""
    store = store_of(tmp_path / "x", [(4, 4)] * 1000, ["de"] * 500 + ["fr"] * 500)
    batch = Sampler(store, spec(group_tokens=256, num_groups=4)).batch(0)
    shares = store.lang_ids[batch.rows].reshape(4, -1).mean(1)
    assert 0.2 < shares.min() < shares.max() < 0.8


def test_missing_groups_are_refused_and_a_dense_model_s_groups_hold_the_longest_pair(tmp_path):
    store = store_of(tmp_path / "x", [(3, 4)] * 50, ["de"] * 50)
    assert_missing_groups_are_refused(Sampler(store, spec(num_groups=3)).batch(5))
    dense = job({"corpus": "catalogs", "max_tokens": 24}, batch_tokens=300, group_tokens=300)
    dense = dense.model_copy(update={"model": dense.model.model_copy(update={"moe": None})})
    batch = Sampler(store, dense).batch(0)
    group_tokens = 50  # the smallest divisor of 300 from 2 x 24 on
    assert (batch.num_groups, batch.rows_per_group) == (300 // group_tokens, group_tokens // 7)


@given(stores(min_pairs=0), st.integers(1, 300), st.one_of(st.none(), st.integers(1, 80)), st.integers(0, 3))
def test_evaluation_goes_through_a_set_once_in_batches_that_fit(store, max_tokens, max_pairs, seed):
    batches = list(evaluation_batches(store, max_tokens, max_pairs, seed))
    rows = [row for batch in batches for row in batch.rows.tolist()]
    assert len(rows) == len(set(rows)) == min(store.num_pairs, max_pairs or store.num_pairs)
    for batch in batches:
        assert batch.num_positions <= max_tokens or len(batch.rows) == 1
        assert batch.num_groups == len(batch.rows)
        part = batch.part(0, batch.num_groups)
        assert np.count_nonzero(part.target_out) == batch.num_target_tokens
        assert part.source.shape[1] == store.source_lengths[batch.rows].max()
    longest = [max(batch.source_length, batch.target_length) for batch in batches]
    assert longest == sorted(longest)


def test_a_larger_evaluation_subset_contains_the_smaller_one(tmp_path):
    store = store_of(tmp_path / "x", [(3, 3)] * 50, ["de"] * 50)

    def subset(max_pairs, seed=0):
        return {row for batch in evaluation_batches(store, 64, max_pairs, seed) for row in batch.rows.tolist()}

    assert subset(10) < subset(20) < subset(50) == set(range(50))
    assert subset(10) != subset(10, seed=1)
