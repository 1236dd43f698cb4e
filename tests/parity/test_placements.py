"""Parameters are placed as the plan says, and training does not depend on where they are."""

import random
from dataclasses import replace

import pytest
import torch

from moe.parallel import Layout, local_parameters
from moe.plan import degrees as plan_degrees
from moe.plan.placement import Placement, placements_of
from moe.spec import Problem, SpecError
from moe.tasks.translation.model import build_model
from tests.parity.combinations import assert_same, model_of, run_on, train_of
from tests.parity.gloo_ranks import Pools
from tests.parity.trajectory import Degrees, Shape, run

MODEL = model_of()
FOLDED = Degrees(expert=2, data=2, tensor=2, fsdp=2, expert_fsdp=2)
SHARDS = plan_degrees.ShardCounts(tensor=2, fsdp=2, expert=2, expert_fsdp=2)
ALTERED = {
    "encoder.*.attention.query.weight": (("tensor", 0), ("fsdp", 1)),  # the other dimension
    "decoder.*.cross_attention.output.weight": (("tensor", 1), ("fsdp", 1)),  # the dimension that tensor ranks split
    "encoder.*.norm.weight": (),  # on every rank
    "encoder.*.feed_forward.moe.experts.w_in": (("expert", 0), ("expert_fsdp", 2)),
    "decoder.*.feed_forward.moe.experts.w_out": (("expert", 0),),
}


def altered_placements() -> tuple[Placement, ...]:
    """The planner's placements, some of them changed by hand, with one norm's placement for its layer alone."""
    placements = placements_of(MODEL, SHARDS)
    assert ALTERED.keys() <= {placement.parameter for placement in placements}
    norm = next(placement for placement in placements if placement.parameter == "encoder.*.norm.weight")
    return (
        *(
            placement.model_copy(update={"splits": ALTERED.get(placement.parameter, placement.splits)})
            for placement in placements
        ),
        norm.model_copy(update={"parameter": "encoder.0.norm.weight"}),
    )


def local_shapes(degrees: Degrees) -> dict[str, tuple[int, ...]]:
    layout = Layout.build(degrees.plan(8))
    shapes = {
        parameter.name: tuple(parameter.local.shape) for parameter in local_parameters(build_model(MODEL, layout))
    }
    layout.close()
    return shapes


@pytest.mark.slow
def test_a_plan_altered_by_hand_is_done_as_it_says_and_trains_the_same(ranks: Pools) -> None:
    by_hand = replace(FOLDED, placements=altered_placements())
    (planned_shapes, *_), (by_hand_shapes, *_) = (ranks[4].run(local_shapes, degrees) for degrees in (FOLDED, by_hand))
    m, inner = MODEL.model_dim, MODEL.num_heads * MODEL.head_dim
    for name, before, after in (
        ("encoder.1.attention.query.weight", (inner // 4, m), (inner // 2, m // 2)),
        ("decoder.0.cross_attention.output.weight", (m // 2, inner // 2), (m, inner // 4)),
        ("encoder.0.norm.weight", (m // 2,), (m // 2,)),
        ("encoder.1.norm.weight", (m // 2,), (m,)),
        ("encoder.1.feed_forward.moe.experts.w_in", (1, m, 24), (2, m, 12)),
        ("decoder.1.feed_forward.moe.experts.w_out", (1, 24, m), (2, 24, m)),
    ):
        assert (planned_shapes[name], by_hand_shapes[name]) == (before, after), name
    reference = run(MODEL, train_of(), Degrees(), Shape(), 3)
    assert_same(run_on(ranks, by_hand, MODEL, train_of(), Shape(), 3), reference, 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_any_dimension_or_none_may_be_split_over_fsdp(ranks: Pools, seed: int) -> None:
    draw, placements = random.Random(seed), []
    for placement in placements_of(MODEL, SHARDS):
        *other_splits, (axis, _) = placement.splits
        sizes = list(placement.shape)
        for other_axis, dim in other_splits:
            sizes[dim] //= getattr(SHARDS, other_axis)
        dims = [dim for dim, size in enumerate(sizes) if dim == 0 or size % getattr(SHARDS, axis) == 0]
        split_dim = draw.choice([None, *dims])
        splits = (*other_splits, *(() if split_dim is None else ((axis, split_dim),)))
        placements.append(placement.model_copy(update={"splits": splits}))
    by_hand = replace(FOLDED, placements=tuple(placements))
    reference = run(MODEL, train_of(), Degrees(), Shape(), 2)
    assert_same(run_on(ranks, by_hand, MODEL, train_of(), Shape(), 2), reference, 1e-10)


def problems_of(placements: tuple[Placement, ...]) -> list[Problem]:
    layout = Layout(0, 8, torch.device("cpu"), {}, placements=placements)
    with pytest.raises(SpecError) as error:
        build_model(MODEL, layout)
    return list(error.value.problems)


def test_placements_that_are_missing_or_of_no_parameter_are_named() -> None:
    planned_placements = placements_of(MODEL, plan_degrees.ShardCounts())
    unknown_placement = Placement(parameter="nobody.weight", shape=(3,))
    wrong = Placement(parameter="encoder.*.norm.weight", shape=(9, 9))
    for placements, value, rule in (
        (planned_placements[:-1], "decoder_norm.weight", ""),
        ((*planned_placements, unknown_placement), "nobody.weight", "is not a parameter of the model in shape [3]"),
        ((*planned_placements, wrong), "encoder.*.norm.weight", "is not a parameter of the model in shape [9, 9]"),
        ((*planned_placements, planned_placements[0]), planned_placements[0].parameter, "occurs twice"),
    ):
        (problem,) = problems_of(placements)
        assert problem.value == value
        assert problem.rule.startswith(rule)
    split = [
        placement.model_copy(update={"splits": (("tensor", 0),)})
        for placement in planned_placements
        if "norm" in placement.parameter
    ]
    norms = {placement.parameter for placement in split}
    other_placements = (
        placement
        for placement in placements_of(MODEL, plan_degrees.ShardCounts(tensor=2))
        if placement.parameter not in norms
    )
    layout = Layout(0, 2, torch.device("cpu"), {"tensor": 2}, placements=(*split, *other_placements))
    with pytest.raises(SpecError, match=r"placements\.encoder\.0\.norm\.weight\.splits"):
        build_model(MODEL, layout)


def test_splits_that_are_none_are_refused() -> None:
    for splits, rule in (
        ((("tensor", 2),), "must be a dimension of the shape"),
        ((("tensor", 0), ("tensor", 1)), "names an axis twice"),
        ((("tensor", 0), ("expert_fsdp", 0)), "mixes axes of two meshes"),
        ((("fsdp", 0), ("tensor", 1)), "splits dimensions that FSDP has already sharded"),
    ):
        with pytest.raises(SpecError, match=rule):
            Placement(parameter="w", shape=(4, 4), splits=splits)
