"""Ranks that do not all have the same layers, or any: totals of a step, gradients and their norm, what multiplies in
the experts; and the order in which process groups end."""

import json
from itertools import combinations
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe.layers import MoELayer, TokenContext
from moe.parallel import Layout, clip_by_global_norm, local_parameters, reduce_gradients
from moe.parallel.parameters import ParameterShard
from moe.routing import BatchCounts
from moe.spec import AdamWSpec, MoESpec, TrainSpec, TranslationModelSpec
from moe.storage.folder import Folder
from moe.tasks.task import Loss, RankBatch
from moe.train import expert_costs
from moe.train.moe_layers import MoELayers
from moe.train.nonfinite import first_fault
from moe.train.totals import Signals, StepTotals
from tests.parity.combinations import LAYOUTS
from tests.parity.gloo_ranks import Pools
from tests.parity.trajectory import Degrees, Shape, rank_batch, state_of

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
    layers, here = MoELayers(model), layout.local_groups(GROUPS)
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


STAGES = {
    "two stages of two data ranks": {"pipeline": 2, "data_replica": 2, "expert_replica": 2},
    "two stages of two context ranks": {"pipeline": 2, "context": 2, "expert_replica": 2},
    "four stages": {"pipeline": 4},
    "context and tensor ranks": {"context": 2, "tensor": 2, "expert_replica": 4},
    "data and context ranks": {"data_replica": 2, "context": 2, "expert": 2, "expert_replica": 2},
}
NUM_COLUMNS = 5


def linear_of(layout: Layout) -> nn.Module:
    """One parameter, which this stage alone has; tensor ranks use all of it on their share of the tokens."""
    model = nn.Linear(NUM_COLUMNS, 1, bias=False, dtype=torch.float64)
    model.weight.part = ParameterShard(model.weight.shape, shares_tokens=True)
    return model


def gradient_of(rank: int) -> torch.Tensor:
    return torch.randn(1, NUM_COLUMNS, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def sums(degrees: dict[str, int]) -> tuple[torch.Tensor, float, int]:
    layout = Layout.over(degrees)
    try:
        model = linear_of(layout)
        parameters = local_parameters(model)
        model.weight.grad = gradient_of(layout.rank)
        reduce_gradients(parameters, layout)
        norm = clip_by_global_norm(parameters, layout, None)
        return parameters[0].local.grad, float(norm), layout.index("pipeline")
    finally:
        layout.close()


@pytest.mark.sample(3)
@pytest.mark.parametrize("mesh", STAGES)
def test_a_stage_sums_its_own_gradients_and_the_norm_is_of_all_stages(ranks: Pools, mesh: str) -> None:
    found = ranks[4].run(sums, STAGES[mesh])
    by_stage: dict[int, torch.Tensor] = {}
    for rank, (_, _, stage) in enumerate(found):
        by_stage[stage] = by_stage.get(stage, torch.zeros(1, NUM_COLUMNS, dtype=torch.float64)) + gradient_of(rank)
    assert len(by_stage) == STAGES[mesh].get("pipeline", 1)
    norm = float(torch.cat(list(by_stage.values())).norm())
    for gradient, told, stage in found:
        torch.testing.assert_close(gradient, by_stage[stage], rtol=0, atol=1e-14)
        assert told == pytest.approx(norm, abs=1e-12)


ON_FOUR_RANKS = [degrees for layouts in LAYOUTS.values() for degrees in layouts if degrees.workers == 4]


def orders(degrees: Degrees) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The ranks of each group that this rank is in, in the order in which they are made, and in which they end."""
    layout = Layout.build(degrees.plan(Shape().groups))
    made = [ranks_of(group) for group in dict.fromkeys(layout.groups.values()) if group != dist.group.WORLD]
    ended, end = [], dist.destroy_process_group

    def recorded(group: dist.ProcessGroup) -> None:
        ended.append(ranks_of(group))
        end(group)

    dist.destroy_process_group = recorded
    dist.barrier()  # gloo's groups are connected on all ranks before one ends its own
    try:
        layout.close()
    finally:
        dist.destroy_process_group = end
    return made, ended


def ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


@pytest.mark.sample(5)
@pytest.mark.parametrize("degrees", ON_FOUR_RANKS, ids=str)
def test_the_last_group_made_ends_first_on_all_ranks(ranks: Pools, degrees: Degrees) -> None:
    answers = ranks[4].run(orders, degrees)
    assert all(ended == made[::-1] for made, ended in answers)
    for (one, (its_made, _)), (other, (others_made, _)) in combinations(enumerate(answers), 2):
        shared = [group for group in its_made if other in group]
        assert shared == [group for group in others_made if one in group]


MODEL = TranslationModelSpec(
    model_dim=16, num_heads=2, head_dim=8, ffn_dim=32, num_encoder_layers=2, num_decoder_layers=2,
    source_vocab_size=300, target_vocab_size=300,
    moe=MoESpec(num_experts=4, model_dim=16, hidden_dim=24, group_tokens=64),
)  # fmt: skip
TRAIN = TrainSpec(num_steps=1, optimizer=AdamWSpec(name="adamw"))
EXPERTS = "encoder.1.feed_forward.moe.experts.w_in"


def fault_with(place: str, faulty_rank: int) -> str | None:
    """What this rank is told where only `faulty_rank` holds an infinite parameter, output or gradient."""
    plan = Degrees(expert=2).plan(Shape().groups)
    layout = Layout.build(plan)
    state = state_of(MODEL, TRAIN, layout)
    model = state.model
    if dist.get_rank() == faulty_rank:
        experts = model.get_parameter(EXPERTS)
        if place == "parameter":
            experts.data.view(-1)[0] = torch.inf
        elif place == "output":
            model.encoder_norm.register_forward_hook(lambda _module, _inputs, output: output * torch.inf)
        elif place == "gradient":
            experts.grad = torch.full_like(experts, torch.inf)
    fault = first_fault(state, rank_batch(layout, plan, Shape(), 300, 1))
    layout.close()
    return fault


@pytest.mark.sample(4)
@pytest.mark.parametrize("faulty_rank", [0, 1])
@pytest.mark.parametrize(
    ("place", "named"),
    [
        ("parameter", f"parameter {EXPERTS}"),
        ("output", "the output of encoder_norm"),
        ("gradient", f"the gradient of {EXPERTS}"),
        ("nowhere", None),
    ],
)
def test_a_fault_of_one_rank_is_told_to_all(ranks: Pools, place: str, named: str | None, faulty_rank: int) -> None:
    assert ranks[2].run(fault_with, place, faulty_rank) == [named, named]
