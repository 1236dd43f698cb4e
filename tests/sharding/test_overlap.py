"""All-to-alls of a layer of experts go on beside what does not need them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe import sharding
from moe.sharding.applied.ready import program_of
from moe.sharding.capture.capture import capture
from moe.sharding.exchange import exchange
from moe.sharding.exchange.ring import ring_product
from tests.parity.gloo_ranks import Pools
from tests.sharding.on_ranks import Built, cores, differences

aten = torch.ops.aten


class SharedExpert(nn.Module):
    """Tokens in groups go to experts and back; a dense layer beside them sees the same tokens."""

    def __init__(self, num_experts: int = 4, dim: int = 6, hidden: int = 8) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(num_experts, dim, hidden) * dim**-0.5)
        self.down = nn.Parameter(torch.randn(num_experts, hidden, dim) * hidden**-0.5)
        self.dense = nn.Sequential(nn.Linear(dim, 16), nn.Tanh(), nn.Linear(16, dim))
        self.router = nn.Linear(dim, num_experts)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)  # [G, S, E]
        sent = torch.einsum("gse,gsm->egsm", weights, x)
        sent = sharding.shard(sent, {"expert": 0})
        beside = self.dense(x)
        made = torch.einsum("egsh,ehm->egsm", torch.einsum("egsm,emh->egsh", sent, self.up).tanh(), self.down)
        made = sharding.shard(made, {"expert": 1})
        return (made.sum(0) + beside).square().mean()


def built() -> Built:
    torch.manual_seed(0)
    return SharedExpert().double(), (torch.randn(4, 5, 6, dtype=torch.float64),)


HINTS = {"inputs": sharding.Split(0), "up": sharding.Split(0), "down": sharding.Split(0)}


def planned(num_ranks: int) -> sharding.ShardingPlan:
    return sharding.plan(*built(), cores(num_ranks), HINTS, mesh={"expert": num_ranks})


def test_products_stand_between_the_begin_and_the_wait():
    program = program_of(capture(*built()), planned(2))
    assert program.backward is not None
    passes, beside = (program.forward, program.backward), []
    for graph in passes:
        nodes = list(graph.graph.nodes)
        assert exchange.all_to_all not in [node.target for node in nodes]
        begun = [at for at, node in enumerate(nodes) if node.target is exchange.begin_all_to_all]
        assert len(begun) >= 2
        for at in begun:
            (wait,) = nodes[at].users
            assert wait.target is exchange.finish
            beside += nodes[at + 1 : nodes.index(wait)]
    targets = {node.target for node in beside}
    assert targets & {aten.mm.default, aten.addmm.default, aten.bmm.default, ring_product}


def on_ranks(num_ranks: int) -> tuple[list[str], Any]:
    wrong, plan = differences(built, {"expert": num_ranks}, HINTS, steps=2)
    return wrong, [each.kind for each in plan.collectives].count("all_to_all")


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_results_are_those_of_one_device(ranks: Pools, num_ranks: int):
    found = ranks[num_ranks].run(on_ranks, num_ranks)
    assert [wrong for wrong, _ in found] == [[]] * num_ranks
    assert all(count >= 4 for _, count in found)
