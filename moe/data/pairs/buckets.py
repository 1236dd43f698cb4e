"""Length classes: pairs that are padded to the same lengths, chosen so that little of a batch is padding."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_MOST_BUCKETS = 64
_MIN_NUM_BUCKETS = 16
"""Minimum number of classes, even for a small corpus; a batch may then have a pair twice."""
_WORTH_CUTTING = 5e-4
"""Smallest share of all positions that a cut must save: fewer classes mix pairs better."""


@dataclass(frozen=True)
class Bucket:
    """Pairs with sources up to L and targets up to N."""

    source_length: int
    target_length: int
    members: NDArray[np.int64]
    """Indices into the store, ascending."""


@dataclass(frozen=True)
class _Box:
    """A rectangle of (source length, target length) cells, ends exclusive."""

    source_start: int
    source_end: int
    target_start: int
    target_end: int


class _Cut(NamedTuple):
    gain: float
    """Expected positions saved per pair, summed over the pairs' weights."""
    halves: tuple[_Box, _Box]


_MinPairs = Callable[[NDArray[np.int64]], NDArray[np.int64]]


def plan_buckets(
    source_lengths: NDArray[np.int32], target_lengths: NDArray[np.int32], weights: NDArray[np.float64],
    group_tokens: int, num_groups: int,
) -> list[Bucket]:  # fmt: skip
    """Buckets that cover all pairs once, by cutting greedily where the most expected padding is saved.

    `weights` are the pairs' probabilities of being drawn. A bucket keeps enough pairs for several batches, as
    far as the corpus allows: a batch drawn from too few would repeat them.
    """
    shape = (int(source_lengths.max()) + 1, int(target_lengths.max()) + 1)
    cells = np.ravel_multi_index((source_lengths, target_lengths), shape)
    mass = np.asarray(np.bincount(cells, weights, shape[0] * shape[1]).reshape(shape), np.float64)
    count = np.bincount(cells, minlength=shape[0] * shape[1]).reshape(shape)
    max_required = max(1, len(weights) // _MIN_NUM_BUCKETS)

    def min_pairs(length: NDArray[np.int64]) -> NDArray[np.int64]:
        """Number of pairs that a bucket of this length, both sides together, must have."""
        rows_per_group = np.maximum(1, group_tokens // np.maximum(1, length))
        return np.asarray(np.minimum(4 * num_groups * rows_per_group, max_required))

    boxes = [_Box(0, shape[0], 0, shape[1])]
    cuts = [_best_cut(boxes[0], mass, count, min_pairs)]
    positions = float(mass.sum()) * (shape[0] + shape[1] - 2)
    while len(boxes) < _MOST_BUCKETS:
        best = max(range(len(boxes)), key=lambda index: cuts[index].gain)
        savings, halves = cuts[best]
        positions -= savings
        if savings < _WORTH_CUTTING * positions:
            break
        boxes[best : best + 1] = halves
        cuts[best : best + 1] = [_best_cut(half, mass, count, min_pairs) for half in halves]
    return _buckets(boxes, source_lengths, target_lengths, shape)


def _best_cut(box: _Box, mass: NDArray[np.float64], count: NDArray[np.int64], min_pairs: _MinPairs) -> _Cut:
    """The cut of a box that saves the most expected positions; it saves 0 if none is allowed."""
    window = np.s_[box.source_start : box.source_end, box.target_start : box.target_end]
    by_source = _saved_by_cuts(mass[window], count[window], min_pairs, box.source_start, box.target_start)
    by_target = _saved_by_cuts(mass[window].T, count[window].T, min_pairs, box.target_start, box.source_start)
    if by_source.max() >= by_target.max():
        position = box.source_start + int(np.argmax(by_source)) + 1
        halves = replace(box, source_end=position), replace(box, source_start=position)
        return _Cut(float(by_source.max()), halves)
    position = box.target_start + int(np.argmax(by_target)) + 1
    halves = replace(box, target_end=position), replace(box, target_start=position)
    return _Cut(float(by_target.max()), halves)


def _saved_by_cuts(
    mass: NDArray[np.float64], count: NDArray[np.int64], min_pairs: _MinPairs, first_row: int, first_column: int
) -> NDArray[np.float64]:
    """[rows], the expected positions saved by cutting a window after each of its rows; 0 where not allowed.

    A pair costs the longest row plus the longest column of its half. `mass` and `count` are [rows, columns] by length;
    the window's first cell is at lengths `first_row` and `first_column`.
    """
    is_used = count > 0
    rows = np.arange(len(is_used))
    row = np.where(is_used.any(1), rows, -1) + first_row
    column = np.where(is_used.any(1), is_used.shape[1] - 1 - np.argmax(is_used[:, ::-1], 1), -1) + first_column
    mass_before, count_before = np.cumsum(mass.sum(1)), np.cumsum(count.sum(1))
    row_before, column_before = np.maximum.accumulate(row), np.maximum.accumulate(column)
    longest = row_before[-1] + column_before[-1]
    length_before = row_before + column_before
    length_after = row_before[-1] + np.append(np.maximum.accumulate(column[::-1])[::-1][1:], first_column)
    count_after = count_before[-1] - count_before
    savings = mass_before * (longest - length_before) + (mass_before[-1] - mass_before) * (longest - length_after)
    is_allowed = (count_before >= min_pairs(length_before)) & (count_after >= min_pairs(length_after))
    return np.where(is_allowed, savings, 0.0)


def _buckets(
    boxes: list[_Box], source_lengths: NDArray[np.int32], target_lengths: NDArray[np.int32], shape: tuple[int, int]
) -> list[Bucket]:
    box_of_cell = np.zeros(shape, np.int32)
    for index, box in enumerate(boxes):
        box_of_cell[box.source_start : box.source_end, box.target_start : box.target_end] = index
    box_of_pair = box_of_cell[source_lengths, target_lengths]
    buckets = []
    for index in range(len(boxes)):
        members = np.flatnonzero(box_of_pair == index)
        lengths = int(source_lengths[members].max()), int(target_lengths[members].max())
        buckets.append(Bucket(*lengths, members))
    return sorted(buckets, key=lambda bucket: (bucket.source_length, bucket.target_length))
