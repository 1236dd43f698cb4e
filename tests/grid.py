"""What of a grid is in every run; `make parity` runs all."""

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
    """(mesh, seed) for as many seeds as there are meshes: in every run each mesh with a seed of its own."""
    return [
        pytest.param(mesh, seed, marks=() if at == seed else pytest.mark.grid)
        for at, mesh in enumerate(meshes)
        for seed in range(len(meshes))
    ]


def first_seed_of(each: Iterable[Any], num_seeds: int) -> list[Any]:
    """(one of these, seed) for all seeds, of which the first of each is in every run."""
    return [
        pytest.param((one, seed), id=f"{one}-{seed}", marks=pytest.mark.grid if seed else ())
        for one in each
        for seed in range(num_seeds)
    ]


def each_once(ones: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    """All (one, other), of which as few as have each of both are in every run."""
    ones, others = list(ones), list(others)
    always = {(at % len(ones), at % len(others)) for at in range(max(len(ones), len(others)))}
    return [
        pytest.param((one, other), id=f"{one}-{other}", marks=() if (at, by) in always else pytest.mark.grid)
        for at, one in enumerate(ones)
        for by, other in enumerate(others)
    ]


def numbered(each: Iterable[Any], apart: int) -> list[Any]:
    """Their numbers, called what each is the number of; one of so many in every run."""
    return [pytest.param(at, id=str(one), marks=pytest.mark.grid if at % apart else ()) for at, one in enumerate(each)]


def every(each: Iterable[Any], apart: int) -> list[Any]:
    """One of so many in every run."""
    return [pytest.param(one, id=str(one), marks=pytest.mark.grid if at % apart else ()) for at, one in enumerate(each)]
