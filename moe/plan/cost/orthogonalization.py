"""Predicted time of Muon's orthogonalization."""

from math import prod

from moe.plan.cluster.kernels import MatrixProducts
from moe.plan.cost.collectives import Network, Ranks
from moe.plan.cost.units import Unit
from moe.plan.degrees import Degrees
from moe.plan.placement import Weight
from moe.spec import MuonSpec

ITEM_BYTES = 2
"""Matrices are sent and orthogonalized in bfloat16 (`moe.train.optimizer.muon`)."""


def orthogonalization_s(
    optimizer: MuonSpec,
    unit_counts: tuple[tuple[Unit, int], ...],
    degrees: Degrees,
    products: MatrixProducts,
    network: Network,
) -> float:
    """Seconds of the Newton-Schulz iterations of a stage's hidden matrices, spread over its ranks, and of the exchange
    of their parts."""
    total_s = largest_s = moved_elements = 0.0
    for unit, count in unit_counts:
        for weight in unit.weights:
            if not (weight.is_trained and weight.is_hidden_matrix):
                continue
            *stacked, rows, columns = weight.shape
            num_matrices, (short, long) = prod(stacked), sorted((rows, columns))
            all_rows = num_matrices * short
            weight_s = optimizer.ns_steps * (
                products.seconds(all_rows, long, short)
                + products.seconds(all_rows, short, short)
                + products.seconds(all_rows, short, long)
            )
            total_s += count * weight_s
            largest_s = max(largest_s, weight_s / num_matrices)
            moved_elements += count * _moved_elements(weight, degrees)
    exchange_s = (
        network.all_to_all(ITEM_BYTES * moved_elements, Ranks(degrees.stage_workers)) if moved_elements else 0.0
    )
    return max(total_s / degrees.stage_workers, largest_s) + exchange_s


def _moved_elements(weight: Weight, degrees: Degrees) -> int:
    """Elements that a rank sends to the owners of its matrices, or receives from them: parts of split matrices both
    ways, replicas one way, and no matrix that it has for itself."""
    splits = weight.splits(degrees.shards)
    is_split = any(dim >= len(weight.shape) - 2 for _, dim in splits)
    has_replicas = prod(getattr(degrees.shards, axis) for axis, _ in splits) < degrees.stage_workers
    return (is_split + (is_split or has_replicas)) * prod(weight.local_shape(degrees.shards))
