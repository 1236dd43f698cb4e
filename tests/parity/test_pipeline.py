"""Pipeline stages compute the same as one process: losses, every gradient, the norm, routers' decisions and the next
weights, with every schedule and beside every other kind of parallelism."""

from dataclasses import replace
from itertools import cycle

import pytest

from moe.spec import LanguageModelSpec
from tests.grid import index_params, item_params
from tests.parity.combinations import ROUTERS, assert_same, run_on, train_of
from tests.parity.gloo_ranks import Pools
from tests.parity.language_models import ATTENTIONS, language_model
from tests.parity.trajectory import Degrees, Shape, run

LAYOUTS = (
    Degrees(pipeline=2, schedule="gpipe"), Degrees(pipeline=2), Degrees(pipeline=2, virtual_stages=2),
    Degrees(pipeline=2, expert=2, schedule="gpipe"), Degrees(pipeline=2, data=2, fsdp=2, expert_fsdp=2),
    Degrees(pipeline=2, expert=2, fsdp=2, virtual_stages=2), Degrees(pipeline=2, data=2, fsdp=2, schedule="gpipe"),
    Degrees(pipeline=2, expert=2, tensor=2, fsdp=1), Degrees(pipeline=2, expert_tensor=2, tensor=2),
    Degrees(pipeline=2, data=2, context=2), Degrees(pipeline=4), Degrees(pipeline=4, schedule="gpipe"),
    Degrees(pipeline=2, stages=(3, 1)), Degrees(pipeline=4, stages=(1, 1, 1, 1)),
)  # fmt: skip
OPTIONS = (
    {"micro_batch_groups": 1}, {"micro_batch_groups": 1, "recompute": "full"}, {"micro_batch_groups": 3},
    {"micro_batch_groups": 2, "recompute": "selective"}, {},
)  # fmt: skip
"""With groups of 3, ranks have micro-batches of several sizes, and empty ones."""


def staged_model(attention: str, router: str) -> LanguageModelSpec:
    """A model of four layers."""
    return LanguageModelSpec(**{**language_model(attention, **ROUTERS[router]).model_dump(), "num_layers": 4})


def cases() -> list[tuple[Degrees, str, str]]:
    """Layouts, routers and kinds of attention that take turns, so that each meets many of the others."""
    layouts, options, attentions, routers = (cycle(items) for items in (LAYOUTS, OPTIONS, ATTENTIONS, ROUTERS))
    return [(_fitting(replace(next(layouts), **next(options))), next(attentions), next(routers)) for _ in range(60)]


def _fitting(degrees: Degrees) -> Degrees:
    """The layout with GPipe where there are too few micro-batches for another schedule."""
    num_micro_batches = degrees.plan(Shape().groups).options.num_micro_batches
    if num_micro_batches >= degrees.pipeline:
        return degrees
    return replace(degrees, schedule="gpipe", virtual_stages=1, stages=None)


@pytest.mark.parametrize("case", item_params(cases(), 10))
def test_stages_compute_the_same(ranks: Pools, case: tuple[Degrees, str, str]) -> None:
    degrees, attention, router = case
    model = staged_model(attention, router)
    records = run_on(ranks, degrees, model, train_of(), Shape(), 3)
    assert_same(records, run(model, train_of(), Degrees(), Shape(), 3), 1e-10)


ZB_H1 = Degrees(pipeline=2, schedule="zero_bubble", micro_batch_groups=1)
ZB_V = replace(ZB_H1, schedule="zb_v", virtual_stages=2)
SPLIT_LAYOUTS = (
    replace(ZB_V, data=2, fsdp=2, expert_fsdp=2), ZB_H1, replace(ZB_H1, expert=2, num_chunks=2),
    replace(ZB_V, expert=2, tensor=2, recompute="full"), replace(ZB_H1, expert=2, data=2, fsdp=2),
    replace(ZB_H1, data=2, fsdp=2, sharding="gradients"), ZB_V, replace(ZB_H1, pipeline=4),
    replace(ZB_V, data=2, context=2), replace(ZB_H1, data=2, expert_fsdp=2, recompute="selective"),
    replace(ZB_V, data=2, fsdp=2, sharding="optimizer"), replace(ZB_V, expert_tensor=2, stages=(2, 1, 3, 2)),
)  # fmt: skip


@pytest.mark.parametrize("number", index_params(SPLIT_LAYOUTS, 6))
def test_gradients_of_weights_come_later(ranks: Pools, number: int) -> None:
    attention, router = [*ATTENTIONS][number], [*ROUTERS][-number]
    model = staged_model(attention, router).model_copy(update={"num_layers": 8})
    records = run_on(ranks, SPLIT_LAYOUTS[number], model, train_of(), Shape(), 3)
    assert_same(records, run(model, train_of(), Degrees(), Shape(), 3), 1e-10)


def test_four_ranks_in_a_v(ranks: Pools) -> None:
    model = staged_model("MLA", "softmax").model_copy(update={"num_layers": 8})
    records = run_on(ranks, replace(ZB_V, pipeline=4), model, train_of(), Shape(), 2)
    assert_same(records, run(model, train_of(), Degrees(), Shape(), 2), 1e-10)
