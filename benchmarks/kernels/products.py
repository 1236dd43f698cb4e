"""Dense products, fitted on `gemm/*/*/gemm_perf`: (rows, inputs) times (inputs, outputs), its m, k and n.

A file with less than half of the rows of the largest is left out: it has only some of the shapes, from another machine,
and would make them faster than their neighbors. No other rows are left out; rows that do not occur in training steps
have a weight of 0.03.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.kernels.fitting import Figures, between, by_regime, figure, folds, held_out, minimize_error
from benchmarks.kernels.tables import Array, Mask, Sheet, Table, columns, fastest, files, join, take
from moe.plan.cluster.kernels import MatrixProducts

DTYPES = ("bfloat16", "fp8")
SHAPE = ("rows", "inputs", "outputs")
LEAST_FLOPS = 2e10
"""Fewest operations of a training step's product: below, one or two waves of tiles determine the time."""
_ITEM_BYTES = {"bfloat16": 2.0, "fp8": 1.0, "float32": 4.0, "float64": 8.0}
# Exponent of the loop over inputs: 1, or 1/2 if the library splits them over idle units (cuBLAS in bfloat16). It is not
# fitted: fits by device gave 0.46 to 0.63 and 0.91 to 1.00, with the same errors.
_DEPTH_POWER = {"bfloat16": 0.5, "fp8": 1.0}
_OUTSIDE = 0.03
_SAMPLE = 6000


def seconds(kernel: MatrixProducts, rows: Array, inputs: Array, outputs: Array) -> Array:
    """`MatrixProducts.seconds` for arrays."""
    arithmetic = 2 * (rows + kernel.half_rows) * outputs * (inputs + kernel.fill) / kernel.flops_per_s
    num_bytes = kernel.output_bytes * rows * outputs + kernel.item_bytes * inputs * (rows + outputs)
    walk = kernel.depth_s * (inputs / 1000) ** kernel.depth_power
    slowest = np.sqrt(arithmetic**2 + (num_bytes / kernel.bytes_per_s) ** 2 + walk**2)
    return np.asarray(kernel.start_s + kernel.quantise_s * rows * inputs + slowest)


def errors(kernel: MatrixProducts, table: Table) -> Array:
    return np.asarray(np.log(seconds(kernel, *(table[name] for name in SHAPE)) / table["seconds"]))


def load(folder: Path, sheet: Sheet, dtype: str) -> tuple[Table, int]:
    """Fastest kernel of each shape, and the number of rows in files that were left out."""
    tables: list[Table] = []
    for path in files(folder, sheet, "gemm/*/*/gemm_perf"):
        table = columns(path, ("gemm_dtype", "m", "k", "n", "latency"))
        table = take(table, (table["gemm_dtype"] == dtype) & (table["latency"] > 0))
        if len(table["m"]):
            shape = dict(zip(SHAPE, (table["m"], table["k"], table["n"]), strict=True))
            tables.append({**shape, "seconds": table["latency"] * 1e-3})
    max_rows = max(len(table["rows"]) for table in tables)
    complete = [table for table in tables if 2 * len(table["rows"]) >= max_rows]
    left_out = sum(len(table["rows"]) for table in tables) - sum(len(table["rows"]) for table in complete)
    return fastest(join(complete), SHAPE), left_out


def flops(table: Table) -> Array:
    return np.asarray(2 * table["rows"] * table["inputs"] * table["outputs"])


def aligned_rows(table: Table) -> Mask:
    """Shapes whose rows are a multiple of 16, with no size below 256."""
    smallest = np.minimum(np.minimum(table["rows"], table["inputs"]), table["outputs"])
    return np.asarray((table["rows"] % 16 == 0) & (smallest >= 256))


def training_rows(table: Table) -> Mask:
    """Products of a training step: tensor cores need sums over multiples of 16 bytes, and the gradient of a weight sums
    over rows."""
    return np.asarray(aligned_rows(table) & (flops(table) >= LEAST_FLOPS))


def fit(table: Table, sheet: Sheet, dtype: str, begin: MatrixProducts | None = None) -> MatrixProducts:
    """Fit with rates up to those of the data sheet, on a sample of each kind of rows, weighted by its share."""
    draws, training = np.random.default_rng(0), training_rows(table)
    parts = [draws.permutation(np.flatnonzero(rows))[:_SAMPLE] for rows in (training, ~training)]
    weights = np.concatenate(
        [
            np.full(len(part), weight * rows.sum() / max(1, len(part)))
            for part, rows, weight in zip(parts, (training, ~training), (1.0, _OUTSIDE), strict=True)
        ]
    )
    sample, peak, memory = (take(table, np.concatenate(parts)), sheet.flops_per_s[dtype], sheet.memory_bytes_per_s)
    form = MatrixProducts(peak, item_bytes=_ITEM_BYTES[dtype], depth_power=_DEPTH_POWER[dtype])
    limits = [
        (0.8 * peak, 0.3 * peak, peak),
        (0.8 * memory, 0.3 * memory, memory),
        (3e-6, 1e-8, 5e-5),
        (2e-6, 1e-9, 1e-4),
        (100.0, 1e-2, 2000.0),
        (1e-12, 1e-16, 1e-10),
    ]
    names = ["flops_per_s", "bytes_per_s", "start_s", "depth_s", "fill", "quantise_s"]
    if dtype == "bfloat16":
        names, limits = names[:-1], limits[:-1]
    if begin is not None:
        limits = [(getattr(begin, name), *ends[1:]) for name, ends in zip(names, limits, strict=True)]

    def make(values: list[float]) -> MatrixProducts:
        return replace(form, **dict(zip(names, values, strict=True)))

    return minimize_error(make, lambda kernel: errors(kernel, sample), limits, weights=weights, smooth=0.02)


def derive_dtype(kernel: MatrixProducts, dtype: str, sheet: Sheet) -> MatrixProducts:
    """Constants of a wider dtype, which was not measured: the same share of its peak, and its item size."""
    share = kernel.flops_per_s / sheet.flops_per_s["bfloat16"]
    width = _ITEM_BYTES[dtype]
    return replace(kernel, flops_per_s=share * sheet.flops_per_s[dtype], item_bytes=width, output_bytes=width)


def cross_validate(folder: Path, sheet: Sheet, dtype: str) -> tuple[MatrixProducts, Figures]:
    """Constants, and errors of products with held-out weights (inputs, outputs)."""
    table, left_out = load(folder, sheet, dtype)
    kernel = fit(table, sheet, dtype)
    error = held_out(table, folds(table, ("inputs", "outputs")), lambda rest: fit(rest, sheet, dtype, kernel), errors)
    training, work = training_rows(table), flops(table)
    sizes = between(
        work,
        {
            "2·10^10 to 10^11 operations": (2e10, 1e11), "10^11 to 10^12 operations": (1e11, 1e12),
            "10^12 operations and more": (1e12, np.inf),
        },
    )  # fmt: skip
    largest = np.maximum(table["inputs"], table["outputs"])
    smallest = np.minimum(table["inputs"], table["outputs"])
    regimes = {
        **{name: training & rows for name, rows in sizes.items()},
        "rows the largest: forward, gradients of rows": training & (table["rows"] >= largest),
        "inputs the largest: gradients of weights": training
        & (table["inputs"] >= np.maximum(table["rows"], table["outputs"])),
        "outputs below 1,024": training & (table["outputs"] < 1024),
    }
    other_regimes = {
        "fewer than 2·10^10 operations": aligned_rows(table) & ~training,
        "rows of 16 n + 1": (table["rows"] % 16 == 1) & (smallest >= 256) & (table["rows"] >= 256),
        "rows below 256": (table["rows"] < 256) & (smallest >= 256),
        "inputs or outputs below 256": smallest < 256,
    }
    return kernel, {
        **figure(error[training]),
        "percentile_95": round(float(np.quantile(np.abs(error[training]), 0.95)), 4),
        "by": by_regime(error, regimes),
        "outside": by_regime(error, other_regimes),
        "left_out_rows": left_out,
    }
