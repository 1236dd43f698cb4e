"""Pipeline schedules and exchanges between context ranks take turns in the grid, and meet every other setting."""

import pytest

from moe.plan.schedule.problems import micro_batches_problem
from tests.parity.combinations import (
    CONTEXT_EXCHANGES,
    FOUR_STAGES,
    LAYOUTS,
    OPTIONS,
    ROUTERS,
    schedules_of,
    with_option,
    with_schedule_in_turn,
)
from tests.parity.trajectory import Degrees, Shape

WITH_STAGES = [degrees for layouts in (LAYOUTS | FOUR_STAGES).values() for degrees in layouts if degrees.pipeline > 1]


@pytest.mark.parametrize("degrees", WITH_STAGES, ids=str)
def test_every_schedule_meets_every_option_and_every_router(degrees: Degrees) -> None:
    exchanges = CONTEXT_EXCHANGES if degrees.context > 1 else ("gather",)
    cells = {
        (option, router): with_schedule_in_turn(option_degrees, number + OPTIONS.index(option))
        for option in OPTIONS
        for number, router in enumerate(ROUTERS)
        if (option_degrees := with_option(degrees, option)) is not None
    }
    options = {(option, layout.schedule, layout.context_exchange) for (option, _), layout in cells.items()}
    every = [(schedule, exchange) for schedule in schedules_of(degrees) for exchange in exchanges]
    assert options == {(option, *turn) for option, _ in cells for turn in every}
    routers = {(router, layout.schedule) for (_, router), layout in cells.items()}
    assert routers == {(router, schedule) for _, router in cells for schedule in schedules_of(degrees)}
    for layout in cells.values():
        num_micro_batches = layout.plan(Shape().groups).options.num_micro_batches
        schedule = layout.plan(Shape().groups).options.pipeline_schedule
        assert micro_batches_problem(schedule, layout.pipeline, num_micro_batches) is None


def test_the_grid_has_every_schedule_on_two_and_on_four_stages() -> None:
    stages = {
        (schedule, degrees.pipeline * degrees.virtual_stages)
        for degrees in WITH_STAGES
        for schedule in schedules_of(degrees)
    }
    assert stages == {
        *(("1f1b", number) for number in (2, 4)), *(("gpipe", number) for number in (2, 4)),
        *(("zero_bubble", number) for number in (2, 4)), ("interleaved", 4), ("zb_v", 4),
    }  # fmt: skip
