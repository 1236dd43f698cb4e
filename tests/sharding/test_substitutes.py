"""Functions that are captured as others: `nn.EmbeddingBag` and `torch.cond` compute what torch computes."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, cond, nn

from moe import sharding
from moe.spec import SpecError
from tests.sharding.on_ranks import cores
from tests.sharding.partitioned import check_at_random

D = torch.float64


class Bags(nn.Module):
    """Bags of tags, whose embeddings are reduced, and a layer on top."""

    def __init__(self, num_rows: int, **options: Any) -> None:
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(num_rows, 6, **options), nn.Linear(6, 2)

    def forward(self, index: Tensor, *others: Tensor) -> Tensor:
        offsets = next((tensor for tensor in others if not tensor.is_floating_point()), None)
        weights = next((tensor for tensor in others if tensor.is_floating_point()), None)
        return self.out(self.bag(index, offsets, weights)).square().sum()


def bags(seed: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A module and its batch, with options drawn at random: bags of one size or of several, some of them empty, with
    weights, and rows that are left out."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    mode, num_rows = draw.choice(["sum", "mean", "max"]), draw.randint(3, 11)
    options: dict[str, Any] = {"mode": mode}
    if draw.random() < 0.5:
        options["padding_idx"] = draw.choice([0, num_rows - 1, -2])
    if draw.random() < 0.5:
        index, offsets = torch.randint(num_rows, (draw.randint(1, 8), draw.randint(1, 5))), None
    else:
        index, num_bags = torch.randint(num_rows, (draw.randint(4, 20),)), draw.randint(2, 6)
        begins = [0, *sorted(draw.randint(0, len(index)) for _ in range(num_bags - 1))]
        if draw.random() < 0.5:
            options["include_last_offset"] = True
            begins.append(len(index))
        offsets = torch.tensor(begins)
    with_weights = mode == "sum" and draw.random() < 0.5
    weights = torch.rand(index.shape, dtype=D) if with_weights else None
    others = (tensor for tensor in (offsets, weights) if tensor is not None)
    return Bags(num_rows, **options).to(D), (index, *others)


@pytest.mark.parametrize("seed", range(30))
def test_bags_of_embeddings(seed: int) -> None:
    module, sample = bags(seed)
    check_at_random(module, sample, cases=3, seed=seed)


@pytest.mark.parametrize(
    "options", [{"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}], ids=str
)
def test_bags_without_a_substitute_are_refused(options: dict[str, Any]) -> None:
    module = Bags(7, mode="sum", **options)
    with pytest.raises(SpecError) as caught:
        sharding.plan(module, (torch.randint(7, (8, 3)),), cores(2), mesh={"a": 2})
    assert any("test_substitutes.py" in problem.path for problem in caught.value.problems)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, threshold: Tensor) -> Tensor:
        above = x.sum() > threshold
        chosen = cond(above, lambda x: self.first(x).sin(), lambda x: self.second(x).cos() * 2, (x,))
        one, other = torch.cond(above, lambda x: (x + 1, x * 2), lambda x: (x * 3, -x), (chosen,))
        return (one * other).sum()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of torch.cond's own, on one device
@pytest.mark.parametrize("threshold", [-1e9, 1e9], ids=["the first", "the second"])
def test_a_branch_that_the_data_choose(threshold: float) -> None:
    torch.manual_seed(0)
    sample = (torch.randn(8, 4, dtype=D), torch.tensor(threshold, dtype=D))
    check_at_random(Branches().to(D), sample, cases=4)
