"""Layers that repeat are planned once, though each draws random numbers of its own: the integer program does not grow
with a model's depth."""

import hashlib
from collections import Counter

import pytest
import torch
from torch import fx

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


def spec_of(num_layers: int) -> TranslationModelSpec:
    """The translation model with so many layers a side, every other one with experts, dropout and second experts drawn
    by layer."""
    return TranslationModelSpec(
        model_dim=16, num_heads=2, head_dim=8, ffn_dim=32, num_encoder_layers=num_layers,
        num_decoder_layers=num_layers, source_vocab_size=300, target_vocab_size=300, dropout=0.1,
        moe=MoESpec(num_experts=4, model_dim=16, hidden_dim=32, group_tokens=12),
    )  # fmt: skip


def captured(num_layers: int) -> CapturedGraph:
    rows = torch.zeros(8, 6, dtype=torch.int64)
    return capture(TranslationLoss.on_meta(spec_of(num_layers)), (rows, rows, rows, torch.tensor(1)))


def structure(model: CapturedGraph) -> Counter[str]:
    """Operators with all that they are computed of; in the backward pass, where gradients may be added up in another
    order, with the arguments that are no tensors."""
    signs: dict[fx.Node, str] = {}
    backward = model.backward
    for node in filter(lambda each: each.op != "output", model.graph.graph.nodes):
        of_tensor = (lambda each: "") if node in backward else signs.__getitem__
        leaf = model.leaves.get(node)
        about = f"{leaf.name if leaf else node.target} {fx.map_arg(node.args, of_tensor)}"
        signs[node] = hashlib.sha256(about.encode()).hexdigest()
    return Counter(signs.values())


@pytest.mark.slow
def test_layers_captured_once_are_those_captured_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    together = structure(captured(6))
    # Nothing is faked: the reference is the product's own way with layers that differ, each captured by itself.
    monkeypatch.setattr("moe.sharding.capture.capture.find_repeats", lambda module: [])
    assert together == structure(captured(6))


def test_each_kind_of_layer_is_captured_once() -> None:
    assert [len(alike) for alike in find_repeats(TranslationLoss.on_meta(spec_of(6)))] == [3, 3, 3, 3]


@pytest.mark.slow
def test_the_program_does_not_grow_with_depth() -> None:
    cluster = Cluster(num_nodes=1, devices_per_node=4, device="cpu", memory_bytes=1 << 40)
    sizes = {}
    for num_layers in (6, 10):
        model = captured(num_layers)
        once = classes(model, {})
        program = PlacementProgram(model, Costs(cluster, (4,)), Rules(), MemoryLimits(1 << 40), classes=once).solve()
        assert program is not None
        sizes[num_layers] = program.num_variables
    assert sizes[10] < 1.01 * sizes[6]


@pytest.mark.slow
def test_what_is_planned_once_has_the_same_options() -> None:
    model, rules = captured(4), Rules()
    for node, first in classes(model, {}).items():
        if is_operator(node):
            assert node.target is first.target
            assert [each.name for each in rules(node).axis_options()] == [
                each.name for each in rules(first).axis_options()
            ]
