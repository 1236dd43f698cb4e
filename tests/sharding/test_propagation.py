"""Propagation of hints without a search: GShard's plan, priorities, and conflicts with both sources."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe import sharding
from moe.plan import Cluster
from moe.sharding.capture.capture import capture
from moe.sharding.propagation.annotated_graph import annotate_graph
from moe.sharding.propagation.propagate import Propagation
from moe.sharding.rules.registry import Rules
from tests.parity.gloo_ranks import Pools
from tests.sharding.gshard_listing import PaperModel
from tests.sharding.on_ranks import Built, check_on_ranks
from tests.sharding.partitioned import differences

H100 = Cluster.model_validate({"num_nodes": 1, "devices_per_node": 8, "device": "h100"})


def test_three_annotations_give_the_papers_layer_without_a_search():
    with torch.device("meta"):
        model = PaperModel(3, True, model_dim=1024, hidden_dim=8192, num_experts=16, capacity=128)
    batch = (torch.empty(16, 1024, 1024),)
    hint_plan = sharding.plan(model, batch, H100, mesh={"devices": 8}, search=False)
    search_plan = sharding.plan(model, batch, H100, mesh={"devices": 8})
    assert hint_plan.parameters == search_plan.parameters
    large = [collective for collective in hint_plan.collectives if collective.num_bytes > 1 << 20]
    assert [collective.kind for collective in large] == ["all_to_all"] * 11  # six forward, five backward
    assert hint_plan.step_s >= search_plan.step_s * 0.99


class Chain(nn.Module):
    """Products between elementwise operators."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 12, bias=False), nn.Linear(12, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden_states = torch.relu(self.first(torch.tanh(x)))
        return self.second(hidden_states.view(2, 8, 12)).square().mean()


def propagate(hints: dict[str, Any], axes: dict[str, int]) -> tuple[Any, Any]:
    module, sample = Chain().double(), (torch.randn(16, 8, dtype=torch.float64),)
    captured_graph = capture(module, sample)
    annotated_graph = annotate_graph(captured_graph, hints)
    origins = {placement.node.name: placement.origin for placement in annotated_graph.requested_placements}
    rules = Rules()
    propagation = Propagation(captured_graph, rules, tuple(axes.values()), annotated_graph.pins(axes), origins).run()
    assert differences(module, sample, captured_graph, propagation.assignment) == []
    return captured_graph, propagation


@pytest.mark.parametrize("axes", [{"a": 2}, {"a": 2, "b": 2}, {"a": 3}], ids=str)
def test_a_split_batch_is_followed_to_the_loss_and_back(axes: dict[str, int]):
    captured_graph, propagation = propagate({"inputs": sharding.Split(0, axis="a")}, axes)
    products = [node for node in captured_graph.graph.graph.nodes if "mm" in str(node.target)]
    names = {propagation.assignment.options[node.name][0].name for node in products}
    assert names <= {"split m", "split b", "split k"}  # gradients of weights contract the batch
    assert propagation.conflicts == ()


def test_an_operator_between_two_hints_names_both():
    hints = {"first.weight": sharding.Split(0), "second.weight": sharding.Split(0), "inputs": sharding.Split(0)}
    _, propagation = propagate(hints, {"a": 2})
    assert propagation.conflicts
    sources = {hint for conflict in propagation.conflicts for hint in (conflict.followed_hint, conflict.other_hint)}
    assert sources <= {"hints['first.weight']", "hints['second.weight']", "hints['inputs']"}
    assert any("test_propagation.py" in conflict.line for conflict in propagation.conflicts)


def test_hidden_units_split_by_one_hint_are_split_in_both_products():
    captured_graph, propagation = propagate({"first.weight": sharding.Split(0)}, {"a": 4})
    by_name = {leaf.name: node.name for node, leaf in captured_graph.leaves.items()}
    assert str(propagation.assignment.leaves[by_name["second.weight"]][0]) == "S(1)"


def paper() -> Built:
    torch.manual_seed(0)
    model = PaperModel(2, True, model_dim=32, hidden_dim=64, capacity=8).double()
    return model, (torch.randn(8, 24, 32, dtype=torch.float64),)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [pytest.param({"a": 2}, marks=pytest.mark.grid), {"a": 2, "b": 2}], ids=str)
def test_what_follows_from_hints_computes_what_one_device_computes(ranks: Pools, mesh: dict[str, int]):
    check_on_ranks(ranks, paper, mesh, search=False)
