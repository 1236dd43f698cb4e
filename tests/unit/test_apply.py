"""What a rank has of a layer that is applied to a layout."""

from typing import Any

import pytest
import torch
from torch import nn

from moe.experts import Experts
from moe.layers import MoELayer
from moe.parallel import Layout, Part, apply, first_of
from moe.plan.candidate import Options
from moe.plan.degrees import Degrees, Shards
from moe.plan.placement import Placement, placed
from moe.spec import MoESpec, SpecError
from tests.parity import trajectory

M, H = 8, 16


@pytest.mark.parametrize("activation", ["relu", "swiglu"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_rank_has_the_experts_that_it_holds(activation: str, bias: bool, device: str) -> None:
    """Drawn here where the layer has no values yet, else taken of them."""
    spec = MoESpec(num_experts=4, model_dim=M, hidden_dim=H, activation=activation, expert_bias=bias)

    def experts_on(rank: int, world_size: int, degrees: dict[str, int]) -> Experts:
        with torch.device(device):
            layer = MoELayer(spec)
        layout = Layout(rank, world_size, torch.device("cpu"), degrees)
        return apply(layer, placed(spec.parameters(), Shards.of(layout.degrees)), layout).experts

    whole, half = experts_on(0, 1, {}), experts_on(1, 2, {"expert": 2})
    quarter = experts_on(3, 4, {"expert": 2, "expert_tensor": 2})
    for name, parameter in whole.named_parameters():
        assert torch.equal(half.get_parameter(name), parameter[2:])
        dim = 2 if name in ("w_in", "w_gate") else 1
        assert torch.equal(quarter.get_parameter(name), parameter[2:].chunk(2, dim)[1])
    assert sum(parameter[0].numel() for parameter in whole.parameters()) == spec.parameters_per_expert
    assert not torch.equal(whole.w_in[0], whole.w_in[1])


def test_what_a_rank_uses_begins_where_its_part_of_tensors_does() -> None:
    """However FSDP, which gathers it, has cut it up, also unevenly."""
    layout = Layout(3, 4, torch.device("cpu"), {"expert_fsdp": 2, "expert_tensor": 2})
    for dim in (0, 1):
        part = Part(torch.Size((3, M)), (("expert_tensor", 1), ("expert_fsdp", dim)), of_experts=True)
        assert first_of(part, layout) == [0, M // 2]


def test_fsdp_cuts_no_dimension_but_the_first_unevenly() -> None:
    module = nn.Linear(3, 4, bias=False)
    placements = [Placement(parameter="weight", shape=(4, 3), splits=(("fsdp", 1),))]
    with pytest.raises(
        SpecError, match=r"weight\.shape\[1\] \(=3\) must be divisible by the fsdp degree \(=2\)"
    ):
        apply(module, placements, Layout(0, 2, torch.device("cpu"), {"fsdp": 2}))


def test_what_was_not_declared_has_no_initial_values_to_be_placed_with() -> None:
    with torch.device("meta"):
        module = nn.Linear(3, 4, bias=False)
    with pytest.raises(SpecError, match="weight lies on the meta device and has no initial values"):
        apply(module, [Placement(parameter="weight", shape=(4, 3))], Layout.single())


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"degrees": Degrees(pipeline=2, data=2)}, "pipeline stages"),
        ({"degrees": Degrees(context=2, data=4)}, "context ranks"),
        ({"degrees": Degrees(data=4, fsdp=2), "options": Options(sharding="optimizer")}, "sharding of optimizer alone"),
        ({"degrees": Degrees(data=4, fsdp=2), "options": Options(sharding="gradients")}, "sharding of gradients alone"),
        ({"options": Options(overlap=True)}, "micro-batches side by side"),
        ({"not_yet": ("fp8",)}, "fp8"),
        ({"profile": "peer"}, "the layout of a peer"),
    ],
    ids=str,
)  # fmt: skip
def test_a_plan_that_nothing_executes_is_refused_in_words(changes: dict[str, Any], told: str) -> None:
    plan = trajectory.Degrees(data=4).plan(8).model_copy(update=changes)
    with pytest.raises(SpecError, match=f"^plan asks for what cannot be run yet: {told};"):
        Layout.build(plan)
