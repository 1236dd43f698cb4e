"""Repeated blocks are captured and planned once, though each draws its own random numbers, and compute what the plain
module computes: the integer program does not grow with depth."""

import hashlib
from collections import Counter

import pytest
import torch
from torch import Tensor, fx, nn

from benchmarks.translation_loss import TranslationLoss
from moe.plan import Cluster
from moe.sharding.capture.capture import CapturedGraph, capture
from moe.sharding.capture.siblings import find_repeats
from moe.sharding.operands import is_operator
from moe.sharding.rules.registry import Rules
from moe.sharding.solve.classes import classes
from moe.sharding.solve.costs import Costs
from moe.sharding.solve.placements import PlacementProgram
from moe.sharding.solve.solution import MemoryLimits
from moe.spec import MoESpec, TranslationModelSpec
from tests.sharding.partitioned import check_at_random, operators


class Block(nn.Module):
    """A mean over rows in place of attention, and a batch norm with buffers."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)
        self.norm, self.scale = nn.BatchNorm1d(width), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor, rows: Tensor, *, sign: float = 1.0) -> tuple[Tensor, Tensor, str]:
        print("a block runs")
        mean_row = x.index_select(0, rows).mean(0, keepdim=True)
        y = self.second(torch.tanh(self.first(x + mean_row))) * sign
        return self.norm(x + y * self.scale), y.abs().sum(-1), "text"


class Stack(nn.Module):
    def __init__(self, depth: int, is_tied: bool = False) -> None:
        super().__init__()
        self.before, self.layers = nn.Linear(5, 6), nn.ModuleList(Block() for _ in range(depth))
        for layer in self.layers if is_tied else ():
            layer.first.weight = self.layers[0].first.weight

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        x = self.before(x) if x.shape[-1] == 5 else x
        total = x.new_zeros(())
        for layer in self.layers:
            x, sums, _ = layer(x, rows, sign=-1.0)
            total = total + sums.mean()
        return x.square().mean() + 0.1 * total


SAMPLE = (torch.randn(7, 5, dtype=torch.float64), torch.tensor([0, 3, 3]))


@pytest.mark.slow
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_programs_of_repeated_blocks_are_those_of_one_device(is_tied: bool) -> None:
    torch.manual_seed(0)
    check_at_random(Stack(3, is_tied).double(), SAMPLE, cases=15)


@pytest.mark.slow
def test_a_first_block_without_trained_inputs_differs_from_the_others() -> None:
    torch.manual_seed(0)
    check_at_random(Stack(3).double(), (torch.randn(7, 6, dtype=torch.float64), SAMPLE[1]), cases=8)


@pytest.mark.slow
def test_a_repeated_block_is_run_equally_often_for_any_depth(capsys: pytest.CaptureFixture[str]) -> None:
    counts = []
    for depth in (2, 9):
        num_operators = len(operators(capture(Stack(depth).double(), SAMPLE)))
        counts.append((capsys.readouterr().out.count("a block runs"), num_operators))
    assert counts[0][0] == counts[1][0] > 0
    assert counts[1][1] > 3 * counts[0][1]


class Factor(nn.Module):
    def __init__(self, number: float) -> None:
        super().__init__()
        self.number, self.shift = number, nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.number + self.shift


class Different(nn.Module):
    """Layers that only look alike."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.layers[1].weight.requires_grad_(False)
        self.factors = nn.ModuleList(Factor(number) for number in (1.0, 2.0, 2.0))

    def forward(self, x: Tensor) -> Tensor:
        for layer, factor in zip(self.layers, self.factors, strict=True):
            x = factor(torch.tanh(layer(x)))
        return x.sum()


def test_layers_that_only_look_alike_are_not_repeats() -> None:
    assert [len(repeats) for repeats in find_repeats(Different())] == [2, 2]
    check_at_random(Different().double(), (torch.randn(4, 6, dtype=torch.float64),), cases=6)


def translation(num_layers: int) -> TranslationLoss:
    """With experts in every other layer, and dropout and second experts drawn by layer."""
    spec = TranslationModelSpec(
        model_dim=16, num_heads=2, head_dim=8, ffn_dim=32, num_encoder_layers=num_layers,
        num_decoder_layers=num_layers, source_vocab_size=300, target_vocab_size=300, dropout=0.1,
        moe=MoESpec(num_experts=4, model_dim=16, hidden_dim=32, group_tokens=12),
    )  # fmt: skip
    return TranslationLoss.on_meta(spec)


def capture_translation(num_layers: int) -> CapturedGraph:
    rows = torch.zeros(8, 6, dtype=torch.int64)
    return capture(translation(num_layers), (rows, rows, rows, torch.tensor(1)))


def structure(model: CapturedGraph) -> Counter[str]:
    """Hashes of operators with their operands; in the backward pass, where gradients may be added in another order, of
    arguments other than tensors."""
    hashes: dict[fx.Node, str] = {}
    backward = model.backward
    for node in filter(lambda node: node.op != "output", model.graph.graph.nodes):
        of_tensor = (lambda _: "") if node in backward else hashes.__getitem__
        leaf = model.leaves.get(node)
        content = f"{leaf.name if leaf else node.target} {fx.map_arg(node.args, of_tensor)}"
        hashes[node] = hashlib.sha256(content.encode()).hexdigest()
    return Counter(hashes.values())


@pytest.mark.slow
@pytest.mark.parametrize("depth", [4, pytest.param(6, marks=pytest.mark.slow)], ids=["stack", "translation"])
def test_layers_captured_once_equal_those_captured_one_by_one(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    def graph() -> CapturedGraph:
        return capture(Stack(depth).double(), SAMPLE) if depth == 4 else capture_translation(depth)

    joint_graph = graph()
    # No fake: the reference captures each layer by itself, as the product does with layers that differ.
    monkeypatch.setattr("moe.sharding.capture.capture.find_repeats", lambda module: [])
    separate_graph = graph()
    assert structure(joint_graph) == structure(separate_graph)
    assert joint_graph.gradients.keys() == separate_graph.gradients.keys()
    assert joint_graph.updates.keys() == separate_graph.updates.keys()


def test_each_kind_of_layer_is_captured_once() -> None:
    assert [len(repeats) for repeats in find_repeats(translation(6))] == [3, 3, 3, 3]


@pytest.mark.slow
def test_the_integer_program_does_not_grow_with_depth() -> None:
    cluster, limits = (
        Cluster(num_nodes=1, devices_per_node=4, device="cpu", memory_bytes=1 << 40),
        MemoryLimits(1 << 40),
    )
    sizes = []
    for num_layers in (6, 10):
        model = capture_translation(num_layers)
        representatives = classes(model, {})
        solution = PlacementProgram(model, Costs(cluster, (4,)), Rules(), limits, classes=representatives).solve()
        assert solution is not None
        sizes.append(solution.num_variables)
    assert sizes[1] < 1.01 * sizes[0]


@pytest.mark.slow
def test_layers_planned_once_have_the_same_options() -> None:
    model, rules = capture_translation(4), Rules()
    for node, first in classes(model, {}).items():
        if is_operator(node):
            assert node.target is first.target
            names, expected = ([option.name for option in rules(operator).axis_options()] for operator in (node, first))
            assert names == expected
