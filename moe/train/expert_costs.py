"""Expert backend costs of a run: measured once, stored with the run, the same on every rank."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from moe.dispatch import measure_with_kernels
from moe.experts import FUSED, Costs, stored_or_measured
from moe.experts.measurement import Shape, from_json, to_json
from moe.layers.moe import MoELayer
from moe.parallel import json_collectives
from moe.storage.folder import Folder

FILE = "expert-costs.json"
"""Measured costs of each backend, by shape."""


ExpertShape = tuple[int, ...]
"""`[E, M, H]`: local shape of the first expert matrices, as multiplied."""


def decide(
    layers: Collection[MoELayer], device: torch.device, dtype: torch.dtype, run: Folder, cache: Path
) -> dict[ExpertShape, Costs]:
    """Set the measured backend costs of experts that compute in `dtype`, and return them by shape. Collective.

    Each rank passes its own layers, possibly none. Costs come from the run's storage, if measured on a machine of the
    same kind, so that restarts are bitwise reproducible; else from this machine's `cache`; else they are measured.
    Rank 0 decides on its `device`, also for shapes that it does not have.
    """
    shapes_by_rank = json_collectives.all_gather_json([_shape(layer) for layer in layers])
    shapes = sorted({tuple(shape) for rank_shapes in shapes_by_rank for shape in rank_shapes})

    def measure_costs() -> list[dict[str, dict[str, Any]]]:
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
    return costs


def describe(costs: Mapping[ExpertShape, Costs]) -> Iterator[str]:
    """One log line per shape: the fused kernels if chosen, then the other backends, fastest first."""
    for (num_experts, model_dim, hidden_dim), shape_costs in costs.items():
        backends = sorted(shape_costs.items(), key=lambda item: item[1].per_row_s)
        times = [f"{name} {1e6 * cost.per_row_s:.3g} us per row" for name, cost in backends if name != FUSED]
        if FUSED in shape_costs:
            overrides = shape_costs[FUSED].config_overrides or {}
            tiles = [f"{kernel} in tiles of {_tiles(fields)}" for kernel, fields in overrides.items()]
            times.insert(0, f"fused kernels are used, {', '.join(tiles) or 'default tiles'}")
        yield f"expert backends for {num_experts} experts of {model_dim} x {hidden_dim}: {'; '.join(times)}"


def _tiles(fields: Sequence[int]) -> str:
    """Text of a kernel's configuration (`moe.kernels.configs.Config`)."""
    *sizes, uses_tma = fields
    return " x ".join(map(str, sizes[:3])) + " by TMA" * bool(uses_tma)


def _shape(layer: MoELayer) -> ExpertShape:
    return layer.experts.shape


def _read_costs(run: Folder) -> dict[str, dict[str, dict[str, Any]]]:
    try:
        costs_by_key: dict[str, dict[str, dict[str, Any]]] = json.loads(run.read(FILE))
    except FileNotFoundError:
        return {}
    return costs_by_key
