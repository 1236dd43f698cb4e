"""Reads and writes at positions that the data name, under random assignments."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.sharding.partitioned import check_at_random

D = torch.float64


class Of(nn.Module):
    """A function of two parameters and the inputs."""

    def __init__(self, function: Callable[..., Tensor], first: tuple[int, ...], second: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.a, self.b = nn.Parameter(torch.randn(first, dtype=D)), nn.Parameter(torch.randn(second, dtype=D))

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self.a, self.b, *inputs)


def _distinct(rows: int, count: int) -> Tensor:
    return torch.randperm(rows)[:count]


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


READS = {
    "embedding": (lambda a, b, i: F.embedding(i, a) * b[0], (7, 5), (2, 5), lambda: [torch.randint(0, 7, (3, 4))]),
    "embedding with a padding row": (
        lambda a, b, i: F.embedding(i, a, padding_idx=2).sin() * b[0],
        (7, 5), (2, 5), lambda: [torch.randint(0, 7, (3, 4))],
    ),
    "embedding by frequency": (
        lambda a, b, i: F.embedding(i, a, scale_grad_by_freq=True) * b[0],
        (7, 5), (2, 5), lambda: [torch.randint(0, 7, (3, 4))],
    ),
    "embedding of one index": (lambda a, b, i: F.embedding(i, a) * b, (7, 5), (5,), lambda: [torch.tensor(3)]),
    "gather": (lambda a, b, i: a.gather(1, i) * b, (5, 7), (5, 4), lambda: [torch.randint(0, 7, (5, 4))]),
    "gather of fewer rows": (lambda a, b, i: a.gather(0, i) * b, (5, 7), (6, 3), lambda: [torch.randint(0, 5, (6, 3))]),
    "take along": (
        lambda a, b, i: torch.take_along_dim(a, i, 1) * b, (5, 7), (5, 2), lambda: [torch.randint(0, 7, (1, 2))]
    ),
    "index_select": (lambda a, b, i: a.index_select(1, i) * b, (3, 7), (3, 5), lambda: [torch.randint(0, 7, (5,))]),
    "rows": (lambda a, b, i: a[i] * b, (7, 4), (3, 2, 4), lambda: [torch.randint(-7, 7, (3, 2))]),
    "columns": (lambda a, b, i: a[:, i] * b, (3, 7), (3, 5), lambda: [torch.randint(-7, 7, (5,))]),
    "elements": (
        lambda a, b, i, j: a[i, j] * b, (5, 7), (3, 4), lambda: [torch.randint(0, 5, (3, 1)), torch.randint(0, 7, (4,))]
    ),
    "apart": (
        lambda a, b, i, j: a[i, :, j] * b, (5, 3, 7), (4, 3),
        lambda: [torch.randint(0, 5, (4,)), torch.randint(-7, 7, (4,))],
    ),
    "take": (lambda a, b, i: a.take(i) * b, (5, 7), (6,), lambda: [torch.randint(0, 35, (6,))]),
    "one_hot": (lambda a, b, i: F.one_hot(i, 6).to(D) @ a * b, (6, 3), (5, 3), lambda: [torch.randint(0, 6, (5,))]),
    "cross entropy": (
        lambda a, b, i: F.cross_entropy(a, i, ignore_index=3) * b.sum(), (6, 5), (2,),
        lambda: [torch.randint(0, 5, (6,))],
    ),
}  # fmt: skip

WRITES = {
    "index_add": (lambda a, b, i: a.index_add(0, i, b, alpha=2.0) * a, (5, 3), (7, 3),
                  lambda: [torch.randint(0, 5, (7,))]),
    "index_copy": (lambda a, b, i: a.index_copy(1, i, b).sin(), (3, 7), (3, 4), lambda: [_distinct(7, 4)]),
    "index_fill": (lambda a, b, i: a.index_fill(1, i, 2.0) * b, (3, 7), (3, 7), lambda: [_distinct(7, 4)]),
    "scatter": (lambda a, b, i: a.scatter(1, i, b) * a, (4, 7), (4, 3),
                lambda: [torch.stack([_distinct(7, 3) for _ in range(4)])]),
    "scatter of a value": (lambda a, b, i: a.scatter(1, i, 3.0) * b, (4, 7), (4, 7),
                           lambda: [torch.randint(0, 7, (4, 3))]),
    "scatter_add": (lambda a, b, i: a.scatter_add(1, i, b).sin(), (4, 7), (4, 5),
                    lambda: [torch.randint(0, 7, (4, 5))]),
    "scatter_add of fewer rows": (lambda a, b, i: a.scatter_add(0, i, b).sin(), (5, 7), (3, 3),
                                  lambda: [torch.randint(0, 5, (3, 3))]),
    "scatter_reduce sum": (lambda a, b, i: a.scatter_reduce(1, i, b, "sum").sin(), (4, 7), (4, 5),
                           lambda: [torch.randint(0, 7, (4, 5))]),
    "scatter_reduce amax": (lambda a, b, i: a.scatter_reduce(1, i, b, "amax").sin(), (4, 7), (4, 5),
                            lambda: [torch.randint(0, 7, (4, 5))]),
    "scatter_reduce amin alone": (lambda a, b, i: a.scatter_reduce(1, i, b, "amin", include_self=False).sin(),
                                  (4, 7), (4, 5), lambda: [torch.randint(0, 7, (4, 5))]),
    "scatter_reduce mean": (lambda a, b, i: a.scatter_reduce(1, i, b, "mean").sin(), (4, 7), (4, 5),
                            lambda: [torch.randint(0, 7, (4, 5))]),
    "index_put": (_put, (7, 3), (5, 3), lambda: [_distinct(7, 5)]),
    "index_put of two, added": (_put_two, (5, 7), (1, 2), lambda: [torch.randint(-5, 5, (6,)),
                                                                  torch.randint(0, 7, (6,))]),
    "index_put by a mask": (_put_mask, (5, 7), (1, 2), lambda: [torch.zeros(1)]),
}  # fmt: skip


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", READS | WRITES)
def test_any_positions(name: str) -> None:
    torch.manual_seed(len(name))
    function, first, second, inputs = (READS | WRITES)[name]
    check_at_random(Of(function, first, second), tuple(inputs()), cases=5)


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", READS | WRITES)
def test_positions_in_a_dimension_that_is_split(name: str) -> None:
    """Options that split what is read or written are drawn where there are any."""
    torch.manual_seed(len(name))
    function, first, second, inputs = (READS | WRITES)[name]
    check_at_random(
        Of(function, first, second), tuple(inputs()), cases=5, seed=1,
        prefer=lambda option: option.factor is not None and option.factor[0] in "tid",
        meshes=((2,), (3,), (2, 2), (3, 2)),
    )  # fmt: skip


def test_a_number_is_read_as_a_vector_of_one() -> None:
    read = Of(lambda a, b, i: a.sum().gather(0, i) * b, (5,), (6,))
    check_at_random(read, (torch.tensor([0]),), cases=4)
