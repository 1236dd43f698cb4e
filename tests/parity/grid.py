"""The whole grid: every router under every layout with every option, compared with one process. It has rows of the
translation model, of the language model, and of the language model with random adapters under the layouts that split
them. Kinds of attention take turns, so that each meets every router, every layout and every option."""

import sys
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any, Literal

from moe.spec import LanguageModelSpec, SpecError, TrainSpec
from tests.parity.combinations import (
    LAYOUTS,
    NUM_STEPS,
    OPTIONS,
    ROUTERS,
    assert_same,
    model_of,
    run_on,
    train_with,
    with_option,
)
from tests.parity.digests import digests_of
from tests.parity.gloo_ranks import Pools
from tests.parity.language_models import ATTENTIONS, language_model, with_adapter
from tests.parity.trajectory import Degrees, Model, Shape, run

Kind = Literal["translation", "language", "adapters"]

TOLERANCE = 1e-10
STEPS: dict[Kind, dict[str, int]] = {
    "translation": {"without": NUM_STEPS, "all": 8, "one": 3},
    "language": {"without": 10, "all": 5, "one": 2},
    "adapters": {"without": 6, "all": 4, "one": 3},  # A has no gradient in the first, where B is zero
}
"""Steps of training without options, with all of them, and with one alone."""
OF_ADAPTERS = ("expert x FSDP", "expert x tensor", "folded, three at a time")
"""Layouts of models with adapters."""
TARGETS: tuple[list[str] | None, ...] = (
    None, ["*"], ["*.attention.*"], ["*.experts.*"], ["*.experts.w_out", "*.attention.o*"],
    ["layers.1.*"], ["*.router", "*.attention.*"],
)  # fmt: skip

_GRID: list[tuple[Kind, str, Degrees]] = [
    (kind, family, degrees)
    for kind in STEPS
    for family, layouts in LAYOUTS.items()
    if kind != "adapters" or family in OF_ADAPTERS
    for degrees in layouts
]
NAMES = tuple(f"{kind}, {family}: {degrees}" for kind, family, degrees in _GRID)
"""Names of the rows, in their order."""


@dataclass(frozen=True)
class Row:
    """Results under one layout."""

    name: str
    num_ranks: int
    num_same: dict[str, int]
    """Number of routers by option that compute the same as one process. Options without an effect are left out."""
    digests: dict[str, dict[str, str]]
    """Digests of records by trajectory; empty for a trajectory that did not end."""


def model_of_row(index: int, option: str, router: str) -> tuple[str, Model]:
    """(label, model) of the training of a router in row `index` with an option"""
    if _GRID[index][0] == "translation":
        return router, model_of(**ROUTERS[router])
    turn = index + OPTIONS.index(option) + list(ROUTERS).index(router)
    attention = list(ATTENTIONS)[turn % len(ATTENTIONS)]
    model = language_model(attention, **ROUTERS[router])
    if _GRID[index][0] == "adapters":
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
    """Row `index`, counted from 0: every router with every option under its layout, on ranks and on one process."""
    kind, _, degrees = _GRID[index]
    num_same, digests = {}, {}
    for option in OPTIONS:
        option_degrees, train = with_option(degrees, option), train_with(option)
        if option_degrees is None:
            continue
        num_same[option] = 0
        steps = STEPS[kind].get(option, STEPS[kind]["one"])
        for router in ROUTERS:
            label, model = model_of_row(index, option, router)
            trajectory = f"{label}, under {NAMES[index]}, {option}"
            digests[trajectory] = {}
            try:
                records = run_on(ranks, option_degrees, model, train, Shape(), steps)
                digests[trajectory] = digests_of(records)
                assert_same(records, _reference(model, train, steps), TOLERANCE)
                num_same[option] += 1
            except Exception as error:  # any error goes into the table
                print(f"{trajectory}: {error!s:.2000}", file=sys.stderr, flush=True)
    return Row(NAMES[index], degrees.workers, num_same, digests)


@cache
def _reference(model: Model, train: TrainSpec, num_steps: int) -> list[dict]:
    return run(model, train, Degrees(), Shape(), num_steps)
