"""NCCL's operations within a node, fitted on `comm/nccl/*/nccl_perf` (two-byte numbers; 2, 4 and 8 ranks).

One set of constants covers gathers, scatters and all-reduces, another all-to-all. No rows are left out.
"""

from pathlib import Path

import numpy as np

from benchmarks.kernels.fitting import Figures, between, by_regime, figure, folds, held_out, minimize_error
from benchmarks.kernels.tables import Array, Sheet, Table, columns, fastest, files, join, take
from moe.plan.cluster.kernels import CollectiveCost

OPERATIONS = {"ring": ("all_gather", "reduce_scatter", "all_reduce"), "all_to_all": ("alltoall",)}
_ITEM_BYTES = 2.0
_MIB = float(2**20)
_SPLITS = 3


def seconds(cost: CollectiveCost, size: Array, ranks: Array, passes: Array) -> Array:
    """`CollectiveCost.seconds` for arrays. `passes` is 2 for an all-reduce: a scatter and a gather in one launch; with
    steps of a tree instead of a ring the error was twice as large."""
    latency = cost.step_s * (ranks - 1) + cost.doubling_s * np.ceil(np.log2(ranks))
    transfer_s = size * (ranks - 1) / ranks / cost.bytes_per_s
    begin = cost.start_s + cost.ramp_s * np.minimum(1.0, size / cost.knee_bytes)
    return np.asarray(begin + passes * (latency + transfer_s) + size / ranks / cost.own_bytes_per_s)


def errors(cost: CollectiveCost, table: Table) -> Array:
    return np.asarray(np.log(seconds(cost, table["size"], table["ranks"], table["passes"]) / table["seconds"]))


def load(folder: Path, sheet: Sheet, name: str) -> Table:
    """Fastest version of each operation, number of ranks and size in bytes."""
    tables = []
    for path in files(folder, sheet, "comm/nccl/*/nccl_perf"):
        table = columns(path, ("nccl_dtype", "op_name", "num_gpus", "message_size", "latency"))
        tables.append(take(table, (table["nccl_dtype"] == "half") & np.isin(table["op_name"], OPERATIONS[name])))
    table = join(tables)
    columns_by_name = {
        "operation": table["op_name"], "ranks": table["num_gpus"], "size": _ITEM_BYTES * table["message_size"],
        "passes": np.where(table["op_name"] == "all_reduce", 2.0, 1.0), "seconds": table["latency"] * 1e-3,
    }  # fmt: skip
    return fastest(columns_by_name, ("operation", "ranks", "size"))


def fit(table: Table, sheet: Sheet) -> CollectiveCost:
    """Fit with copies of a rank's own share at least as fast as its link, so that more ranks never take less time."""
    link = sheet.link_bytes_per_s
    limits = [
        (0.7 * link, 1e10, link), (2.0, 1.0, 50.0), (8e-6, 5e-7, 5e-5), (1e-6, 1e-8, 1e-5), (12e-6, 1e-7, 1e-4),
        (3 * _MIB, 0.03 * _MIB, 64 * _MIB),
    ]  # fmt: skip

    def make(values: list[float]) -> CollectiveCost:
        rate, ratio, start, step, ramp, knee = values
        return CollectiveCost(rate, start, step, own_bytes_per_s=rate * ratio, ramp_s=ramp, knee_bytes=knee)

    return minimize_error(make, lambda cost: errors(cost, table), limits, scales=(1.0, 0.5, 2.0))


def cross_validate(folder: Path, sheet: Sheet, name: str) -> tuple[CollectiveCost, Figures]:
    """Constants, and errors of held-out sizes in three different splits."""
    table = load(folder, sheet, name)
    error = np.concatenate(
        [
            held_out(table, folds(table, ("size",), seed), lambda rest: fit(rest, sheet), errors)
            for seed in range(_SPLITS)
        ]
    )
    three = {column: np.tile(values, _SPLITS) for column, values in table.items()}
    sizes = between(
        three["size"],
        {
            "below 64 KiB": (0, 2**16), "64 KiB to 1 MiB": (2**16, _MIB), "1 to 16 MiB": (_MIB, 16 * _MIB),
            "16 MiB and more": (16 * _MIB, np.inf),
        },
    )  # fmt: skip
    ranks = {f"{count:g} ranks": three["ranks"] == count for count in np.unique(three["ranks"])}
    kinds = {
        operation.replace("alltoall", "all-to-all").replace("_", "-"): three["operation"] == operation
        for operation in OPERATIONS[name]
    }
    regimes = by_regime(error, {**sizes, **ranks, **kinds})
    for regime in regimes.values():
        regime["rows"] //= _SPLITS
    unseen = held_out(table, folds(table, ("ranks",)), lambda rest: fit(rest, sheet), errors)
    return fit(table, sheet), {
        **figure(error), "rows": len(table["size"]), "by": regimes,
        "outside": {"a count of ranks held out": figure(unseen)},
    }  # fmt: skip
