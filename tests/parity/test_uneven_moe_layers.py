"""Ranks with different layers or none: totals of a step, gradients and their norm, the choice of expert backends, and
the order in which process groups end."""

import json
from itertools import combinations
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe.layers import MoELayer, TokenContext
from moe.parallel import Layout, global_norm, local_parameters, reduce_gradients
from moe.parallel.parameters import ParameterShard
from moe.routing import BatchCounts
from moe.spec import AdamWSpec, MoESpec, TrainSpec, TranslationModelSpec
from moe.storage.folder import Folder
from moe.tasks.task import Loss, RankBatch
from moe.train import expert_costs
from moe.train.moe_layers import MoELayers
from moe.train.nonfinite import first_fault
from moe.train.signals import Signals
from moe.train.totals import StepTotals
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
    """Layers of these numbers, the same on every rank."""
    specs = {
        number: MoESpec.model_validate({"model_dim": WIDTH, "group_tokens": GROUP_TOKENS, **LAYERS[number]})
        for number in numbers
    }
    return nn.ModuleList(MoELayer(spec, number).double() for number, spec in specs.items())


def rows(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(GROUPS, GROUP_TOKENS, WIDTH, dtype=torch.float64, generator=generator)


def totals(layout: Layout, stages: list[list[int]]) -> tuple[dict, dict[int, list[float]]]:
    """(record of a step, choices of experts for each layer of this rank)"""
    stage = layout.index("pipeline")
    model = model_of(stages[stage])
    layers, local_groups = MoELayers(model, layout), layout.local_groups(GROUPS)
    assert list(layers.local_layers) == stages[stage]
    step_totals = StepTotals(layers, RankBatch(0, [None], 10, 20), layout, shares_tokens=True)
    ids = torch.arange(GROUPS * GROUP_TOKENS).view(GROUPS, GROUP_TOKENS)[local_groups.start : local_groups.stop]
    tokens = TokenContext(ids, batch=BatchCounts(GROUPS, GROUPS, GROUPS * GROUP_TOKENS))
    with layers.routings() as routings:
        for layer in layers.local_layers.values():
            layer(rows(layer.layer)[local_groups.start : local_groups.stop], tokens)
    # Only the last stage has the loss: 1.5 nats of each group.
    nats = torch.tensor(1.5 * len(local_groups) * (stage == len(stages) - 1), dtype=torch.float64)
    step_totals.add(Loss(nats, nats / 2), routings)
    record = step_totals.reduce(Signals()).record
    return record.to_plain(), {number: step_totals.expert_choices(number).tolist() for number in layers.local_layers}


def totals_of_ranks(degrees: dict[str, int], stages: list[list[int]]) -> tuple[dict, dict[int, list[float]]]:
    layout = Layout.from_degrees(degrees)
    try:
        return totals(layout, stages)
    finally:
        layout.close()


@pytest.mark.sample(2)
@pytest.mark.parametrize("mesh", MESHES)
def test_totals_are_those_of_one_process_that_has_all_layers(ranks: Pools, mesh: str) -> None:
    degrees, stages = MESHES[mesh]
    numbers = sorted(number for stage in stages for number in stage)
    record, choices = totals(Layout.single(), [numbers])
    assert [layer["layer"] for layer in record["layers"]] == numbers
    assert [len(layer["load"]) for layer in record["layers"]] == [LAYERS[number]["num_experts"] for number in numbers]
    layers = list(zip(record["layers"], numbers, strict=True))
    auxiliary_loss = sum(LAYERS[number]["aux_coefficient"] * layer["aux_loss"] for layer, number in layers)
    auxiliary_loss += sum(LAYERS[number].get("z_coefficient", 0) * layer["z_loss"] for layer, number in layers)
    assert (record["loss"], record["nll"]) == (pytest.approx(0.6 + auxiliary_loss), pytest.approx(0.3))
    for actual, rank_choices in ranks[4].run(totals_of_ranks, degrees, stages):
        for layer, expected in zip(actual.pop("layers"), record["layers"], strict=True):
            assert layer.pop("load") == expected["load"]
            assert layer == pytest.approx({name: value for name, value in expected.items() if name != "load"})
        assert actual == pytest.approx({name: value for name, value in record.items() if name != "layers"})
        assert rank_choices == {number: choices[number] for number in rank_choices}


def costs(stages: list[list[int]], run: str, cache: Path) -> dict[int, dict[str, float]]:
    """Seconds per row of each backend, for each layer of this rank."""
    layout = Layout.from_degrees({"pipeline": 4})
    layers = MoELayers(model_of(stages[layout.rank]), layout).local_layers
    expert_costs.decide(layers.values(), layout.device, torch.float32, Folder(run), cache)
    layout.close()
    return {
        number: {name: cost.per_row_s for name, cost in layer.experts.costs.items()} for number, layer in layers.items()
    }


def test_experts_of_one_shape_multiply_alike_wherever_they_are(ranks: Pools, tmp_path: Path) -> None:
    stages = [[], [1, 4], [9], []]
    costs_by_rank = ranks[4].run(costs, stages, f"{tmp_path}/run", tmp_path / "cache")
    assert [sorted(layer_costs) for layer_costs in costs_by_rank] == stages
    assert costs_by_rank[1][1] == costs_by_rank[2][9]
    assert costs_by_rank[1][1] != costs_by_rank[1][4]
    assert len(json.loads((tmp_path / "run" / expert_costs.FILE).read_text())) == 2


def test_layers_of_one_number_are_refused() -> None:
    with pytest.raises(ValueError, match="two MoE layers have the number 4; number them differently"):
        MoELayers(nn.ModuleList([model_of([4]), model_of([4])]), Layout.single())


STAGES = {
    "two stages of two data ranks": {"pipeline": 2, "data_replica": 2, "expert_replica": 2},
    "two stages of two context ranks": {"pipeline": 2, "context": 2, "expert_replica": 2},
    "four stages": {"pipeline": 4},
    "context and tensor ranks": {"context": 2, "tensor": 2, "expert_replica": 4},
    "data and context ranks": {"data_replica": 2, "context": 2, "expert": 2, "expert_replica": 2},
}
NUM_COLUMNS = 5


def linear_of(layout: Layout) -> nn.Module:
    """One parameter, which only this stage has; tensor ranks use all of it on their share of the tokens."""
    model = nn.Linear(NUM_COLUMNS, 1, bias=False, dtype=torch.float64)
    model.weight.part = ParameterShard(model.weight.shape, shares_tokens=True)
    return model


def gradient_of(rank: int) -> torch.Tensor:
    return torch.randn(1, NUM_COLUMNS, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def sums(degrees: dict[str, int]) -> tuple[torch.Tensor, float, int]:
    layout = Layout.from_degrees(degrees)
    try:
        model = linear_of(layout)
        parameters = local_parameters(model)
        model.weight.grad = gradient_of(layout.rank)
        reduce_gradients(parameters, layout)
        norm = global_norm(parameters, layout)
        return parameters[0].local.grad, float(norm), layout.index("pipeline")
    finally:
        layout.close()


@pytest.mark.sample(3)
@pytest.mark.parametrize("mesh", STAGES)
def test_a_stage_sums_its_own_gradients_and_the_norm_is_of_all_stages(ranks: Pools, mesh: str) -> None:
    results = ranks[4].run(sums, STAGES[mesh])
    by_stage: dict[int, torch.Tensor] = {}
    for rank, (_, _, stage) in enumerate(results):
        by_stage[stage] = by_stage.get(stage, torch.zeros(1, NUM_COLUMNS, dtype=torch.float64)) + gradient_of(rank)
    assert len(by_stage) == STAGES[mesh].get("pipeline", 1)
    norm = float(torch.cat(list(by_stage.values())).norm())
    for gradient, actual_norm, stage in results:
        torch.testing.assert_close(gradient, by_stage[stage], rtol=0, atol=1e-14)
        assert actual_norm == pytest.approx(norm, abs=1e-12)


ON_FOUR_RANKS = [degrees for layouts in LAYOUTS.values() for degrees in layouts if degrees.workers == 4]


def orders(degrees: Degrees) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Ranks of each process group of this rank, in order of creation, and in the order in which the groups end."""
    layout = Layout.build(degrees.plan(Shape().groups))
    creation_order = [ranks_of(group) for group in dict.fromkeys(layout.groups.values()) if group != dist.group.WORLD]
    end_order, destroy = [], dist.destroy_process_group

    def record_end(group: dist.ProcessGroup) -> None:
        end_order.append(ranks_of(group))
        destroy(group)

    dist.destroy_process_group = record_end
    dist.barrier()  # gloo's groups are connected on all ranks before one ends its own
    try:
        layout.close()
    finally:
        dist.destroy_process_group = destroy
    return creation_order, end_order


def ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


@pytest.mark.sample(2)
@pytest.mark.parametrize("degrees", ON_FOUR_RANKS, ids=str)
def test_the_last_group_made_ends_first_on_all_ranks(ranks: Pools, degrees: Degrees) -> None:
    answers = ranks[4].run(orders, degrees)
    assert all(end_order == creation_order[::-1] for creation_order, end_order in answers)
    for (rank, (order, _)), (other_rank, (other_order, _)) in combinations(enumerate(answers), 2):
        common_groups = [group for group in order if other_rank in group]
        assert common_groups == [group for group in other_order if rank in group]


MODEL = TranslationModelSpec(
    model_dim=16, num_heads=2, head_dim=8, ffn_dim=32, num_encoder_layers=2, num_decoder_layers=2,
    source_vocab_size=300, target_vocab_size=300,
    moe=MoESpec(num_experts=4, model_dim=16, hidden_dim=24, group_tokens=64),
)  # fmt: skip
TRAIN = TrainSpec(num_steps=1, optimizer=AdamWSpec(name="adamw"))
EXPERTS = "encoder.1.feed_forward.moe.experts.w_in"


def fault_with(place: str, faulty_rank: int) -> str | None:
    """Fault that this rank reports if only `faulty_rank` holds an infinite parameter, output or gradient."""
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
    ("place", "expected_fault"),
    [
        ("parameter", f"parameter {EXPERTS}"),
        ("output", "the output of encoder_norm"),
        ("gradient", f"the gradient of {EXPERTS}"),
        ("nowhere", None),
    ],
)
def test_a_fault_of_one_rank_is_told_to_all(
    ranks: Pools, place: str, expected_fault: str | None, faulty_rank: int
) -> None:
    assert ranks[2].run(fault_with, place, faulty_rank) == [expected_fault, expected_fault]


def layers_of_rank_1_alone() -> list[int]:
    """Layers of a model that rank 1 builds for itself, although a process group is up."""
    if dist.get_rank() == 0:
        return []
    return [facts.layer for facts in MoELayers(model_of([1, 4]), Layout.single()).facts]


def test_a_layout_of_one_process_waits_for_no_other(ranks: Pools) -> None:
    assert ranks[2].run(layers_of_rank_1_alone) == [[], [1, 4]]
