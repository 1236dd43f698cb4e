"""GShard's own layer: planned without hints as with the paper's annotations, and equal to one device on real ranks."""

import re
from functools import partial

import pytest
import torch

from moe import sharding
from moe.plan import Cluster
from moe.sharding.applied.callable_program import program_of
from moe.sharding.capture.capture import capture
from tests.parity.gloo_ranks import Pools
from tests.sharding.gshard_listing import PaperModel
from tests.sharding.on_ranks import Built, check_on_ranks

SIZES = {"model_dim": 1024, "hidden_dim": 8192, "capacity": 128}


def paper_plan(num_devices: int, is_annotated: bool, num_layers: int = 3) -> sharding.ShardingPlan:
    """At the paper's sizes, on the meta device."""
    with torch.device("meta"):
        model = PaperModel(num_layers, is_annotated, num_experts=2 * num_devices, **SIZES)
    cluster = Cluster.model_validate({"num_nodes": 1, "devices_per_node": num_devices, "device": "h100"})
    batch = (torch.empty(2 * num_devices, 1024, SIZES["model_dim"]),)
    hints = None if is_annotated else {"inputs": sharding.Split(0)}
    return sharding.plan(model, batch, cluster, hints, mesh={"devices": num_devices})


@pytest.mark.slow
def test_experts_go_over_experts_and_tokens_over_groups_unprompted_and_as_annotated():
    plans = paper_plan(8, is_annotated=False), paper_plan(8, is_annotated=True)
    assert plans[0].parameters == plans[1].parameters
    assert {placements for name, placements in plans[0].parameters.items() if "wg" not in name} == {"S(0)"}
    collectives, expected = (
        [(collective.kind, collective.num_bytes, collective.phase) for collective in plan.collectives] for plan in plans
    )
    assert collectives == expected


@pytest.mark.slow
def test_tokens_travel_in_two_all_to_alls_forward_and_two_backward():
    plan = paper_plan(8, is_annotated=True)
    transfers = [collective for collective in plan.collectives if collective.num_bytes > 1 << 20]
    assert {transfer.kind for transfer in transfers} == {"all_to_all"}
    by_phase = [sum(transfer.phase == phase for transfer in transfers) for phase in ("forward", "backward")]
    assert by_phase == [6, 5]  # of three layers, the first of which needs no input gradient
    assert not [collective for collective in plan.collectives if collective.kind == "gather"]


def text_of(num_devices: int) -> str:
    """Both programs, with a placeholder for each number outside names."""
    with torch.device("meta"):
        model = PaperModel(2, True, num_experts=2 * num_devices, **SIZES)
    plan = paper_plan(num_devices, is_annotated=True, num_layers=2)
    program = program_of(capture(model, (torch.empty(2 * num_devices, 1024, SIZES["model_dim"]),)), plan)
    assert program.backward is not None
    return re.sub(r"(?<![\w.])\d+(\.\d+)?", "#", program.forward.code + program.backward.code)


@pytest.mark.slow
def test_the_program_is_the_same_text_for_every_number_of_devices():
    texts = [text_of(num_devices) for num_devices in (2, 4, 8)]
    assert texts[0] == texts[1] == texts[2]


def small(is_annotated: bool) -> Built:
    torch.manual_seed(3)
    model = PaperModel(2, is_annotated, model_dim=32, hidden_dim=256, capacity=8).double()
    return model, (torch.randn(8, 24, 32, dtype=torch.float64),)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "is_annotated"),
    [({"a": 2}, False), ({"a": 4}, False), ({"a": 2, "b": 2}, False), ({"a": 4}, True)],
    ids=str,
)
def test_losses_and_gradients_are_those_of_one_device(ranks: Pools, mesh: dict[str, int], is_annotated: bool):
    hints = None if is_annotated else {"inputs": sharding.Split(0)}
    plan = check_on_ranks(ranks, partial(small, is_annotated), mesh, hints, memory_bytes=16_000_000, steps=2)
    assert "S(0)" in plan.parameters["layers.1.wi"].split()
