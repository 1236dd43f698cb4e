"""The host waits for its device once in a layer of experts, and once more for each question of other ranks."""

import pytest

from moe.spec import MoESpec
from tests.parity.combinations import ROUTERS
from tests.parity.gloo_ranks import Pools
from tests.parity.trajectory import Degrees
from tests.rehearsal.run import waits_of_layer

MAX_WAITS = {
    Degrees(): 1,  # rows of each expert
    Degrees(expert=2): 2,  # and rows that arrive
    Degrees(expert=2, num_chunks=3): 2,
    Degrees(expert=2, max_rows=9): 3,  # and the chunks that the rank with the most rows needs
    Degrees(expert_tensor=2): 2,
    Degrees(data=2, fsdp=2, expert_fsdp=2): 1,
    Degrees(expert=2, tensor=2): 3,  # and rows of this rank's share of the tokens
    Degrees(
        expert=2, ranks_per_node=1
    ): 5,  # and nodes of each token, rows for each node, rows that arrive there
}


def spec_of(router: str) -> MoESpec:
    return MoESpec(
        **{"num_experts": 4, "model_dim": 16, "hidden_dim": 24, "group_tokens": 32, **ROUTERS[router]}
    )


@pytest.mark.parametrize("degrees", MAX_WAITS, ids=str)
def test_a_layer_waits_for_its_device_no_more_often_than_this(ranks: Pools, degrees: Degrees) -> None:
    for found in ranks[degrees.workers].run(waits_of_layer, spec_of("gshard"), degrees):
        assert found["backward"] == {}
        assert sum(found["forward"].values()) <= MAX_WAITS[degrees], found["forward"]


@pytest.mark.parametrize("router", ROUTERS)
def test_no_router_asks_its_device_anything_else(ranks: Pools, router: str) -> None:
    (found,) = ranks[1].run(waits_of_layer, spec_of(router), Degrees())
    assert sum(found["forward"].values()) == 1, found["forward"]
    assert found["backward"] == {}
