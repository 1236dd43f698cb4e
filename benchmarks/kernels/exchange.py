"""DeepEP's dispatch and combine, fitted on `comm/sglang/*/wideep_deepep_normal_perf`.

Dispatch sends fp8 with a float32 for each 128 numbers, combine sends bfloat16. Rows with at least 512 tokens per rank
are used, with the fastest number of multiprocessors; the times of the rows and of the counts sent before them are
added, since ranks wait for one another in both. Both phases share one start, between their own (33 and 54 µs on H100):
a layer has both.

Between nodes only H100 and H200 were measured, with 2, 4 and 8 nodes. 8 nodes are left out: their rate, 17 GB/s, is a
third of that on 4 nodes, and of what DeepEP publishes for 8.
"""

from collections.abc import Callable
from dataclasses import replace
from math import comb
from pathlib import Path

import numpy as np

from benchmarks.kernels.fitting import Figures, between, by_regime, figure, folds, held_out, minimize_error
from benchmarks.kernels.tables import Array, Sheet, Table, columns, fastest, files, join, take
from moe.plan.cluster.kernels import ExchangeCost

RELEASE, RELEASE_OF_NODES = "0.5.12", "0.5.6.post2"
SHAPE = ("node_num", "hidden_size", "num_experts", "num_topk", "num_token")
ARGUMENTS = ("tokens", "row_bytes", "copies", "across", "nodes", "ranks")
LEAST_TOKENS = 512
_ADAPTER = 5e10
"""Bytes per second of the network adapters of the measured nodes."""
_ROW_BYTES = {"dispatch": 1 + 4 / 128, "combine": 2.0}
_GROUPS = 4
"""Most nodes of a token's experts: the limit of the tables' router."""


def seconds(
    kernel: ExchangeCost, tokens: Array, row_bytes: Array, copies: Array, other_nodes: Array, nodes: Array, ranks: Array
) -> Array:
    """`ExchangeCost.seconds` for arrays."""
    intra_node_s = (
        kernel.copy_s * copies
        + row_bytes / kernel.own_bytes_per_s
        + row_bytes * copies * (ranks - 1) / ranks / kernel.link_bytes_per_s
        + row_bytes * other_nodes / kernel.forward_bytes_per_s
    )
    slowest = np.maximum(row_bytes * other_nodes / kernel.line_bytes_per_s, intra_node_s)
    return np.asarray(kernel.start_s + kernel.hop_s * np.log2(nodes) + tokens * slowest)


def errors(kernel: ExchangeCost, table: Table) -> Array:
    return np.asarray(np.log(seconds(kernel, *(table[name] for name in ARGUMENTS)) / table["seconds"]))


def _distinct(bins: int, experts: int, top: int) -> float:
    """Expected number of ranks or nodes of `top` different experts, drawn uniformly."""
    return bins * (1 - comb(experts - experts // bins, top) / comb(experts, top))


def routes(nodes: int, ranks: int, experts: int, top: int) -> tuple[float, float]:
    """Expected numbers of ranks that a token is sent to, and of nodes other than its own. If the router limits nodes,
    it takes those with the best scores, so that each has an expert of the token."""
    node_limit = min(nodes, _GROUPS)
    pool = experts * node_limit // nodes
    num_reached = _distinct(node_limit, pool, top) if node_limit == nodes else float(min(node_limit, top))
    return _distinct(node_limit * ranks, pool, top), num_reached * (nodes - 1) / nodes


def load(folder: Path, sheet: Sheet, release: str) -> Table:
    """Fastest rows of each shape, first dispatch, then combine; empty if none were measured."""
    raw = []
    for path in files(folder, sheet, f"comm/sglang/{release}/wideep_deepep_normal_perf"):
        times = [f"{phase}_{part}_us" for phase in _ROW_BYTES for part in ("transmit", "notify")]
        raw.append(columns(path, (*SHAPE, *times)))
    tables = []
    for phase, row_bytes in _ROW_BYTES.items() if raw else ():
        table = join(raw)
        table["seconds"] = (table[f"{phase}_transmit_us"] + table[f"{phase}_notify_us"]) * 1e-6
        table = fastest(table, SHAPE)
        shapes = zip(*(table[name].astype(int) for name in ("node_num", "num_experts", "num_topk")), strict=True)
        ways = np.array([routes(nodes, sheet.devices_per_node, *rest) for nodes, *rest in shapes])
        count = len(ways)
        tables.append(
            {
                "tokens": table["num_token"], "row_bytes": table["hidden_size"] * row_bytes, "copies": ways[:, 0],
                "across": ways[:, 1], "nodes": table["node_num"], "phase": np.full(count, phase),
                "ranks": np.full(count, float(sheet.devices_per_node)), "seconds": table["seconds"],
                **{name: table[name] for name in ("hidden_size", "num_experts", "num_topk")},
            }
        )  # fmt: skip
    return join(tables)


def fit_within(table: Table, sheet: Sheet) -> ExchangeCost:
    link = sheet.link_bytes_per_s
    limits = [(4e-5, 1e-6, 1e-3), (0.8 * link, 2e10, link), (3.5e11, 2e10, 2e13), (5e-9, 1e-11, 2e-7)]
    return minimize_error(
        lambda values: ExchangeCost(*values), lambda kernel: errors(kernel, table), limits, scales=(1.0, 0.5, 2.0)
    )


def fit_across(table: Table, intra_node: ExchangeCost, **constants: float) -> ExchangeCost:
    """The cost with constants between nodes; `constants` are those that are given instead of fitted."""
    names = ("hop_s", "line_bytes_per_s", "forward_bytes_per_s")
    limits = [(3e-5, 1e-6, 3e-4), (4e10, 5e9, _ADAPTER), (9e10, 1e10, 2e12)]

    most_nodes = int(max(table["nodes"]))

    def make(values: list[float]) -> ExchangeCost:
        return replace(intra_node, most_nodes=most_nodes, **{**dict(zip(names, values, strict=True)), **constants})

    return minimize_error(make, lambda kernel: errors(kernel, table), limits, scales=(1.0, 0.5, 2.0))


def extend_between_nodes(intra_node: ExchangeCost, reference: ExchangeCost, sheet: Sheet) -> ExchangeCost:
    """Constants of a device that was measured within a node only, extended by those of `reference` between nodes; the
    rate of its lines is scaled by the ratio of the adapters."""
    line = reference.line_bytes_per_s * sheet.adapter_bytes_per_s / _ADAPTER
    return replace(
        intra_node, hop_s=reference.hop_s, line_bytes_per_s=line, forward_bytes_per_s=reference.forward_bytes_per_s
    )


def cross_validate(folder: Path, sheet: Sheet) -> tuple[ExchangeCost | None, dict[str, Figures]]:
    """Constants, and errors of held-out widths and experts (in a node) or numbers of tokens (between nodes); None if
    nothing was measured."""
    table = load(folder, sheet, RELEASE)
    if not table:
        return None, {}
    small, table = take(table, table["tokens"] < LEAST_TOKENS), take(table, table["tokens"] >= LEAST_TOKENS)
    intra_node = fit_within(table, sheet)
    fold = folds(table, ("hidden_size", "num_experts", "num_topk"))
    error = held_out(table, fold, lambda rest: fit_within(rest, sheet), errors)
    tokens = between(
        table["tokens"],
        {
            "512 to 2,048 tokens": (512, 2049),
            "2,049 to 16,384 tokens": (2049, 16385),
            "16,385 tokens and more": (16385, np.inf),
        },
    )
    phases = {phase: table["phase"] == phase for phase in _ROW_BYTES}
    figures = {
        "exchange in a node": {
            **figure(error), "by": by_regime(error, {**phases, **tokens}),
            "outside": {"fewer than 512 tokens": figure(errors(intra_node, small))},
        }
    }  # fmt: skip
    nodes = load(folder, sheet, RELEASE_OF_NODES)
    if not nodes:
        return intra_node, figures
    nodes = take(nodes, (nodes["tokens"] >= LEAST_TOKENS) & (nodes["nodes"] > 1))
    kernel, figures["exchange between nodes"] = _between_nodes(nodes, intra_node)
    return kernel, figures


def _between_nodes(table: Table, intra_node: ExchangeCost) -> tuple[ExchangeCost, Figures]:
    def of_nodes(*counts: int) -> Table:
        return take(table, np.isin(table["nodes"], counts))

    fit_rows, left_out = of_nodes(2, 4), of_nodes(8)
    kernel = fit_across(fit_rows, intra_node)
    fit: Callable[[Table], ExchangeCost] = lambda rest: fit_across(rest, intra_node)  # noqa: E731
    error = held_out(fit_rows, folds(fit_rows, ("tokens",)), fit, errors)
    regimes = {
        f"{count} nodes, {phase}": (fit_rows["nodes"] == count) & (fit_rows["phase"] == phase)
        for count in (2, 4)
        for phase in _ROW_BYTES
    }
    eight_nodes = fit_across(left_out, intra_node)
    # One number of nodes does not determine all constants. On 4 nodes lines are the limit, so forwarding is taken to be
    # free; on 2 nodes they are not, so lines get the adapter's rate.
    of_two = fit_across(of_nodes(4), intra_node, forward_bytes_per_s=1e15)
    of_four = fit_across(of_nodes(2), intra_node, line_bytes_per_s=_ADAPTER)
    return kernel, {
        **figure(error),
        "by": by_regime(error, regimes),
        "outside": {
            "2 nodes, by constants of 4": figure(errors(of_two, of_nodes(2))),
            "4 nodes, by constants of 2": figure(errors(of_four, of_nodes(4))),
            "8 nodes, left out": figure(errors(kernel, left_out)),
        },
        "line_bytes_per_s_of_8_nodes_alone": float(f"{eight_nodes.line_bytes_per_s:.3g}"),
    }
