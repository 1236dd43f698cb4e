"""What a layer returns may be changed in place under any layout: torch neither refuses it nor warns of it."""

import warnings

import pytest
import torch
from torch import Tensor, nn

from moe.layers import MoELayer
from moe.parallel import Layout, apply, local_parameters, reduce_gradients
from moe.plan.placement import Placement
from moe.spec import MoESpec
from tests.parity.gloo_ranks import Pools
from tests.parity.test_any_module import GROUP_TOKENS, GROUPS, SPLITS
from tests.parity.trajectory import Degrees, Whole

SPEC = MoESpec(num_experts=4, model_dim=8, hidden_dim=12, group_tokens=GROUP_TOKENS, router="softmax_topk", top_k=2)


class Residual(nn.Module):
    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.moe, self.in_place = MoELayer(SPEC), in_place

    def forward(self, x: Tensor) -> Tensor:
        y = self.moe(x)[0]
        return y.mul_(2.0).add_(x) if self.in_place else y * 2.0 + x


def gradients(degrees: Degrees, in_place: bool) -> dict[str, Tensor]:
    layout = Layout.build(degrees.plan(GROUPS))
    torch.manual_seed(4)
    model = Residual(in_place).double()
    placements = [
        Placement(parameter=name, shape=each.shape, splits=SPLITS.get(name, (("fsdp", 0),)))
        for name, each in model.named_parameters()
    ]
    apply(model, placements, layout, {"moe": "layer 0"})
    here = layout.groups_here(GROUPS)
    x = torch.randn(GROUPS, GROUP_TOKENS, 8, dtype=torch.float64)[here.start : here.stop]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x).square().sum().backward()
    parameters = local_parameters(model)
    reduce_gradients(parameters, layout)
    found = Whole(parameters, layout).gradients()
    layout.close()
    return found


@pytest.mark.parametrize(
    "degrees", [Degrees(data=2, fsdp=2, expert_fsdp=2), Degrees(data=2, tensor=2), Degrees(expert=2, fsdp=2)], ids=str
)
def test_what_a_layer_returns_may_be_changed_in_place_under_any_layout(ranks: Pools, degrees: Degrees) -> None:
    changed, kept = (ranks[2].run(gradients, degrees, in_place)[0] for in_place in (True, False))
    assert changed.keys() == kept.keys()
    for name, expected in kept.items():
        torch.testing.assert_close(changed[name], expected, rtol=1e-12, atol=0.0)
