"""Functions captured as substitutes, such as `nn.EmbeddingBag` and `torch.cond`, compute what torch computes."""

import importlib
import random
from typing import Any

import pytest
import torch
from torch import Tensor, cond, nn
from torch.nn import functional as F

from moe import sharding
from moe.sharding.capture.substitutes import embedding_bag, histc
from moe.spec import SpecError
from tests.sharding.on_ranks import cores
from tests.sharding.partitioned import check_at_random, check_function

D = torch.float64


class Bags(nn.Module):
    """An embedding bag and a linear layer."""

    def __init__(self, num_rows: int, **options: Any) -> None:
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(num_rows, 6, **options), nn.Linear(6, 2)

    def forward(self, index: Tensor, *extra_inputs: Tensor) -> Tensor:
        offsets = next((tensor for tensor in extra_inputs if not tensor.is_floating_point()), None)
        weights = next((tensor for tensor in extra_inputs if tensor.is_floating_point()), None)
        return self.out(self.bag(index, offsets, weights)).square().sum()


def bags(seed: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A module and its batch with random options: bags of any sizes, also empty, weights, padding rows."""
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
    extra_inputs = (tensor for tensor in (offsets, weights) if tensor is not None)
    return Bags(num_rows, **options).to(D), (index, *extra_inputs)


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(30))
def test_bags_of_embeddings(seed: int) -> None:
    module, sample = bags(seed)
    check_at_random(module, sample, cases=3, seed=seed)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_long_bags_in_bfloat16(mode: str) -> None:
    torch.manual_seed(0)
    table, index = torch.rand(10, 3).bfloat16(), torch.randint(10, (3000,))
    offsets = torch.tensor([0, 2000])
    expected = F.embedding_bag(index, table, offsets, mode=mode)
    torch.testing.assert_close(embedding_bag(index, table, offsets, mode=mode), expected)


@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_equal_bounds_of_a_histogram_are_those_of_the_elements(limit: float) -> None:
    x = torch.linspace(0, 4, 20)
    assert torch.equal(histc(x, 4, limit, limit), torch.histc(x, 4, limit, limit))


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}], ids=str)
def test_bags_without_a_substitute_are_refused(options: dict[str, Any]) -> None:
    module = Bags(7, mode="sum", **options)
    with pytest.raises(SpecError) as error:
        sharding.plan(module, (torch.randint(7, (8, 3)),), cores(2), mesh={"a": 2})
    assert any("test_substitutes.py" in problem.path for problem in error.value.problems)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(10))
def test_histograms(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    bins = draw.randint(1, 7)
    integers = torch.randint(-1, bins + 1, (draw.randint(1, 30),)).to(D)
    x, bounds = draw.choice(
        [(integers, (0, max(1, bins - 1))), (integers.new_ones(5), (0, 0)), (torch.randn(20).to(D), (-1, 2))]
    )

    def counts(scale: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (torch.histc(x, bins, *bounds) * scale).square().sum(), x.histc(bins, *bounds), x.histc(bins)

    check_function(counts, (), inputs=[x], cases=2, seed=seed)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(12))
def test_grouped_products(seed: int) -> None:
    """By the operator that transformers registers: groups of any sizes, also empty, and rows after the last group."""
    importlib.import_module("transformers.integrations.moe")
    product = torch.ops.transformers.grouped_mm_fallback
    draw = random.Random(seed)
    torch.manual_seed(seed)
    num_rows, num_groups = draw.randint(1, 17), draw.randint(1, 7)
    ends = torch.tensor(sorted(draw.randint(0, num_rows) for _ in range(num_groups)), dtype=torch.int32)

    def run(first: Tensor, second: Tensor, scale: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
        return product(product(rows * scale, first, ends).tanh(), second, ends).square().sum()

    shapes = (num_groups, 5, 3), (num_groups, 3, 4), (5,)
    check_function(run, *shapes, inputs=[torch.randn(num_rows, 5, dtype=D), ends], cases=4, seed=seed)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_grouped_products_of_torch(seed: int) -> None:
    """In whole numbers, which bfloat16 adds without rounding."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    num_groups, num_rows = draw.randint(1, 5), draw.randint(1, 17)
    ends = [*sorted(draw.randint(0, num_rows) for _ in range(num_groups - 1)), num_rows]
    rows, matrices, scale = (
        torch.randint(-1, 2, shape).bfloat16() for shape in ((num_rows, 16), (num_groups, 16, 8), (16,))
    )
    check_function(
        lambda matrices, scale, rows, ends: F.grouped_mm(rows * scale, matrices, offs=ends).float().sum(),
        matrices, scale, inputs=[rows, torch.tensor(ends, dtype=torch.int32)], cases=4, seed=seed,
    )  # fmt: skip


class Loop(nn.Module):
    """A common loop over experts that selects the tokens of each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weight, index = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, choice = torch.where(index == number)
            out = out.index_add(0, row, expert(x[row]) * weight[row, choice, None])
        return out.square().sum()


def test_a_loop_over_experts_is_refused_with_its_replacement() -> None:
    module, x = Loop().to(D), torch.randn(8, 4, dtype=D)
    with pytest.raises(SpecError) as error:
        sharding.plan(module, (x,), cores(2), mesh={"a": 2})
    remedy = error.value.problems[0].remedy
    assert all(code in remedy for code in ('torch.einsum("tm,emh->teh"', "scatter(1, index, weight)", "moe.MoELayer"))
    weight, index = module.gate(x).softmax(-1).topk(2)
    gates = torch.zeros(8, 3, dtype=D).scatter(1, index, weight)
    weights = torch.stack([expert.weight.t() for expert in module.experts])
    biases = torch.stack([expert.bias for expert in module.experts])
    outputs = torch.einsum("tm,emh->teh", x, weights) + biases
    assert torch.allclose(torch.einsum("teh,te->th", outputs, gates).square().sum(), module(x))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, threshold: Tensor) -> Tensor:
        is_above = x.sum() > threshold
        branch_output = cond(is_above, lambda x: self.first(x).sin(), lambda x: self.second(x).cos() * 2, (x,))
        left, right = torch.cond(is_above, lambda x: (x + 1, x * 2), lambda x: (x * 3, -x), (branch_output,))
        return (left * right).sum()


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of torch.cond's own, on one device
@pytest.mark.parametrize("threshold", [-1e9, 1e9], ids=["first", "second"])
def test_branches_chosen_by_the_data(threshold: float) -> None:
    torch.manual_seed(0)
    sample = (torch.randn(8, 4, dtype=D), torch.tensor(threshold, dtype=D))
    check_at_random(Branches().to(D), sample, cases=4)
