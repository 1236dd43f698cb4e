"""What a plan says of where parameters lie is what is done, and training does not depend on it."""

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
    "decoder.*.cross_attention.output.weight": (("tensor", 1), ("fsdp", 1)),  # the same as tensor ranks
    "encoder.*.norm.weight": (),  # on every rank
    "encoder.*.feed_forward.moe.experts.w_in": (("expert", 0), ("expert_fsdp", 2)),
    "decoder.*.feed_forward.moe.experts.w_out": (("expert", 0),),
}


def altered() -> tuple[Placement, ...]:
    """The planner's placements, some of them changed by hand; those of one norm for its layer alone."""
    planned = placements_of(MODEL, SHARDS)
    assert ALTERED.keys() <= {each.parameter for each in planned}
    norm = next(each for each in planned if each.parameter == "encoder.*.norm.weight")
    return (
        *(each.model_copy(update={"splits": ALTERED.get(each.parameter, each.splits)}) for each in planned),
        norm.model_copy(update={"parameter": "encoder.0.norm.weight"}),
    )


def shapes_here(degrees: Degrees) -> dict[str, tuple[int, ...]]:
    layout = Layout.build(degrees.plan(8))
    found = {each.name: tuple(each.local.shape) for each in local_parameters(build_model(MODEL, layout))}
    layout.close()
    return found


def test_a_plan_altered_by_hand_is_done_as_it_says_and_trains_the_same(ranks: Pools) -> None:
    by_hand = replace(FOLDED, placements=altered())
    (planned, *_), (here, *_) = (ranks[4].run(shapes_here, each) for each in (FOLDED, by_hand))
    m, inner = MODEL.model_dim, MODEL.num_heads * MODEL.head_dim
    for name, before, after in (
        ("encoder.1.attention.query.weight", (inner // 4, m), (inner // 2, m // 2)),
        ("decoder.0.cross_attention.output.weight", (m // 2, inner // 2), (m, inner // 4)),
        ("encoder.0.norm.weight", (m // 2,), (m // 2,)),
        ("encoder.1.norm.weight", (m // 2,), (m,)),
        ("encoder.1.feed_forward.moe.experts.w_in", (1, m, 24), (2, m, 12)),
        ("decoder.1.feed_forward.moe.experts.w_out", (1, 24, m), (2, 24, m)),
    ):
        assert (planned[name], here[name]) == (before, after), name
    reference = run(MODEL, train_of(), Degrees(), Shape(), 3)
    assert_same(run_on(ranks, by_hand, MODEL, train_of(), Shape(), 3), reference, 1e-10)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(4))
def test_any_dimension_or_none_may_be_split_over_fsdp(ranks: Pools, seed: int) -> None:
    draw, placements = random.Random(seed), []
    for each in placements_of(MODEL, SHARDS):
        *others, (axis, _) = each.splits
        sizes = list(each.shape)
        for other, dim in others:
            sizes[dim] //= getattr(SHARDS, other)
        dims = [dim for dim, size in enumerate(sizes) if dim == 0 or size % getattr(SHARDS, axis) == 0]
        chosen = draw.choice([None, *dims])
        splits = (*others, *(() if chosen is None else ((axis, chosen),)))
        placements.append(each.model_copy(update={"splits": splits}))
    by_hand = replace(FOLDED, placements=tuple(placements))
    reference = run(MODEL, train_of(), Degrees(), Shape(), 2)
    assert_same(run_on(ranks, by_hand, MODEL, train_of(), Shape(), 2), reference, 1e-10)


def problems_of(placements: tuple[Placement, ...]) -> list[Problem]:
    layout = Layout(0, 8, torch.device("cpu"), {}, placements=placements)
    with pytest.raises(SpecError) as refused:
        build_model(MODEL, layout)
    return list(refused.value.problems)


def test_placements_that_are_missing_or_of_no_parameter_are_named() -> None:
    planned = placements_of(MODEL, plan_degrees.ShardCounts())
    nobody = Placement(parameter="nobody.weight", shape=(3,))
    wrong = Placement(parameter="encoder.*.norm.weight", shape=(9, 9))
    for placements, value, rule in (
        (planned[:-1], "decoder_norm.weight", ""),
        ((*planned, nobody), "nobody.weight", "is not a parameter of the model in shape [3]"),
        ((*planned, wrong), "encoder.*.norm.weight", "is not a parameter of the model in shape [9, 9]"),
        ((*planned, planned[0]), planned[0].parameter, "occurs twice"),
    ):
        (problem,) = problems_of(placements)
        assert problem.value == value
        assert problem.rule.startswith(rule)
    split = [each.model_copy(update={"splits": (("tensor", 0),)}) for each in planned if "norm" in each.parameter]
    norms = {each.parameter for each in split}
    others = (each for each in placements_of(MODEL, plan_degrees.ShardCounts(tensor=2)) if each.parameter not in norms)
    layout = Layout(0, 2, torch.device("cpu"), {"tensor": 2}, placements=(*split, *others))
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
