"""Passes side by side compute the same as one after the other, and take turns at their exchanges."""

from dataclasses import replace
from itertools import cycle, pairwise

import pytest

from moe.dispatch.row_exchange import PendingAllToAll
from moe.parallel import Layout
from moe.train.signals import Signals
from moe.train.step import step
from tests.grid import index_params
from tests.parity.combinations import ROUTERS, assert_same, model_of, run_on, train_of
from tests.parity.gloo_ranks import Pools
from tests.parity.language_models import ATTENTIONS, language_model
from tests.parity.trajectory import Degrees, Model, Shape, batch_of, run, state_of

EXPERTS = Degrees(expert=2, overlap=True, micro_batch_groups=1)
LAYOUTS = (
    EXPERTS, replace(EXPERTS, pipeline=2, virtual_stages=2), replace(EXPERTS, recompute="selective"),
    replace(EXPERTS, expert=4, ranks_per_node=2, micro_batch_groups=3), replace(EXPERTS, tensor=2, expert_tensor=2),
    replace(EXPERTS, data=2, fsdp=2, sharding="gradients"), replace(EXPERTS, expert=1, expert_tensor=2, max_rows=9),
    replace(EXPERTS, data=2, context=2), replace(EXPERTS, data=2, fsdp=2, expert_fsdp=2, sharding="optimizer"),
    replace(EXPERTS, pipeline=2, virtual_stages=2, recompute="selective", micro_batch_groups=2),
)  # fmt: skip


def model_for(number: int) -> Model:
    attentions, routers = cycle(ATTENTIONS), cycle(ROUTERS)
    for _ in range(number + 1):
        attention, router = next(attentions), next(routers)
    if LAYOUTS[number].pipeline == 1 and number % 2:
        return model_of(**ROUTERS[router])
    return language_model(attention, **ROUTERS[router]).model_copy(update={"num_layers": 4})


@pytest.mark.parametrize("number", index_params(LAYOUTS, 5))
def test_results_are_those_of_one_process(ranks: Pools, number: int) -> None:
    model = model_for(number)
    records = run_on(ranks, LAYOUTS[number], model, train_of(), Shape(), 3)
    assert_same(records, run(model, train_of(), Degrees(), Shape(), 3), 1e-10)


def passes_of_waits(model: Model, degrees: Degrees) -> list[bool]:
    """Whether each wait for rows, in order, is that of a backward pass, in one step."""
    plan = degrees.plan(Shape().groups)
    layout = Layout.build(plan)
    state, waits, wait = state_of(model, train_of(), layout), list[bool](), PendingAllToAll.wait

    def noted(pending: PendingAllToAll) -> object:
        result = wait(pending)
        waits.append(_is_backward())
        return result

    PendingAllToAll.wait = noted  # type: ignore[method-assign, assignment]
    try:
        step(state, batch_of(layout, plan, Shape(), model, 1), Signals())
    finally:
        PendingAllToAll.wait = wait  # type: ignore[method-assign]
        layout.close()
    return waits


def _is_backward() -> bool:
    import torch

    return bool(torch._C._current_graph_task_id() != -1)


def test_passes_take_turns_at_their_exchanges(ranks: Pools) -> None:
    model = language_model(next(iter(ATTENTIONS))).model_copy(update={"num_layers": 3})
    (waits, other), plain = (
        ranks[2].run(passes_of_waits, model, replace(EXPERTS, overlap=overlap)) for overlap in (True, False)
    )
    assert waits == other, "exchanges have one order on all ranks"
    assert sorted(waits) == sorted(plain[0])
    changes = [sum(first != second for first, second in pairwise(of)) for of in (waits, plain[0])]
    micro_batches, in_pass = 4, 2 * 3  # of a rank, and its waits
    assert changes[1] == 2 * micro_batches - 1
    assert changes[0] > (micro_batches - 1) * in_pass
