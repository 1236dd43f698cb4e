"""Backend of a run's experts: chosen once, kept with the run, the same on every rank."""

import json
from collections.abc import Collection
from pathlib import Path

import torch

from moe.experts import stored_or_measured
from moe.experts.choice import Shape, from_json, to_json
from moe.layers.moe import MoELayer
from moe.parallel import plain_collectives
from moe.storage.folder import Folder

FILE = "expert-costs.json"
"""File with the measured costs of each backend, by shape of the experts."""


def decide(
    layers: Collection[MoELayer], device: torch.device, dtype: torch.dtype, run: Folder, cache: Path
) -> None:
    """Give experts that compute in `dtype` the measured costs of the backends.

    All ranks call it together, each with the layers that it has, possibly none. What the run has taken before, on a
    machine of the same kind, it takes again, so that a restart changes no bit; else what this machine's `cache` holds;
    else it is measured now. Rank 0 decides for all, on its `device`, also for experts of a shape that it has not.
    """
    shapes_by_rank = plain_collectives.all_gather_json([_shape(layer) for layer in layers])
    shapes = sorted({tuple(shape) for of_rank in shapes_by_rank for shape in of_rank})

    def measure_costs() -> list[dict[str, dict[str, float]]]:
        shape_costs = []
        for shape in shapes:
            w_in = torch.ones(shape, dtype=dtype, device=device)
            key = Shape.from_weight(w_in).key
            if key not in _read_costs(run):
                new_costs = to_json(stored_or_measured(w_in, cache))
                costs_by_key = {
                    key: new_costs,
                    **_read_costs(run),
                }  # measuring takes a while: whoever was faster has decided
                run.write(FILE, json.dumps(costs_by_key, indent=1).encode())
            shape_costs.append(_read_costs(run)[key])
        return shape_costs

    costs = dict(
        zip(shapes, map(from_json, plain_collectives.broadcast_from_rank0(measure_costs)), strict=True)
    )
    for layer in layers:
        layer.experts.costs = costs[_shape(layer)]


def _shape(layer: MoELayer) -> tuple[int, ...]:
    """Shape of the local experts' first matrices `[E, M, H]`, as they are multiplied."""
    return layer.experts.shape


def _read_costs(run: Folder) -> dict[str, dict[str, dict[str, float]]]:
    try:
        costs_by_key: dict[str, dict[str, dict[str, float]]] = json.loads(run.read(FILE))
    except FileNotFoundError:
        return {}
    return costs_by_key
