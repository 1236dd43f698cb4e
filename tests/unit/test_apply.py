"""What a rank has of a layer that is applied to a layout."""

import pytest
import torch

from moe.experts import Experts
from moe.layers import MoELayer
from moe.parallel import Layout, apply
from moe.plan.placement import weights_of
from moe.spec import MoESpec

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
        return apply(layer, weights_of(spec.parameters()), layout).experts

    whole, half = experts_on(0, 1, {}), experts_on(1, 2, {"expert": 2})
    quarter = experts_on(3, 4, {"expert": 2, "expert_tensor": 2})
    for name, parameter in whole.named_parameters():
        assert torch.equal(half.get_parameter(name), parameter[2:])
        dim = 2 if name in ("w_in", "w_gate") else 1
        assert torch.equal(quarter.get_parameter(name), parameter[2:].chunk(2, dim)[1])
    assert sum(parameter[0].numel() for parameter in whole.parameters()) == spec.parameters_per_expert
    assert not torch.equal(whole.w_in[0], whole.w_in[1])
