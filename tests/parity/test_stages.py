"""Sums over a mesh whose ranks do not all have the same layers, or whole rows: gradients, their norm."""

import pytest
import torch
from torch import nn

from moe.parallel import Layout, clip_by_global_norm, local_parameters, reduce_gradients
from moe.parallel.parameters import ParameterShard
from tests.parity.gloo_ranks import Pools

MESHES = {
    "two stages of two data ranks": {"pipeline": 2, "data_replica": 2, "expert_replica": 2},
    "two stages of two context ranks": {"pipeline": 2, "context": 2, "expert_replica": 2},
    "four stages": {"pipeline": 4},
    "context and tensor ranks": {"context": 2, "tensor": 2, "expert_replica": 4},
    "data and context ranks": {"data_replica": 2, "context": 2, "expert": 2, "expert_replica": 2},
}
WIDTH = 5


def model_of(layout: Layout) -> nn.Module:
    """One parameter, which this stage alone has; tensor ranks use all of it on their share of the tokens."""
    model = nn.Linear(WIDTH, 1, bias=False, dtype=torch.float64)
    model.weight.part = ParameterShard(model.weight.shape, shares_tokens=True)
    return model


def gradient_of(rank: int) -> torch.Tensor:
    return torch.randn(1, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def sums(degrees: dict[str, int]) -> tuple[torch.Tensor, float, int]:
    layout = Layout.over(degrees)
    try:
        model = model_of(layout)
        parameters = local_parameters(model)
        model.weight.grad = gradient_of(layout.rank)
        reduce_gradients(parameters, layout)
        norm = clip_by_global_norm(parameters, layout, None)
        return parameters[0].local.grad, float(norm), layout.index("pipeline")
    finally:
        layout.close()


@pytest.mark.sample(3)
@pytest.mark.parametrize("mesh", MESHES)
def test_a_stage_sums_its_own_gradients_and_the_norm_is_of_all_stages(ranks: Pools, mesh: str) -> None:
    found = ranks[4].run(sums, MESHES[mesh])
    by_stage: dict[int, torch.Tensor] = {}
    for rank, (_, _, stage) in enumerate(found):
        by_stage[stage] = by_stage.get(stage, torch.zeros(1, WIDTH, dtype=torch.float64)) + gradient_of(rank)
    assert len(by_stage) == MESHES[mesh].get("pipeline", 1)
    norm = float(torch.cat(list(by_stage.values())).norm())
    for gradient, told, stage in found:
        torch.testing.assert_close(gradient, by_stage[stage], rtol=0, atol=1e-14)
        assert told == pytest.approx(norm, abs=1e-12)
