"""Laws of the order of sequences: every row once an epoch, determined by the seed and the step alone."""

import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.data.sequences import SequenceSampler
from tests.unit.batch_laws import (
    assert_function_of_step,
    assert_missing_groups_are_refused,
    assert_parts_equal_whole,
    cuts_of_groups,
    digest,
)
from tests.unit.documents import job, store_of

L = 8
seeds = st.sampled_from([0, 1, 2**31, 2**53 - 1])


def store(*num_rows):
    """A store whose sources have so many rows."""
    with tempfile.TemporaryDirectory() as folder:
        lengths = {f"s{index}": [L] * number for index, number in enumerate(num_rows)}
        return store_of(Path(folder) / "store", lengths, L)


def spec(weights=(1.0,), seed=0, rows=4, rows_per_group=1):
    sources = [
        {"name": f"s{index}", "paths": [f"/x/{index}.txt"], "weight": weight} for index, weight in enumerate(weights)
    ]
    data = {"corpus": "documents", "sources": sources, "max_tokens": L}
    return job(data, seed=seed, batch_tokens=rows * L, group_tokens=rows_per_group * L)


def first_rows(sampler, num_rows):
    """The first `num_rows` rows, in order."""
    rows, step = [], 0
    while len(rows) < num_rows:
        rows += sampler.batch(step).rows.tolist()
        step += 1
    return rows[:num_rows]


@given(st.lists(st.integers(1, 15), min_size=1, max_size=3), st.integers(1, 9), seeds)
def test_each_row_comes_once_an_epoch(num_rows, rows, seed):
    total = sum(num_rows)
    order = first_rows(SequenceSampler(store(*num_rows), spec([1.0] * len(num_rows), seed, rows)), 4 * total)
    epochs = [order[start : start + total] for start in range(0, len(order), total)]
    assert all(sorted(epoch) == list(range(total)) for epoch in epochs)
    assert total <= 10 or len(set(map(tuple, epochs))) == 4


@given(
    st.lists(st.tuples(st.integers(1, 12), st.sampled_from([0.3, 0.5, 1.0, 2.0, 2.7])), min_size=1, max_size=3), seeds
)
def test_a_source_comes_as_often_as_its_weight_says(sources, seed):
    """After any epoch a source is less than one row short. A row repeats only after all rows of its source have come as
    often."""
    num_rows, weights = zip(*sources, strict=True)
    sampler = SequenceSampler(sequences := store(*num_rows), spec(weights, seed))
    order = first_rows(sampler, sampler.epoch_start(7))
    for start, end, weight in zip(sequences.source_rows[:-1], sequences.source_rows[1:], weights, strict=True):
        times = Counter(row for row in order if start <= row < end)
        expected = 7 * weight * (end - start)
        assert expected - 1 < times.total() <= expected + 1e-6
        assert max(times.values(), default=0) - min(times[row] for row in range(start, end)) <= 1


@given(st.integers(1, 10**7), st.integers(1, 40), seeds)
def test_any_row_is_within_its_epoch(number, rows, seed):
    sampler = SequenceSampler(store(5, rows), spec([0.3, 1.7], seed))
    epoch = sampler.epoch_of(number)
    assert sampler.epoch_start(epoch) <= number < sampler.epoch_start(epoch + 1)


@given(st.integers(1, 40), seeds, st.lists(st.integers(0, 2**40), min_size=1, max_size=5))
def test_a_batch_is_a_function_of_seed_and_step_alone(num_rows, seed, steps):
    sequences = store(num_rows)
    assert_function_of_step(lambda: SequenceSampler(sequences, spec(seed=seed)), steps)


@given(st.integers(1, 20), st.integers(1, 6), st.integers(1, 3), st.integers(0, 50), cuts_of_groups)
def test_parts_equal_the_whole_however_groups_are_divided(num_rows, groups, rows_per_group, step, cuts):
    job_spec = spec(rows=groups * rows_per_group, rows_per_group=rows_per_group)
    batch = SequenceSampler(store(num_rows), job_spec).batch(step)
    assert (batch.num_groups, batch.rows_per_group) == (groups, rows_per_group)
    assert batch.num_positions == job_spec.train.batch_tokens
    full_batch = assert_parts_equal_whole(batch, ("tokens", "documents", "labels"), cuts)
    assert batch.num_targets == np.count_nonzero(full_batch.labels >= 0)
    assert batch.num_tokens == np.count_nonzero(full_batch.documents >= 0)


def test_batches_are_unchanged_and_independent_of_the_size_of_groups():
    assert (
        digest(SequenceSampler(store(50, 20), spec([1.0, 0.7], seed=7)), (0, 1, 15, 16, 1000, 2**40))
        == "723a9c01d221b7ef"
    )
    sizes = [
        SequenceSampler(store(30), spec(rows=12, rows_per_group=size)).batch(5).rows.tolist() for size in (1, 3, 12)
    ]
    assert sizes[0] == sizes[1] == sizes[2]


def test_missing_groups_and_a_store_without_rows_are_refused():
    assert_missing_groups_are_refused(SequenceSampler(store(3), spec(rows=3)).batch(5))
    with pytest.raises(ValueError, match="needs a store with rows"):
        SequenceSampler(store(0), spec())
