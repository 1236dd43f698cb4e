"""Convolutions and pooling split in space: results and gradients of one device, for random strides, dilations, paddings
and sizes, with uneven and empty parts."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.grid import seeds
from tests.sharding.modules import ConvolutionalNetwork
from tests.sharding.partitioned import check_at_random, check_function
from tests.sharding.test_boundaries import check, exchanges


def _size_for(draw: random.Random, reach: int, padding: int) -> int:
    """Size of a dimension with at least one window."""
    return max(1, reach + 1 - 2 * padding) + draw.randrange(7)


SEEDS = seeds(1, 8)


@pytest.mark.sample(1)
@pytest.mark.parametrize("num_dims", [1, 2, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_convolutions(num_dims, seed):
    draw = random.Random(100 * num_dims + seed)
    convolution = (F.conv1d, F.conv2d, F.conv3d)[num_dims - 1]
    kernel, stride, dilation, padding = (
        [draw.choice(choices) for _ in range(num_dims)] for choices in ((1, 2, 3), (1, 2, 3), (1, 2), (0, 1, 2))
    )
    sizes = [_size_for(draw, (k - 1) * d, p) for k, d, p in zip(kernel, dilation, padding, strict=True)]
    groups, inner, outer = draw.choice([1, 1, 2, 3]), draw.choice([1, 2]), draw.choice([1, 2])
    check(
        lambda x, weight, bias: convolution(x, weight, bias, stride, padding, dilation, groups),
        (draw.choice([1, 2, 3]), groups * inner, *sizes),
        (groups * outer, inner, *kernel),
        (groups * outer,),
        seed=seed,
        cases=5,
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("num_dims", [1, 2])
@pytest.mark.parametrize("seed", SEEDS)
def test_transposed_convolutions(num_dims, seed):
    draw = random.Random(100 * num_dims + seed)
    convolution = (F.conv_transpose1d, F.conv_transpose2d)[num_dims - 1]
    kernel, stride, dilation = (
        [draw.choice(choices) for _ in range(num_dims)] for choices in ((1, 2, 3), (1, 2, 3, 4), (1, 2))
    )
    padding = [draw.randrange((k - 1) * d // 2 + 1) for k, d in zip(kernel, dilation, strict=True)]
    output_padding = [draw.randrange(max(pair)) for pair in zip(stride, dilation, strict=True)]
    groups, inner, outer = draw.choice([1, 1, 2]), draw.choice([1, 2]), draw.choice([1, 3])
    check(
        lambda x, weight, bias: convolution(x, weight, bias, stride, padding, output_padding, groups, dilation),
        (draw.choice([1, 3]), groups * inner, *(draw.randrange(2, 7) for _ in range(num_dims))),
        (groups * inner, outer, *kernel),
        (groups * outer,),
        seed=seed,
        cases=5,
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kernel", "padding"), [(1, 0), (1, 1), (2, 2)])
def test_output_padding_of_a_transposed_convolution(kernel, padding):
    """By more than a stride: a convolution of the result has more windows than the input has positions."""
    check(
        lambda x, weight: F.conv_transpose1d(x, weight, padding=padding, output_padding=2, dilation=3),
        (2, 2, 6),
        (2, 3, kernel),
        seed=1,
    )


@pytest.mark.slow
@pytest.mark.parametrize("num_dims", [1, 2, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_pooling(num_dims, seed):
    draw = random.Random(100 * num_dims + seed)
    kernel, stride = ([draw.choice(choices) for _ in range(num_dims)] for choices in ((1, 2, 3), (1, 2, 3)))
    padding = [draw.randrange(k // 2 + 1) for k in kernel]
    sizes = [_size_for(draw, 2 * (k - 1), p) for k, p in zip(kernel, padding, strict=True)]
    shape = (2, 3, *sizes) if num_dims < 3 else (3, *sizes)
    ceil_mode, dilation = draw.random() < 0.5, draw.choice([1, 2])
    largest = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[num_dims - 1]
    check(lambda x: largest(x, kernel, stride, padding, dilation, ceil_mode), shape, seed=seed)
    average = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[num_dims - 1]
    options = [draw.random() < 0.5] + ([draw.choice([None, 5])] if num_dims > 1 else [])
    check(lambda x: average(x, kernel, stride, padding, ceil_mode, *options), shape, seed=seed)


@pytest.mark.slow
def test_windows_do_not_overlap_by_default():
    check(lambda x: F.max_pool2d(x, 2), (2, 3, 6, 7), seed=1)
    check(lambda x: F.avg_pool2d(x, 2), (2, 3, 6, 7), seed=1)
    check(lambda x: F.max_pool3d(x, 2), (3, 5, 4, 4), seed=2)


def test_averages_of_whole_numbers_are_whole():
    def average_pools(x: Tensor) -> tuple[Tensor, Tensor]:
        return F.avg_pool2d(x, 2, 1, 1), F.avg_pool2d(x, 2, divisor_override=3)

    check_function(average_pools, inputs=[torch.randint(-9, 9, (2, 3, 6, 7))], cases=6)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3, 4, (2, 3)], ids=str)
def test_adaptive_averages(size):
    check(lambda x: F.adaptive_avg_pool2d(x, size), (2, 3, 6, 7), seed=1)
    check(lambda x: F.adaptive_avg_pool2d(x, size), (2, 3, 8, 12), seed=2)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(2))
def test_a_residual_network(seed):
    torch.manual_seed(seed)
    sample = (torch.randn(2, 3, 30, 34).double(), torch.tensor([1, 3]))
    check_at_random(ConvolutionalNetwork(2).double(), sample, cases=4, seed=seed, prefer=exchanges)
