"""The sampler's laws, and those of evaluation batches, on stores of any lengths."""

import hashlib
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
    spec,
    group_tokens=st.integers(2 * MAX_TOKENS, 300),
    num_groups=st.integers(1, 5),
    seed=st.sampled_from([0, 1, 2**31, 2**53 - 1]),
    exponent=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
)
steps = st.integers(0, 2**40)


@given(stores(), specs, steps)
def test_a_batch_has_the_shape_it_states_and_fits(store, spec, step):
    batch = Sampler(store, spec).batch(step)
    group_tokens = spec.model.moe.group_tokens
    length = batch.source_length + batch.target_length
    assert batch.num_groups == spec.train.batch_tokens // group_tokens
    assert batch.rows_per_group == group_tokens // length >= 1
    assert batch.rows.shape == (batch.num_groups * batch.rows_per_group,)
    assert batch.num_positions <= spec.train.batch_tokens
    assert store.source_lengths[batch.rows].max() <= batch.source_length
    assert store.target_lengths[batch.rows].max() <= batch.target_length


@given(stores(), specs, st.lists(steps, min_size=1, max_size=5))
def test_a_batch_is_a_function_of_seed_and_step_alone(store, spec, asked):
    one, other = Sampler(store, spec), Sampler(store, spec)
    forward = {step: one.batch(step) for step in asked}
    backward = {step: other.batch(step) for step in reversed(asked)}
    for step in asked:
        assert np.array_equal(forward[step].rows, backward[step].rows)
        assert forward[step].source_length == backward[step].source_length


@given(stores(), specs, steps, st.data())
def test_parts_are_the_whole_however_groups_are_divided(store, spec, step, data):
    batch = Sampler(store, spec).batch(step)
    whole = batch.part(0, batch.num_groups)
    cuts = data.draw(st.lists(st.integers(0, batch.num_groups), max_size=6).map(sorted))
    parts = [batch.part(*both) for both in zip([0, *cuts], [*cuts, batch.num_groups], strict=True)]
    for field in ("source", "target_in", "target_out"):
        assert np.array_equal(np.concatenate([getattr(part, field) for part in parts]), getattr(whole, field))
    first_rows = np.cumsum([0, *(len(part.source) for part in parts)])
    assert [part.first_row for part in parts] == first_rows[:-1].tolist()


@given(stores(), specs, steps)
def test_rows_hold_their_pairs_then_padding_and_every_real_token_counts_once(store, spec, step):
    batch = Sampler(store, spec).batch(step)
    part = batch.part(0, batch.num_groups)
    for index, row in enumerate(batch.rows):
        source, target = store.source(row), store.target(row)
        assert source[-1] == target[-1] == EOS
        assert part.source[index].tolist() == padded(source, batch.source_length)
        assert part.target_out[index].tolist() == padded(target, batch.target_length)
        assert part.target_in[index].tolist() == padded([BOS, *target[:-1]], batch.target_length)
    assert batch.num_source_tokens == np.count_nonzero(part.source)
    assert batch.num_target_tokens == np.count_nonzero(part.target_out) == np.count_nonzero(part.target_in)


def padded(ids, length):
    return [*map(int, ids), *[PAD] * (length - len(ids))]


@given(stores(), st.integers(2 * MAX_TOKENS, 500), st.integers(1, 4))
def test_length_classes_cover_every_pair_once(store, group_tokens, num_groups):
    weights = Sampler.pair_weights(store, 0.5)
    buckets = plan_buckets(store.source_lengths, store.target_lengths, weights, group_tokens, num_groups)
    assert sorted(np.concatenate([bucket.members for bucket in buckets])) == list(range(store.num_pairs))
    for bucket in buckets:
        assert store.source_lengths[bucket.members].max() == bucket.source_length
        assert store.target_lengths[bucket.members].max() == bucket.target_length


def realistic_store(folder, num_pairs=4000):
    """Lengths of a long tail that go together on both sides; three languages of very different sizes."""
    draws = np.random.Philox(key=[1, 2]).random_raw(3 * num_pairs).reshape(3, -1) / 2.0**64
    source = np.minimum(MAX_TOKENS, 1 - np.log(draws[0]) * 6).astype(int)
    target = np.clip(source * (0.5 + draws[1]), 1, MAX_TOKENS).astype(int)
    langs = np.where(draws[2] < 0.9, "de", np.where(draws[2] < 0.99, "fr", "ja"))
    return store_of(folder, list(zip(source.tolist(), target.tolist(), strict=True)), langs.tolist())


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0])
def test_pairs_are_drawn_at_their_language_s_temperature_whatever_their_length(tmp_path, exponent):
    store = realistic_store(tmp_path / "x")
    sampler = Sampler(store, spec(group_tokens=128, exponent=exponent))
    batches = [sampler.batch(step) for step in range(5000)]
    assert len({(batch.source_length, batch.target_length) for batch in batches}) > 5
    drawn = np.concatenate([batch.rows for batch in batches])
    pairs_of = Counter(store.lang_ids.tolist())
    weights = np.array([pairs_of[lang] ** exponent for lang in range(3)])
    share = np.bincount(store.lang_ids[drawn], minlength=3) / len(drawn)
    assert share == pytest.approx(weights / weights.sum(), abs=0.01)
    # Long pairs as often as short ones: batches of long ones are smaller, and so come more often.
    long = store.source_lengths + store.target_lengths > 30
    assert np.mean(long[drawn]) == pytest.approx(Sampler.pair_weights(store, exponent)[long].sum(), abs=0.01)


def test_little_of_a_batch_is_padding_and_pairs_hardly_repeat_in_it(tmp_path):
    store = realistic_store(tmp_path / "x")
    sampler = Sampler(store, spec(group_tokens=256, num_groups=2, exponent=1.0))
    batches = [sampler.batch(step) for step in range(1000)]
    fill = sum(batch.num_tokens for batch in batches) / sum(batch.num_positions for batch in batches)
    assert fill > 0.85
    assert sum(len(np.unique(batch.rows)) for batch in batches) > 0.99 * sum(len(batch.rows) for batch in batches)


def test_groups_are_mixtures_of_languages(tmp_path):
    """A group is routed on its own: with languages in order, its experts would see one language each."""
    langs = ["de"] * 500 + ["fr"] * 500
    store = store_of(tmp_path / "x", [(4, 4)] * 1000, langs)
    batch = Sampler(store, spec(group_tokens=256, num_groups=4)).batch(0)
    for group in store.lang_ids[batch.rows].reshape(4, -1):
        assert 0.2 < group.mean() < 0.8


def test_other_seeds_and_steps_give_other_batches(tmp_path):
    store = realistic_store(tmp_path / "x")
    rows = [Sampler(store, spec(seed=seed)).batch(step).rows.tobytes() for seed in (0, 1) for step in (0, 1)]
    assert len(set(rows)) == 4


def test_batches_are_what_they_were_when_this_was_written(tmp_path):
    """A run that resumes under a newer version must go on with the batches it would have had."""
    sampler = Sampler(realistic_store(tmp_path / "x"), spec(seed=7))
    digest = hashlib.sha256()
    for step in (0, 1, 1000, 2**40):
        digest.update(sampler.batch(step).rows.astype("<i8").tobytes())
    assert digest.hexdigest()[:16] == "d9494c15e95d8fbd"


def test_groups_that_a_batch_does_not_have_are_refused(tmp_path):
    batch = Sampler(store_of(tmp_path / "x", [(3, 3)], ["de"]), spec(num_groups=3)).batch(5)
    assert len(batch.part(2, 2).source) == 0
    for groups in ((2, 1), (-1, 2), (0, 4)):
        with pytest.raises(ValueError, match="are outside the 3 groups of step 5"):
            batch.part(*groups)


def test_a_dense_models_groups_are_the_smallest_that_hold_the_longest_pair(tmp_path):
    dense = job({"corpus": "catalogs", "max_tokens": 24}, batch_tokens=300, group_tokens=300)
    dense = dense.model_copy(update={"model": dense.model.model_copy(update={"moe": None})})
    batch = Sampler(store_of(tmp_path / "x", [(3, 4)] * 50, ["de"] * 50), dense).batch(0)
    least = 50  # of the divisors of 300, from 2 x 24 on
    assert (batch.num_groups, batch.rows_per_group) == (300 // least, least // 7)


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


def test_a_larger_evaluation_subset_holds_the_smaller_one(tmp_path):
    store = store_of(tmp_path / "x", [(3, 3)] * 50, ["de"] * 50)

    def subset(max_pairs, seed=0):
        return {row for batch in evaluation_batches(store, 64, max_pairs, seed) for row in batch.rows.tolist()}

    assert subset(10) < subset(20) < subset(50) == set(range(50))
    assert subset(10) != subset(10, seed=1)
