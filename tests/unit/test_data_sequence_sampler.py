"""Laws of the order in which sequences come: every row once an epoch, from the seed and the step alone."""

import hashlib
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.data.sequences import SequenceSampler
from tests.unit.documents import job, store_of

L = 8
seeds = st.sampled_from([0, 1, 2**31, 2**53 - 1])


def store(*num_rows):
    """A store of sources with so many rows."""
    with tempfile.TemporaryDirectory() as folder:
        named = {f"s{index}": [L] * number for index, number in enumerate(num_rows)}
        return store_of(Path(folder) / "store", named, L)


def spec(weights=(1.0,), seed=0, rows=4, rows_per_group=1):
    sources = [
        {"name": f"s{index}", "paths": [f"/x/{index}.txt"], "weight": weight} for index, weight in enumerate(weights)
    ]
    data = {"corpus": "documents", "sources": sources, "max_tokens": L}
    return job(data, seed=seed, batch_tokens=rows * L, group_tokens=rows_per_group * L)


def drawn(sampler, num_rows):
    """The first rows that come, in order."""
    found, step = [], 0
    while len(found) < num_rows:
        found += sampler.batch(step).rows.tolist()
        step += 1
    return found[:num_rows]


@given(st.lists(st.integers(1, 15), min_size=1, max_size=3), st.integers(1, 9), seeds)
def test_each_row_comes_once_an_epoch(num_rows, rows, seed):
    sampler = SequenceSampler(store(*num_rows), spec([1.0] * len(num_rows), seed, rows))
    total = sum(num_rows)
    found = drawn(sampler, 4 * total)
    epochs = [found[start : start + total] for start in range(0, len(found), total)]
    assert all(sorted(epoch) == list(range(total)) for epoch in epochs)
    if total > 10:
        assert len({tuple(epoch) for epoch in epochs}) == 4


@given(
    st.lists(st.tuples(st.integers(1, 12), st.sampled_from([0.3, 0.5, 1.0, 2.0, 2.7])), min_size=1, max_size=3), seeds
)
def test_a_source_comes_as_often_as_its_weight_says(given_sources, seed):
    """In whole rows: less than one is missing after any epoch. None comes again before all have come as often."""
    num_rows, weights = zip(*given_sources, strict=True)
    sampler = SequenceSampler(made := store(*num_rows), spec(weights, seed))
    found = drawn(sampler, sampler.epoch_start(7))
    for start, end, weight in zip(made.source_rows[:-1], made.source_rows[1:], weights, strict=True):
        own = [row for row in found if start <= row < end]
        expected = 7 * weight * (end - start)
        assert expected - 1 < len(own) <= expected + 1e-6
        times = Counter(own)
        assert max(times.values(), default=0) - min(times[row] for row in range(start, end)) <= 1


@given(st.integers(1, 10**7), st.integers(1, 40), seeds)
def test_any_row_is_found_in_its_epoch(number, rows, seed):
    sampler = SequenceSampler(store(5, rows), spec([0.3, 1.7], seed))
    epoch = sampler.epoch_of(number)
    assert sampler.epoch_start(epoch) <= number < sampler.epoch_start(epoch + 1)


@given(st.integers(1, 40), seeds, st.lists(st.integers(0, 2**40), min_size=1, max_size=5))
def test_a_batch_is_a_function_of_seed_and_step_alone(num_rows, seed, steps):
    made, asked = store(num_rows), spec(seed=seed)
    one, other = SequenceSampler(made, asked), SequenceSampler(made, asked)
    forward = {step: one.batch(step).rows.tolist() for step in steps}
    backward = {step: other.batch(step).rows.tolist() for step in reversed(steps)}
    assert forward == backward


@given(st.integers(1, 20), st.integers(1, 6), st.integers(1, 3), st.integers(0, 50), st.data())
def test_parts_are_the_whole_however_groups_are_divided(num_rows, groups, rows_per_group, step, data):
    asked = spec(rows=groups * rows_per_group, rows_per_group=rows_per_group)
    batch = SequenceSampler(store(num_rows), asked).batch(step)
    assert (batch.num_groups, batch.rows_per_group) == (groups, rows_per_group)
    assert batch.num_positions == asked.train.batch_tokens
    whole = batch.part(0, groups)
    cuts = data.draw(st.lists(st.integers(0, groups), max_size=6).map(sorted))
    parts = [batch.part(*both) for both in zip([0, *cuts], [*cuts, groups], strict=True)]
    for field in ("tokens", "documents", "labels"):
        assert np.array_equal(np.concatenate([getattr(part, field) for part in parts]), getattr(whole, field))
    first_rows = np.cumsum([0, *(len(part.tokens) for part in parts)])
    assert [part.first_row for part in parts] == first_rows[:-1].tolist()
    assert batch.num_targets == np.count_nonzero(whole.labels >= 0)
    assert batch.num_tokens == np.count_nonzero(whole.documents >= 0)


def test_a_batch_is_the_same_in_groups_of_any_size():
    made = store(30)
    rows = [SequenceSampler(made, spec(rows=12, rows_per_group=size)).batch(5).rows.tolist() for size in (1, 3, 12)]
    assert rows[0] == rows[1] == rows[2]


def test_other_seeds_give_another_order():
    made = store(30)
    assert drawn(SequenceSampler(made, spec(seed=0)), 30) != drawn(SequenceSampler(made, spec(seed=1)), 30)


def test_batches_are_what_they_were_when_this_was_written():
    """A run that resumes under a newer version must go on with the batches it would have had."""
    sampler = SequenceSampler(store(50, 20), spec([1.0, 0.7], seed=7))
    digest = hashlib.sha256()
    for step in (0, 1, 15, 16, 1000, 2**40):
        digest.update(sampler.batch(step).rows.astype("<i8").tobytes())
    assert digest.hexdigest()[:16] == "723a9c01d221b7ef"


def test_groups_that_a_batch_does_not_have_are_refused():
    batch = SequenceSampler(store(3), spec(rows=3)).batch(5)
    assert len(batch.part(2, 2).tokens) == 0
    for groups in ((2, 1), (-1, 2), (0, 4)):
        with pytest.raises(ValueError, match="are outside the 3 groups of step 5"):
            batch.part(*groups)


def test_a_store_without_rows_has_no_batches():
    with pytest.raises(ValueError, match="needs a store with rows"):
        SequenceSampler(store(0), spec())
