"""Random draws are functions of their key: uniform, independent, and the same in any order on any rank."""

import math
from itertools import combinations

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe.random import Purpose, bits, dropout, fold, gumbel, init_uniform_, keep_mask, uniform


def test_uniform_is_uniform() -> None:
    draws = uniform(fold(1, 2, 3), torch.arange(200_000))
    assert draws.min() >= 0
    assert draws.max() < 1
    counts = torch.histc(draws, bins=100, min=0, max=1)
    chi_squared = ((counts - 2000) ** 2 / 2000).sum().item()
    assert chi_squared < 99 + 5 * math.sqrt(2 * 99)


@pytest.mark.parametrize("lag", [1, 2, 128])
def test_neighbouring_counters_are_uncorrelated(lag: int) -> None:
    draws = uniform(fold(0), torch.arange(200_000)) - 0.5
    correlation = (draws[lag:] * draws[:-lag]).mean() * 12
    assert abs(correlation) < 5 / math.sqrt(200_000)


def test_a_key_is_of_whole_numbers_and_every_part_and_its_order_matter() -> None:
    counters = torch.arange(1000)
    keys = [fold(0, 0, 0), fold(1, 0, 0), fold(0, 1, 0), fold(0, 0, 1), fold(0, 0), fold(2, 1), fold(1, 2)]
    draws = [uniform(key, counters) for key in keys]
    for left, invalid in combinations(draws, 2):
        assert abs(((left - 0.5) * (invalid - 0.5)).mean() * 12) < 0.2
        assert not torch.equal(left, invalid)
    assert fold(1) == fold(numpy.int32(1)) == fold(torch.tensor(1))
    for invalid in (1.9, 1.0, "1"):
        with pytest.raises(TypeError):
            fold(invalid)  # type: ignore[arg-type]


@given(st.permutations(range(50)), st.integers(0, 2**63 - 1))
def test_a_draw_depends_on_its_counter_alone(order: list[int], key: int) -> None:
    counters = torch.arange(50)
    permutation = torch.tensor(order)
    assert torch.equal(bits(key, counters)[permutation], bits(key, counters[permutation]))
    assert torch.equal(keep_mask(key, counters, 9, 0.5)[permutation], keep_mask(key, counters[permutation], 9, 0.5))
    assert torch.equal(gumbel(key, counters, 5)[permutation], gumbel(key, counters[permutation], 5))


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_mean_and_drops_its_share(probability: float) -> None:
    x = torch.ones(4096, 128)
    y = dropout(x, probability, fold(3), torch.arange(4096))
    assert (y == 0).float().mean().item() == pytest.approx(probability, abs=0.003)
    assert y.mean().item() == pytest.approx(1.0, abs=0.02)
    rows, columns = (y == 0).float().mean(1), (y == 0).float().mean(0)
    assert rows.std().item() == pytest.approx(math.sqrt(probability * (1 - probability) / 128), rel=0.15)
    assert columns.std().item() == pytest.approx(math.sqrt(probability * (1 - probability) / 4096), rel=0.4)


def test_masks_are_pairwise_independent() -> None:
    mask = keep_mask(fold(9), torch.arange(2000), 256, 0.5).double() * 2 - 1
    for signs in (mask, mask.t()):
        correlations = signs @ signs.t() / signs.shape[1]
        correlations.fill_diagonal_(0)
        assert correlations.abs().max() < 6.5 / math.sqrt(signs.shape[1])
    by_purpose = [keep_mask(fold(0, 0, 0, purpose), torch.arange(1000), 16, 0.5) for purpose in Purpose]
    for left, right in combinations(by_purpose, 2):
        assert abs((left == right).float().mean() - 0.5) < 0.05


def test_dropout_has_the_gradient_of_its_mask_and_drops_nothing_at_tiny_probabilities() -> None:
    x = torch.randn(8, 16, requires_grad=True)
    assert dropout(x, 0.0, 1, torch.arange(8)) is x
    for probability in (1e-12, 1e-9):  # too small to draw
        torch.testing.assert_close(dropout(x, probability, 3, torch.arange(8)), x)
    y = dropout(x, 0.25, 1, torch.arange(8))
    y.sum().backward()
    torch.testing.assert_close(x.grad, (y != 0) / 0.75)


def test_initial_weights_of_a_slice_are_the_slice_of_the_whole() -> None:
    weights, other_weights = torch.empty(8, 30, 50), torch.empty(8, 30, 50)
    init_uniform_(weights, 0.02, seed=7, name="experts")
    for first, last in ((0, 2), (2, 8), (7, 8)):
        part, inner = torch.empty(last - first, 30, 50), torch.empty(2, last - first, 7)
        init_uniform_(part, 0.02, 7, "experts", weights.shape, (first, 0, 0))
        assert torch.equal(part, weights[first:last])
        init_uniform_(inner, 0.02, 7, "experts", weights.shape, (4, first, 9))
        assert torch.equal(inner, weights[4:6, first:last, 9:16])
    assert weights.std().item() == pytest.approx(0.02, rel=0.02)
    assert weights.abs().max() <= math.sqrt(3) * 0.02
    init_uniform_(other_weights, 0.02, seed=7, name="another")
    assert not torch.equal(other_weights, weights)
    assert len({float(x) for x in weights[:, 0, 0]}) == 8, "experts differ at the start"
    large, tail = torch.empty(3, 1 << 19), torch.empty(1, 1 << 19)  # drawn in several parts
    init_uniform_(large, 1.0, seed=0, name="large")
    init_uniform_(tail, 1.0, 0, "large", large.shape, (2, 0))
    assert torch.equal(large[2:], tail)


def test_first_values_never_change() -> None:
    """A checkpoint that resumes under a new release must meet the same draws."""
    key = fold(1, 2, 3)
    assert key == 0xD0734750FDE362B3
    first = [value & (2**64 - 1) for value in bits(key, torch.arange(3)).tolist()]
    assert first == [0xBF3F2DE408FE6EB2, 0x12588D809DCE88A7, 0xDD034EA7D44E8739]
    mask = keep_mask(key, torch.arange(1, 4), 8, 0.5).int().tolist()
    assert mask == [[1, 1, 0, 1, 1, 0, 1, 1], [1, 1, 0, 0, 0, 0, 1, 0], [0, 1, 0, 0, 0, 1, 0, 0]]
