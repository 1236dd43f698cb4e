"""Causal attention, forward, fitted on `attention/*/*/context_attention_perf` and `mla/*/*/context_mla_perf`.

Rows with bfloat16 queries and keys, at least 512 tokens and an empty cache are used. Heads of latent attention have
their own keys in training: its fit has one constant per number of a head, and half of it is assigned to queries.
"""

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
from benchmarks.kernels.tables import Array, Sheet, Table, columns, fastest, files, glitches, join, take
from moe.plan.cluster.kernels import FusedAttention

SHAPE = ("batch_size", "isl", "num_heads", "num_key_value_heads", "widths", "window_size")
LATENT = 320.0
"""Widths of a head's scores (192) and values (128)."""
WIDTHS = (128, 256, 320, 384, 512)
_UNTUNED = 384
"""Left out: on Blackwell only Triton's kernel was measured, which reaches an eighth of the peak."""
_MANY_HEADS = 96
"""Number of heads of width 64 from which windowed kernels take about twice as long."""
_LEAST_LENGTH = 512
_LEAST_ELEMENT_S = 1e-17


def seconds(
    kernel: FusedAttention, rows: Array, length: Array, heads: Array, key_heads: Array, widths: Array, window: Array
) -> Array:
    """`FusedAttention.seconds` for arrays, causal; a window of 0 means no window."""
    span = np.minimum(length, np.where(window > 0, window, length))
    numbers = rows * widths
    full = 2 * numbers * heads * _looked_at(kernel, length, length) / kernel.flops_per_s
    part = 2 * numbers * heads * _looked_at(kernel, span, length) / kernel.flops_per_s
    ends = numbers * (kernel.window_query_s * heads + kernel.window_key_s * np.minimum(key_heads, heads / 2))
    looks = np.where(span < length, np.minimum(full, part + ends), full)
    chain = kernel.chain_s * np.minimum(span + kernel.block, length)
    return np.asarray(kernel.start_s + chain + looks + numbers * (kernel.query_s * heads + kernel.key_s * key_heads))


def _looked_at(kernel: FusedAttention, span: Array, length: Array) -> Array:
    positions = span - span * span / (2 * length) + kernel.block / 2
    return np.asarray(np.minimum(positions, (length + kernel.block) / 2))


def errors(kernel: FusedAttention, table: Table) -> Array:
    batch, length, *rest = (table[name] for name in SHAPE)
    return np.asarray(np.log(seconds(kernel, batch * length, length, *rest) / table["seconds"]))


def load(folder: Path, sheet: Sheet) -> tuple[Table, int]:
    """Fastest kernel of each shape, and the number left out because a larger shape was 1.3 times as fast."""
    tables = []
    for latent, pattern in ((False, "attention/*/*/context_attention_perf"), (True, "mla/*/*/context_mla_perf")):
        dtype = "mla_dtype" if latent else "attn_dtype"
        names = ("batch_size", "isl", "num_heads", dtype, "kv_cache_dtype", "step", "latency")
        for path in files(folder, sheet, pattern):
            optional = {} if latent else {"num_key_value_heads": 0.0, "head_dim": 128.0, "window_size": 0.0}
            table = columns(path, (*names, *optional), optional)
            if latent:
                table |= {"num_key_value_heads": table["num_heads"], "widths": np.full(len(table["isl"]), LATENT)}
                table["window_size"] = np.zeros(len(table["isl"]))
            else:
                table["widths"] = 2 * table["head_dim"]
            narrow = (table[dtype] == "bfloat16") & (table["kv_cache_dtype"] == "bfloat16")
            table = take(table, narrow & (table["step"] == 0) & (table["isl"] >= _LEAST_LENGTH))
            tables.append({name: table[name] for name in SHAPE} | {"seconds": table["latency"] * 1e-3})
    table = fastest(join(tables), SHAPE)
    more_work = (("batch_size", 1), ("num_heads", 1), ("num_key_value_heads", 1))
    left_out = glitches(table, ("isl", "widths", "window_size"), more_work)
    return take(table, ~left_out), int(left_out.sum())


def fit(table: Table, sheet: Sheet) -> FusedAttention:
    """Constants of one width; those of windows are 0 if no windows were measured."""
    windows = bool(((table["window_size"] > 0) & (table["window_size"] < table["isl"])).any())
    peak = sheet.flops_per_s["bfloat16"]
    element = (1e-12, _LEAST_ELEMENT_S, 1e-9)
    limits = [(0.6 * peak, 0.02 * peak, peak), (1e-5, 1e-7, 1e-3), (3e-9, 1e-12, 1e-6), element, element]
    limits += [element, element] if windows else []

    def make(values: list[float]) -> FusedAttention:
        rate, start, chain, *elements = values
        query, key, *ends = (drop_negligible(element, _LEAST_ELEMENT_S) for element in elements)
        window_query, window_key = ends or (0.0, 0.0)
        return FusedAttention(rate, start, chain, query, key, window_query, window_key)

    return minimize_error(make, lambda kernel: errors(kernel, table), limits)


def cross_validate(folder: Path, sheet: Sheet) -> tuple[dict[int, FusedAttention], dict[str, Figures]]:
    """Constants by width, and errors for held-out numbers of heads (and key heads), by width and overall."""
    table, left_out = load(folder, sheet)
    constants, figures, all_errors, parts = {}, {}, [], []
    for widths in np.unique(table["widths"]).astype(int):
        part = take(table, table["widths"] == widths)
        if widths not in WIDTHS or len(part["isl"]) < 50:
            continue
        error = held_out(part, folds(part, ("num_heads", "num_key_value_heads")), lambda rest: fit(rest, sheet), errors)
        length, window, heads = part["isl"], part["window_size"], part["num_heads"]
        cut = (window > 0) & (window < length)
        regimes = {
            "no window": ~cut, "window 128": cut & (window == 128), "window 1,024": cut & (window == 1024),
            "window 8,192": cut & (window == 8192),
        }  # fmt: skip
        if (many_heads := regimes["window 128"] & (heads >= _MANY_HEADS)).any():
            regimes |= {"window 128, 96 heads": many_heads, "window 128, fewer": regimes["window 128"] & ~many_heads}
        name = "latent" if widths == LATENT else f"{widths // 2}"
        width_figures = {**figure(error), "by": by_regime(error, regimes)}
        if widths == _UNTUNED and sheet.flops_per_s["bfloat16"] > 1e15:
            figures[f"attention {name}, left out"] = width_figures
            continue
        constants[int(widths)] = fit(part, sheet)
        figures[f"attention {name}"] = width_figures
        all_errors.append(error)
        parts.append(part)
    joined_table, error = join(parts), np.concatenate(all_errors)
    lengths = between(
        joined_table["isl"],
        {
            "512 to 1,023 tokens": (512, 1024),
            "1,024 to 4,095 tokens": (1024, 4096),
            "4,096 tokens and more": (4096, np.inf),
        },
    )
    sequences = between(
        joined_table["batch_size"] * joined_table["num_heads"],
        {
            "fewer than 16 heads of sequences": (0, 16),
            "16 to 255 heads of sequences": (16, 256),
            "256 heads of sequences and more": (256, np.inf),
        },
    )
    figures["attention"] = {
        **figure(error), "by": by_regime(error, {**lengths, **sequences}), "left_out_rows": left_out,
    }  # fmt: skip
    return constants, figures
