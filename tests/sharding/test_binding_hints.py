"""Hints bind the work: even over slow links, no rank computes in full what a hint splits. Hints like DDP or FSDP give
exactly their exchanges."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe import sharding
from moe.plan import Cluster
from moe.sharding.applied.other_call import program_of_other_call, without_values
from moe.sharding.exchange.exchange import take_part
from moe.sharding.placement import WHOLE
from moe.sharding.solve import strategies
from tests.sharding.modules import perceptron
from tests.sharding.on_ranks import cores


def slow_links(num_devices: int) -> Cluster:
    """Links on which gradients take longer than all arithmetic."""
    links = [{"devices": num_devices, "bytes_per_s": 1e5, "latency_s": 0.1}]
    return Cluster.model_validate(cores(num_devices).model_dump(exclude_none=True) | {"links": links})


DDP = {"*": sharding.Replicate(), "inputs": sharding.Split(0)}
MESHES: tuple[dict[str, int], ...] = ({"a": 4}, {"a": 2, "b": 2})


def products(plan: sharding.ShardingPlan) -> list[list[str]]:
    return [names for node, names in plan.options.items() if node.startswith(("mm", "addmm"))]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_split_batch_with_replicated_parameters_stays_split(mesh: dict[str, int]):
    batch = (torch.zeros(16, 64),)
    plan = sharding.plan(perceptron(64, 64, 64, 1), batch, slow_links(4), DDP, mesh=mesh)
    assert len(products(plan)) >= 7
    assert all("whole" not in names for names in products(plan))
    assert {collective.kind for collective in plan.collectives} == {"all_reduce"}
    assert set(plan.parameters.values()) == {" ".join("R" for _ in mesh)}


@pytest.mark.slow
def test_without_hints_slow_links_leave_all_of_it_whole(monkeypatch: pytest.MonkeyPatch):
    """The test above can fail."""
    batch = (torch.zeros(16, 64),)
    plan = sharding.plan(perceptron(64, 64, 64, 1), batch, slow_links(4), mesh={"a": 4})
    assert all(names == ["whole"] for names in products(plan))
    monkeypatch.setattr(strategies, "bound_by", lambda *_, **__: {})
    plan = sharding.plan(perceptron(64, 64, 64, 1), batch, slow_links(4), DDP, mesh={"a": 4})
    assert any(names == ["whole"] for names in products(plan))


@pytest.mark.slow
def test_evaluation_and_other_sizes_are_bound_too():
    model = perceptron(64, 64, 64, 1)
    plan = sharding.plan(model, (torch.zeros(16, 64),), slow_links(4), DDP, mesh={"a": 4})
    placements = dict.fromkeys(plan.parameters, (WHOLE,))
    ready = program_of_other_call(without_values(model).eval(), (torch.zeros(8, 64),), None, plan, (), placements)
    targets = [node.target for node in ready.program.forward.graph.nodes]
    assert take_part in targets


class PackedAttention(nn.Module):
    """Query, key and value of one product, unpacked as in GPTs, so that gradients are stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.packed, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        heads = self.packed(self.norm(x)).view(rows, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        attention = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return (x + self.out(attention.transpose(1, 2).reshape(rows, length, width))).square().mean()


FSDP = {"*": sharding.Split(0)}
AS_BY_HAND: dict[str, tuple[dict[str, Any], set[tuple[str, str]]]] = {
    "DDP": (DDP, {("backward", "all_reduce")}),
    "FSDP": (FSDP, {("forward", "gather"), ("backward", "gather"), ("backward", "reduce_scatter")}),
}


@pytest.mark.parametrize("case", AS_BY_HAND)
def test_hints_like_a_wrapper_give_its_exchanges(case: str):
    hints, exchanges = AS_BY_HAND[case]
    plan = sharding.plan(PackedAttention(), (torch.zeros(64, 32, 32),), cores(2), hints, mesh={"a": 2})
    assert {
        (collective.phase, collective.kind) for collective in plan.collectives if collective.num_bytes > 8
    } <= exchanges
    assert len(products(plan)) >= 5
    assert all(names[0].split()[-1] in "mk" for names in products(plan))
