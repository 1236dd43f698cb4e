"""Layers of gated experts, forward on one rank, fitted on `moe/*/*/moe_perf`.

Rows with balanced loads, at least 512 tokens and experts at least one tile wide are used. A100 has balanced rows of
only one kernel: its rows with skewed loads on a single expert rank are used too, since that rank computes all tokens in
any case. With experts spread over ranks, only kernels that take the rank's own rows count: the others work on all
tokens' rows, which a rank of a trainer does not have. Experts of Nemotron-H are not gated and may not have three
matrices.
"""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.kernels.fitting import (
    Figures,
    between,
    by_regime,
    drop_negligible,
    figure,
    folds,
    held_out,
    minimize_error,
)
from benchmarks.kernels.tables import Array, Mask, Sheet, Table, columns, fastest, files, glitches, join, take
from moe.plan.cluster.kernels import GroupedExperts

DTYPES = ("bfloat16", "fp8")
SHAPE = ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
LAYER = ("hidden_size", "inter_size", "topk", "num_experts")
LEAST_TOKENS = 512
_NAMES = {"bfloat16": ("bfloat16",), "fp8": ("fp8", "fp8_block")}
_ITEM_BYTES = {"bfloat16": 2.0, "fp8": 1.0, "float32": 4.0, "float64": 8.0}
_NUM_MATRICES = 3
_OWN_ROWS = re.compile("moe_torch_flow|trtllm|deepgemm|flashinferexperts")
_NOT_GATED = ((2688, 1856), (4096, 2688), (1024, 2688), (2048, 5120), (8192, 5120))
_LEAST_ELEMENT_S = 1e-16


def seconds(
    kernel: GroupedExperts,
    rows: Array,
    tokens: Array,
    experts: Array,
    width: Array,
    hidden_dim: Array,
    num_matrices: int,
) -> Array:
    """`GroupedExperts.seconds` for arrays."""
    matrices = num_matrices * width * np.ceil(hidden_dim / kernel.tile) * kernel.tile
    return np.asarray(
        kernel.start_s
        + 2 * (rows + kernel.half_rows * experts) * matrices / kernel.flops_per_s
        + np.minimum(rows, experts) * matrices * kernel.item_bytes / kernel.bytes_per_s
        + rows * width * kernel.row_s
        + rows * hidden_dim * kernel.hidden_s
        + tokens * width * kernel.token_s
    )


def arguments(table: Table) -> tuple[Array, Array, Array, Array, Array]:
    """Rows of a rank's experts, its tokens, its number of experts, and both widths of an expert."""
    ranks = table["moe_ep_size"]
    return (
        table["num_tokens"] * table["topk"] / ranks, table["num_tokens"], table["num_experts"] / ranks,
        table["hidden_size"], table["inter_size"] / table["moe_tp_size"],
    )  # fmt: skip


def errors(kernel: GroupedExperts, table: Table) -> Array:
    return np.asarray(np.log(seconds(kernel, *arguments(table), _NUM_MATRICES) / table["seconds"]))


def read(folder: Path, sheet: Sheet, dtype: str) -> Table:
    """All gated rows of all frameworks and versions."""
    tables = []
    for path in files(folder, sheet, "moe/*/*/moe_perf"):
        table = columns(path, (*SHAPE, "moe_dtype", "distribution", "kernel_source", "latency"))
        is_gated = np.char.find(table["kernel_source"], "nongated") < 0
        table = take(table, np.isin(table["moe_dtype"], _NAMES[dtype]) & is_gated)
        tables.append({**table, "seconds": table["latency"] * 1e-3})
    return join(tables)


def load(folder: Path, sheet: Sheet, dtype: str) -> tuple[Table, dict[str, Table]]:
    """Fastest kernel of each shape, and the rows left out, by rule."""
    table = read(folder, sheet, dtype)
    single_rank = table["moe_ep_size"] == 1
    loads = table["distribution"] == "balanced"
    if sheet.name == "a100_sxm":
        loads |= single_rank & np.isin(table["distribution"], ("power_law_1.01", "power_law_1.2"))
    table = take(table, loads & (table["num_tokens"] >= LEAST_TOKENS))
    has_own_rows = np.array([_OWN_ROWS.search(kernel) is not None for kernel in table["kernel_source"]], bool)
    all_kernels, table = fastest(table, SHAPE), fastest(take(table, has_own_rows | (table["moe_ep_size"] == 1)), SHAPE)
    have = set(_shapes(table))
    left_out = {
        "expert ranks, kernels of all rows": take(all_kernels, np.array([s not in have for s in _shapes(all_kernels)]))
    }

    def leave(rule: str, rows: Mask) -> None:
        nonlocal table
        left_out[rule], table = take(table, rows), take(table, ~rows)

    widths = zip(table["hidden_size"], table["inter_size"], strict=True)
    leave("perhaps not gated", np.array([pair in _NOT_GATED for pair in widths], bool))
    sizes = (("num_tokens", 1), ("moe_tp_size", -1), ("moe_ep_size", -1))
    leave("slower than a larger one", glitches(table, LAYER, sizes))
    leave("narrower than a tile", table["inter_size"] / table["moe_tp_size"] < 128)
    return table, left_out


def _shapes(table: Table) -> list[tuple[float, ...]]:
    return list(zip(*(table[name].tolist() for name in SHAPE), strict=True))


def fit(table: Table, sheet: Sheet, dtype: str) -> GroupedExperts:
    """Fit with rates up to those of the data sheet."""
    peak, memory = sheet.flops_per_s[dtype], sheet.memory_bytes_per_s

    def make(values: list[float]) -> GroupedExperts:
        rate, wire, start, *elements = values
        row_s, hidden_s, token_s = (drop_negligible(element, _LEAST_ELEMENT_S) for element in elements)
        return GroupedExperts(
            rate, wire, item_bytes=_ITEM_BYTES[dtype], start_s=start, row_s=row_s, hidden_s=hidden_s, token_s=token_s
        )

    element = (1e-12, _LEAST_ELEMENT_S, 1e-9)
    limits = [
        (0.7 * peak, 0.1 * peak, peak), (0.8 * memory, 0.2 * memory, memory), (3e-5, 1e-5, 1e-3),
        element, element, element,
    ]  # fmt: skip
    return minimize_error(make, lambda kernel: errors(kernel, table), limits)


def derive_dtype(kernel: GroupedExperts, dtype: str, sheet: Sheet) -> GroupedExperts:
    """Constants of a wider dtype, which was not measured: the same share of its peak, and its item size."""
    share, width = kernel.flops_per_s / sheet.flops_per_s["bfloat16"], _ITEM_BYTES[dtype]
    times = width / kernel.item_bytes
    return replace(
        kernel, flops_per_s=share * sheet.flops_per_s[dtype], item_bytes=width, row_s=times * kernel.row_s,
        hidden_s=times * kernel.hidden_s, token_s=times * kernel.token_s,
    )  # fmt: skip


def cross_validate(folder: Path, sheet: Sheet, dtype: str) -> tuple[GroupedExperts, Figures]:
    """Constants, and errors of held-out layers (widths, experts, experts per token)."""
    table, left_out = load(folder, sheet, dtype)
    kernel = fit(table, sheet, dtype)
    error = held_out(table, folds(table, LAYER), lambda rest: fit(rest, sheet, dtype), errors)
    rows, _, experts, _, hidden_dims = arguments(table)
    ranks, split = table["moe_ep_size"] > 1, table["moe_tp_size"] > 1
    rows_per_expert = between(
        rows / experts,
        {
            "below 32 rows an expert": (0, 32), "32 to 127 rows an expert": (32, 128),
            "128 to 511 rows an expert": (128, 512), "512 to 2,047 rows an expert": (512, 2048),
            "2,048 rows an expert and more": (2048, np.inf),
        },
    )  # fmt: skip
    regimes = {
        **rows_per_expert, "all experts whole on one rank": ~ranks & ~split,
        "experts spread over ranks": ranks & ~split,
        "experts split over ranks": split, "hidden width 512 and more": hidden_dims >= 512,
    }  # fmt: skip
    return kernel, {
        **figure(error),
        "layers": len(set(zip(*(table[name].tolist() for name in LAYER), strict=True))),
        "by": by_regime(error, regimes),
        "outside": {rule: figure(errors(kernel, rule_rows)) for rule, rule_rows in left_out.items()},
    }
