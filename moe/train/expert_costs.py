"""Expert backend costs of a run: measured once, stored with the run, the same on every rank."""

import json
from collections.abc import Collection
from pathlib import Path

import torch

from moe.dispatch import measure_with_kernels
from moe.experts import stored_or_measured
from moe.experts.measurement import Shape, from_json, to_json
from moe.layers.moe import MoELayer
from moe.parallel import json_collectives
from moe.storage.folder import Folder

FILE = "expert-costs.json"
"""Measured costs of each backend, by shape."""


def decide(layers: Collection[MoELayer], device: torch.device, dtype: torch.dtype, run: Folder, cache: Path) -> None:
    """Set the measured backend costs of experts that compute in `dtype`. Collective.

    Each rank passes its own layers, possibly none. Costs come from the run's storage, if measured on a machine of the
    same kind, so that restarts are bitwise reproducible; else from this machine's `cache`; else they are measured.
    Rank 0 decides on its `device`, also for shapes that it does not have.
    """
    shapes_by_rank = json_collectives.all_gather_json([_shape(layer) for layer in layers])
    shapes = sorted({tuple(shape) for rank_shapes in shapes_by_rank for shape in rank_shapes})

    def measure_costs() -> list[dict[str, dict[str, float]]]:
        shape_costs = []
        for shape in shapes:
            w_in = torch.ones(shape, dtype=dtype, device=device)
            key = Shape.from_weight(w_in).key
            if key not in _read_costs(run):
                new_costs = to_json(stored_or_measured(w_in, cache, measure_with_kernels))
                costs_by_key = {
                    key: new_costs,
                    **_read_costs(run),
                }  # measuring takes a while; an entry written meanwhile wins
                run.write(FILE, json.dumps(costs_by_key, indent=1).encode())
            shape_costs.append(_read_costs(run)[key])
        return shape_costs

    costs = dict(zip(shapes, map(from_json, json_collectives.broadcast_from_rank0(measure_costs)), strict=True))
    for layer in layers:
        layer.experts.costs = costs[_shape(layer)]


def _shape(layer: MoELayer) -> tuple[int, ...]:
    """Local shape `[E, M, H]` of the first expert matrices, as multiplied."""
    return layer.experts.shape


def _read_costs(run: Folder) -> dict[str, dict[str, dict[str, float]]]:
    try:
        costs_by_key: dict[str, dict[str, dict[str, float]]] = json.loads(run.read(FILE))
    except FileNotFoundError:
        return {}
    return costs_by_key
