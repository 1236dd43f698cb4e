"""Reads and writes at indices under random assignments."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.sharding.partitioned import check_function

D = torch.float64


def ints(high: int, *shape: int, low: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(high + sum(shape)))


def distinct(high: int, *shape: int) -> Tensor:
    """Distinct indices along the last dimension."""
    return torch.rand(*shape[:-1], high, generator=torch.Generator().manual_seed(high)).argsort(-1)[..., : shape[-1]]


def _put(a: Tensor, b: Tensor, i: Tensor) -> Tensor:
    new = a * 2
    new[i] = b[: i.shape[0]] * 3
    return new * a


def _put_two(a: Tensor, b: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (a * 1).index_put((i, j), b[:1, 0].expand(i.shape), accumulate=True) * a


def _put_mask(a: Tensor, b: Tensor, i: Tensor) -> Tensor:
    new = a * 2
    new[a.detach() > 0] = 0.5
    return new * b[0, 0]


def _reduce(reduction: str, **options: Any) -> Callable[..., Tensor]:
    return lambda a, b, i: a.scatter_reduce(1, i, b, reduction, **options).sin()


WORDS, PAIRS = ints(7, 3, 4), (ints(5, 4), ints(7, 4, low=-7))
READS = {
    "embedding": (lambda a, b, i: F.embedding(i, a) * b[0], (7, 5), (2, 5), WORDS),
    "embedding with a padding row": (
        lambda a, b, i: F.embedding(i, a, padding_idx=2).sin() * b[0], (7, 5), (2, 5), WORDS
    ),
    "embedding by frequency": (
        lambda a, b, i: F.embedding(i, a, scale_grad_by_freq=True) * b[0], (7, 5), (2, 5), WORDS
    ),
    "embedding of one index": (lambda a, b, i: F.embedding(i, a) * b, (7, 5), (5,), torch.tensor(3)),
    "gather": (lambda a, b, i: a.gather(1, i) * b, (5, 7), (5, 4), ints(7, 5, 4)),
    "gather of fewer rows": (lambda a, b, i: a.gather(0, i) * b, (5, 7), (6, 3), ints(5, 6, 3)),
    "take along": (lambda a, b, i: torch.take_along_dim(a, i, 1) * b, (5, 7), (5, 2), ints(7, 1, 2)),
    "index_select": (lambda a, b, i: a.index_select(1, i) * b, (3, 7), (3, 5), ints(7, 5)),
    "rows": (lambda a, b, i: a[i] * b, (7, 4), (3, 2, 4), ints(7, 3, 2, low=-7)),
    "columns": (lambda a, b, i: a[:, i] * b, (3, 7), (3, 5), ints(7, 5, low=-7)),
    "elements": (lambda a, b, i, j: a[i, j] * b, (5, 7), (3, 4), ints(5, 3, 1), ints(7, 4)),
    "separate dimensions": (lambda a, b, i, j: a[i, :, j] * b, (5, 3, 7), (4, 3), *PAIRS),
    "take": (lambda a, b, i: a.take(i) * b, (5, 7), (6,), ints(35, 6)),
    "one_hot": (lambda a, b, i: F.one_hot(i, 6).to(D) @ a * b, (6, 3), (5, 3), ints(6, 5)),
    "cross entropy": (lambda a, b, i: F.cross_entropy(a, i, ignore_index=3) * b.sum(), (6, 5), (2,), ints(5, 6)),
}  # fmt: skip
WRITES = {
    "index_add": (lambda a, b, i: a.index_add(0, i, b, alpha=2.0) * a, (5, 3), (7, 3), ints(5, 7)),
    "index_copy": (lambda a, b, i: a.index_copy(1, i, b).sin(), (3, 7), (3, 4), distinct(7, 4)),
    "index_fill": (lambda a, b, i: a.index_fill(1, i, 2.0) * b, (3, 7), (3, 7), distinct(7, 4)),
    "scatter": (lambda a, b, i: a.scatter(1, i, b) * a, (4, 7), (4, 3), distinct(7, 4, 3)),
    "scatter of a value": (lambda a, b, i: a.scatter(1, i, 3.0) * b, (4, 7), (4, 7), ints(7, 4, 3)),
    "scatter_add": (lambda a, b, i: a.scatter_add(1, i, b).sin(), (4, 7), (4, 5), ints(7, 4, 5)),
    "scatter_add of fewer rows": (lambda a, b, i: a.scatter_add(0, i, b).sin(), (5, 7), (3, 3), ints(5, 3, 3)),
    "scatter_reduce sum": (_reduce("sum"), (4, 7), (4, 5), ints(7, 4, 5)),
    "scatter_reduce amax": (_reduce("amax"), (4, 7), (4, 5), ints(7, 4, 5)),
    "scatter_reduce amin alone": (_reduce("amin", include_self=False), (4, 7), (4, 5), ints(7, 4, 5)),
    "scatter_reduce mean": (_reduce("mean"), (4, 7), (4, 5), ints(7, 4, 5)),
    "index_put": (_put, (7, 3), (5, 3), distinct(7, 5)),
    "index_put of two, added": (_put_two, (5, 7), (1, 2), ints(5, 6, low=-5), ints(7, 6)),
    "index_put by a mask": (_put_mask, (5, 7), (1, 2), torch.zeros(1)),
}  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", READS | WRITES)
def test_any_positions(name: str) -> None:
    torch.manual_seed(len(name))
    function, first, second, *inputs = (READS | WRITES)[name]
    check_function(function, first, second, inputs=inputs, cases=5)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", READS | WRITES)
def test_positions_in_a_dimension_that_is_split(name: str) -> None:
    """Prefers options that split the indexed dimension."""
    torch.manual_seed(len(name))
    function, first, second, *inputs = (READS | WRITES)[name]
    check_function(
        function, first, second, inputs=inputs, cases=5, seed=1, meshes=((2,), (3,), (2, 2), (3, 2)),
        prefer=lambda option: option.factor is not None and option.factor[0] in "tid",
    )  # fmt: skip


def test_a_number_is_read_as_a_vector_of_one() -> None:
    check_function(lambda a, b, i: a.sum().gather(0, i) * b, (5,), (6,), inputs=[torch.tensor([0])], cases=4)
