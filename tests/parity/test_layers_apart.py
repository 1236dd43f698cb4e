"""Ranks that do not all have the same MoE layers, or any: totals of a step, and what multiplies in the experts."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from moe.layers import MoELayer, TokenContext
from moe.parallel import Layout
from moe.routing import BatchCounts
from moe.spec import MoESpec
from moe.storage.folder import Folder
from moe.tasks.task import Loss, RankBatch
from moe.train import expert_costs
from moe.train.moe_layers import MoELayers
from moe.train.totals import Signals, StepTotals
from tests.parity.gloo_ranks import Pools

GROUPS, GROUP_TOKENS, WIDTH = 4, 6, 8
LAYERS = {
    1: {"num_experts": 4, "hidden_dim": 12, "aux_coefficient": 0.3},
    4: {"num_experts": 6, "hidden_dim": 20, "aux_coefficient": 0.3, "z_coefficient": 0.1},
    9: {"num_experts": 4, "hidden_dim": 12, "aux_coefficient": 0.5},
}
MESHES = {
    "two stages of two data ranks": ({"pipeline": 2, "data_replica": 2, "expert_replica": 2}, [[4], [1, 9]]),
    "four stages, two without experts": ({"pipeline": 4}, [[], [1, 4], [9], []]),
    "experts in the last stage alone": ({"pipeline": 4}, [[], [], [], [1, 4, 9]]),
    "no experts": ({"pipeline": 4}, [[], [], [], []]),
}


def model_of(numbers: list[int]) -> nn.Module:
    """The same layers of these numbers on every rank."""
    specs = {
        number: MoESpec.model_validate({"model_dim": WIDTH, "group_tokens": GROUP_TOKENS, **LAYERS[number]})
        for number in numbers
    }
    return nn.ModuleList(MoELayer(spec, number).double() for number, spec in specs.items())


def rows(number: int) -> Tensor:
    drawn = torch.Generator().manual_seed(number)
    return torch.randn(GROUPS, GROUP_TOKENS, WIDTH, dtype=torch.float64, generator=drawn)


def totals(layout: Layout, stages: list[list[int]]) -> tuple[dict, dict[int, list[float]]]:
    """(record of a step, choices of experts by layer that this rank has)."""
    stage = layout.index("pipeline")
    model = model_of(stages[stage])
    layers, here = MoELayers(model), layout.groups_here(GROUPS)
    assert list(layers.local_layers) == stages[stage]
    found = StepTotals(layers, RankBatch(0, [None], 10, 20), layout, shares_tokens=True)
    ids = torch.arange(GROUPS * GROUP_TOKENS).view(GROUPS, GROUP_TOKENS)[here.start : here.stop]
    tokens = TokenContext(ids, batch=BatchCounts(GROUPS, GROUPS, GROUPS * GROUP_TOKENS))
    with layers.routings() as routings:
        for layer in layers.local_layers.values():
            layer(rows(layer.layer)[here.start : here.stop], tokens)
    # The last stage knows the loss: of each group 1.5 nats.
    nats = torch.tensor(1.5 * len(here) * (stage == len(stages) - 1), dtype=torch.float64)
    found.add(Loss(nats, nats / 2), routings)
    record, _ = found.reduce(Signals())
    return record.to_plain(), {number: found.expert_choices(number).tolist() for number in layers.local_layers}


def totals_of_ranks(degrees: dict[str, int], stages: list[list[int]]) -> tuple[dict, dict[int, list[float]]]:
    layout = Layout.over(degrees)
    try:
        return totals(layout, stages)
    finally:
        layout.close()


@pytest.mark.sample(2)
@pytest.mark.parametrize("mesh", MESHES)
def test_totals_are_those_of_one_process_that_has_all_layers(ranks: Pools, mesh: str) -> None:
    degrees, stages = MESHES[mesh]
    numbers = sorted(number for stage in stages for number in stage)
    record, chosen = totals(Layout.single(), [numbers])
    assert [layer["layer"] for layer in record["layers"]] == numbers
    assert [len(layer["load"]) for layer in record["layers"]] == [LAYERS[number]["num_experts"] for number in numbers]
    of_layers = list(zip(record["layers"], numbers, strict=True))
    added = sum(LAYERS[number]["aux_coefficient"] * layer["aux_loss"] for layer, number in of_layers)
    added += sum(LAYERS[number].get("z_coefficient", 0) * layer["z_loss"] for layer, number in of_layers)
    assert (record["loss"], record["nll"]) == (pytest.approx(0.6 + added), pytest.approx(0.3))
    for told, of_rank in ranks[4].run(totals_of_ranks, degrees, stages):
        for layer, expected in zip(told.pop("layers"), record["layers"], strict=True):
            assert layer.pop("load") == expected["load"]
            assert layer == pytest.approx({name: each for name, each in expected.items() if name != "load"})
        assert told == pytest.approx({name: each for name, each in record.items() if name != "layers"})
        assert of_rank == {number: chosen[number] for number in of_rank}


def costs(stages: list[list[int]], run: str, cache: Path) -> dict[int, dict[str, float]]:
    """By layer that this rank has, the seconds that each backend takes for each row."""
    layout = Layout.over({"pipeline": 4})
    layers = MoELayers(model_of(stages[layout.rank])).local_layers
    expert_costs.decide(layers.values(), layout.device, torch.float32, Folder(run), cache)
    layout.close()
    return {
        number: {name: cost.per_row_s for name, cost in layer.experts.costs.items()} for number, layer in layers.items()
    }


def test_experts_of_one_shape_multiply_alike_wherever_they_are(ranks: Pools, tmp_path: Path) -> None:
    stages = [[], [1, 4], [9], []]
    found = ranks[4].run(costs, stages, f"{tmp_path}/run", tmp_path / "cache")
    assert [sorted(each) for each in found] == stages
    assert found[1][1] == found[2][9]
    assert found[1][1] != found[1][4]
    assert len(json.loads((tmp_path / "run" / expert_costs.FILE).read_text())) == 2


def test_layers_of_one_number_are_refused() -> None:
    with pytest.raises(ValueError, match="two MoE layers have the number 4; number them differently"):
        MoELayers(nn.ModuleList([model_of([4]), model_of([4])]))
