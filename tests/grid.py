"""Which parameters of a grid every run has; `make parity` runs all."""

import os
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "quick")


def num_cases(usual: int) -> int:
    """Random cases of one check: in `make test` a third of the usual number, but at least two."""
    return max(2, usual // 3) if PROFILE == "quick" else usual


def seeds(always: int, num_seeds: int) -> list[Any]:
    """The first few seeds in every run."""
    rest = (pytest.param(seed, marks=pytest.mark.grid) for seed in range(always, num_seeds))
    return [*range(always), *rest]


def one_seed_each(meshes: Sequence[dict[str, int]]) -> list[Any]:
    """(mesh, seed) for as many seeds as meshes; every run has each mesh with a seed of its own."""
    return [
        pytest.param(mesh, seed, marks=() if index == seed else pytest.mark.grid)
        for index, mesh in enumerate(meshes)
        for seed in range(len(meshes))
    ]


def first_seed_of(items: Iterable[Any], num_seeds: int) -> list[Any]:
    """(item, seed) for all seeds; every run has the first seed of each item."""
    return [
        pytest.param((item, seed), id=f"{item}-{seed}", marks=pytest.mark.grid if seed else ())
        for item in items
        for seed in range(num_seeds)
    ]


def each_once(rows: Iterable[Any], columns: Iterable[Any]) -> list[Any]:
    """All (row, column); every run has the fewest of them that contain each row and each column."""
    rows, columns = list(rows), list(columns)
    always = {(number % len(rows), number % len(columns)) for number in range(max(len(rows), len(columns)))}
    return [
        pytest.param((row, column), id=f"{row}-{column}", marks=() if (i, j) in always else pytest.mark.grid)
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
    ]


def index_params(items: Iterable[Any], interval: int) -> list[Any]:
    """Indices of the items, each named after its item; every run has one of each `interval`."""
    return [pytest.param(i, id=str(item), marks=_grid_unless(i % interval == 0)) for i, item in enumerate(items)]


def item_params(items: Iterable[Any], interval: int) -> list[Any]:
    """The items; every run has one of each `interval`."""
    return [pytest.param(item, id=str(item), marks=_grid_unless(i % interval == 0)) for i, item in enumerate(items)]


def _grid_unless(is_in_every_run: bool) -> Any:
    return () if is_in_every_run else pytest.mark.grid
