"""What of a grid is in every run; `make parity` runs all."""

from collections.abc import Sequence
from typing import Any

import pytest


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
