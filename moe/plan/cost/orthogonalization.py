"""Predicted time and memory of Muon's orthogonalization."""

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


_BUCKET_ELEMENTS = 1 << 26
"""Elements per rank that are collected at once (`moe.parallel.whole_matrices`)."""
_ELEMENTS_AT_ONCE = {"cpu": 1 << 20}
"""Elements orthogonalized at once, by kind of device (`moe.train.optimizer.muon`)."""


def update_bytes(
    unit_counts: tuple[tuple[Unit, int], ...], degrees: Degrees, kind: str, item_bytes: int = ITEM_BYTES
) -> int:
    """Bytes of the tensors that an update of a stage's hidden matrices takes beside the state on the fullest rank, in
    its largest bucket: momenta, the matrices that the rank owns, and the larger of what an iteration takes and what
    the rank sends to and receives from other ranks. `item_bytes`: per element, 8 in float64."""
    num_ranks, shards = degrees.stage_workers, degrees.shards
    local = moved = num_elements = largest = 0.0
    stacks: dict[tuple[int, ...], float] = {}
    """Elements orthogonalized in one call, by shape: of a parameter, or of all matrices that a rank owns."""
    for unit, count in unit_counts:
        for weight in unit.weights:
            if not (weight.is_trained and weight.is_hidden_matrix):
                continue
            *leading, rows, columns = weight.shape
            stacked = prod(getattr(shards, axis) for axis, dim in weight.splits(shards) if dim < len(leading))
            local_elements = count * prod(weight.local_shape(shards))
            local += local_elements
            moved += local_elements * (1 - stacked / num_ranks)  # the owner of a matrix has its own part
            num_elements, largest = num_elements + count * weight.numel, max(largest, weight.numel)
            earlier = stacks.get((rows, columns), 0.0)
            owned = count * weight.numel / num_ranks
            stacks[rows, columns] = max(earlier, weight.numel) if num_ranks == 1 else earlier + owned
    if not num_elements:
        return 0
    bucket_share = min(1.0, max(_BUCKET_ELEMENTS * num_ranks, largest) / num_elements)
    most, iteration = _ELEMENTS_AT_ONCE.get(kind, 1 << 26), 0.0
    for (rows, columns), elements in stacks.items():
        at_once = min(max(most, rows * columns), max(bucket_share * elements, rows * columns))
        # Two copies, and two products of the shorter side with itself.
        iteration = max(iteration, at_once * (2 + 2 * min(rows, columns) / max(rows, columns)))
    collected = 0.0 if num_ranks == 1 else num_elements / num_ranks
    return int(item_bytes * (bucket_share * (local + collected) + max(iteration, 2 * bucket_share * moved)))
