"""The whole grid, compared with one process: every router under every layout with every option, and every family under
every layout. The first has rows of the translation model, of the language model, and of the language model with random
adapters under the layouts that split them. Kinds of attention take turns, so that each meets every router, every layout
and every option. So do pipeline schedules under each layout with stages."""

from dataclasses import replace
from itertools import count, cycle
from random import Random
from typing import Any, Literal

from moe.spec import LanguageModelSpec, SpecError
from tests.language.families import FAMILIES
from tests.parity.combinations import (
    FOUR_STAGES,
    LAYOUTS,
    OPTIONS,
    ROUTERS,
    model_of,
    train_with,
    with_option,
    with_possible_exchange,
    with_schedule_in_turn,
)
from tests.parity.family_models import family_model
from tests.parity.gloo_ranks import Pools
from tests.parity.language_models import ATTENTIONS, language_model, with_adapter
from tests.parity.row import Row, RowResults
from tests.parity.trajectory import Degrees, Model

Kind = Literal["translation", "language", "adapters", "families"]

STEPS: dict[Kind, dict[str, int]] = {
    "translation": {"without": 10, "all": 5, "one": 3},  # tests of every run take NUM_STEPS under a few layouts
    "language": {"without": 10, "all": 5, "one": 2},
    "adapters": {"without": 6, "all": 4, "one": 3},  # A has no gradient in the first, where B is zero
    "families": {"without": 2, "all": 2},  # of odd sizes, some models magnify rounding a hundredfold a step
}
"""Steps of training without options, with all of them, and with one alone."""
OF_ADAPTERS = ("expert x FSDP", "expert x tensor", "folded, three at a time", "pipeline, folded")
"""Layouts of models with adapters."""
TARGETS: tuple[list[str] | None, ...] = (
    None, ["*"], ["*.attention.*"], ["*.experts.*"], ["*.experts.w_out", "*.attention.o*"],
    ["layers.1.*"], ["*.router", "*.attention.*"],
)  # fmt: skip

OF_ROUTERS: tuple[Kind, ...] = ("translation", "language", "adapters")
_LAYOUT_ROWS: list[tuple[Kind, str, Degrees]] = [
    (kind, layout_kind, degrees)
    for kind in OF_ROUTERS
    for layout_kind, layouts in (LAYOUTS | FOUR_STAGES).items()
    if kind != "adapters" or layout_kind in OF_ADAPTERS
    for degrees in layouts
]
ROUTER_ROWS = tuple(
    f"{kind}, {layout_kind}: {replace(degrees, schedule=None)}" for kind, layout_kind, degrees in _LAYOUT_ROWS
)
FAMILY_ROWS = tuple(f"families, {family}" for family in FAMILIES)
NAMES = (*ROUTER_ROWS, *FAMILY_ROWS)
"""Names of the rows, in their order."""


def num_trainings_of(name: str) -> dict[str, int]:
    """Trainings of a row by column."""
    index = NAMES.index(name)
    if index >= len(ROUTER_ROWS):
        return {layout_kind: len(layouts) for layout_kind, layouts in LAYOUTS.items()}
    degrees = _LAYOUT_ROWS[index][2]
    return {option: len(ROUTERS) for option in OPTIONS if with_option(degrees, option) is not None}


def model_of_row(index: int, option: str, router: str) -> tuple[str, Model]:
    """(label, model) of the training of a router in row `index` with an option"""
    if _LAYOUT_ROWS[index][0] == "translation":
        return router, model_of(**ROUTERS[router])
    turn = index + OPTIONS.index(option) + list(ROUTERS).index(router)
    attention = list(ATTENTIONS)[turn % len(ATTENTIONS)]
    model = language_model(attention, **ROUTERS[router])
    if _LAYOUT_ROWS[index][1] in FOUR_STAGES:
        model = LanguageModelSpec(**{**model.model_dump(), "num_layers": max(4, model.num_layers)})
    if _LAYOUT_ROWS[index][0] == "adapters":
        model = adapted(model, Random(f"{index} {option} {router}"))
    return f"{attention}, {router}", model


def adapted(model: LanguageModelSpec, random: Random) -> LanguageModelSpec:
    """The model with an adapter of random rank, scale, dropout and targets that it can have."""
    while True:
        adapter: dict[str, Any] = {
            "rank": random.randint(1, 4), "alpha": random.choice([None, 0.7, 5.0]),
            "rank_stabilized": random.random() < 0.3, "dropout": random.choice([0.0, 0.2]),
            "targets": random.choice(TARGETS),
        }  # fmt: skip
        try:
            return with_adapter(model, adapter)
        except SpecError:  # a router's, whose bias follows the loads
            continue


def row_of(ranks: Pools, index: int) -> Row:
    """Row `index`, counted from 0, on ranks and on one process."""
    if index >= len(ROUTER_ROWS):
        return _row_of_family(ranks, list(FAMILIES)[index - len(ROUTER_ROWS)])
    kind, _, degrees = _LAYOUT_ROWS[index]
    results = RowResults(ranks, NAMES[index])
    for option in OPTIONS:
        if (option_degrees := with_option(degrees, option)) is None:
            continue
        num_steps = STEPS[kind].get(option, STEPS[kind]["one"])
        for turn, router in enumerate(ROUTERS, OPTIONS.index(option)):
            label, model = model_of_row(index, option, router)
            possible_degrees = with_possible_exchange(with_schedule_in_turn(option_degrees, turn), model)
            results.train(label, option, model, train_with(option), possible_degrees, num_steps)
    return results.row(degrees.workers)


def _row_of_family(ranks: Pools, family: str) -> Row:
    """A family under every layout, each with a random model that it divides. Trainings without options and with all of
    them take turns, and so do pipeline schedules."""
    results = RowResults(ranks, f"families, {family}")
    options, turns = cycle(STEPS["families"]), count(list(FAMILIES).index(family))
    if list(FAMILIES).index(family) % 2:
        next(options)
    for layout_kind, layouts in LAYOUTS.items():
        for degrees in layouts:
            option = next(options)
            option_degrees = with_option(degrees, option)
            assert option_degrees is not None
            model, num_steps = family_model(family, degrees), STEPS["families"][option]
            option_degrees = with_possible_exchange(with_schedule_in_turn(option_degrees, next(turns)), model)
            results.train(f"{degrees}, {option}", layout_kind, model, train_with(option), option_degrees, num_steps)
    return results.row(max(degrees.workers for layouts in LAYOUTS.values() for degrees in layouts))
