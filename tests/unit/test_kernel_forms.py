"""Constants of kernels: the laws behind the search's bounds, and agreement of the fitted forms with the planner's."""

import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import device_constants
from benchmarks.kernels import attention, collectives, exchange, experts, page, products
from benchmarks.kernels.constants import render_json
from moe.plan.cluster.kernels import (
    CollectiveCost,
    ExchangeCost,
    FusedAttention,
    GroupedExperts,
    Kernels,
    MatrixProducts,
)
from moe.plan.cluster.measured import MEASURED, PATH

ROOT = Path(__file__).parents[2]
ROUNDING = 1e-12


def kernels_of(kernels: Kernels) -> Iterator[Any]:
    yield from kernels.products.values()
    yield from kernels.experts.values()
    yield from kernels.attention.values()
    yield from (kernels.ring, kernels.all_to_all)
    if kernels.exchange is not None:
        yield kernels.exchange


def sizes(kernel: Any, draw: Callable[[float, float], float]) -> dict[str, float]:
    """Arguments of the kernel's `seconds`; `draw` gives a whole number between two."""
    match kernel:
        case MatrixProducts():
            return {"rows": draw(1, 1e6), "inputs": draw(1, 3e4), "outputs": draw(1, 3e5)}
        case GroupedExperts():
            return {"rows": draw(1, 1e6), "tokens": draw(1, 2e5), "experts": draw(1, 512), "width": draw(64, 2e4),
                    "hidden_dim": draw(16, 3e4), "num_matrices": draw(2, 3)}  # fmt: skip
        case FusedAttention():
            key_heads, window = draw(1, 16), draw(0, 1e4)
            return {
                "rows": draw(1, 1e6), "length": draw(1, 1e5), "heads": key_heads * draw(1, 8),
                "key_heads": key_heads, "widths": draw(64, 1024), "window": window,
            }  # fmt: skip
        case CollectiveCost():
            return {"size": draw(1, 1e10), "ranks": draw(2, 128)}
        case ExchangeCost():
            nodes = draw(1, 64)
            return {
                "tokens": draw(1, 2e5), "row_bytes": draw(256, 3e4), "copies": draw(1, 8),
                "other_nodes": draw(1, 8) if nodes > 1 else 0.0, "nodes": nodes, "ranks": draw(2, 72),
            }  # fmt: skip
    raise AssertionError(kernel)


VECTORISED: dict[type, Callable[..., Any]] = {
    MatrixProducts: products.seconds,
    GroupedExperts: experts.seconds,
    FusedAttention: attention.seconds,
    ExchangeCost: exchange.seconds,
    CollectiveCost: lambda cost, size, ranks: collectives.seconds(cost, size, ranks, np.ones(len(size))),
}


@pytest.mark.parametrize("device", MEASURED)
def test_fitted_forms_are_those_of_the_planner(device: str) -> None:
    draw = log_uniform(np.random.default_rng(0).uniform)
    for kernel in kernels_of(MEASURED[device]):
        draws = [sizes(kernel, draw) for _ in range(100)]
        columns = {name: np.array([arguments[name] for arguments in draws]) for name in draws[0]}
        at_once = VECTORISED[type(kernel)](kernel, **columns)
        one_by_one = [kernel.seconds(**call_arguments(arguments)) for arguments in draws]
        np.testing.assert_allclose(at_once, one_by_one, rtol=1e-12, err_msg=repr(kernel))


def log_uniform(uniform: Callable[[float, float], float]) -> Callable[[float, float], float]:
    """Whole numbers between two, with evenly spread logarithms."""
    return lambda low, high: float(math.floor(math.exp(uniform(math.log(max(low, 0.5)), math.log(high + 1)))))


def call_arguments(arguments: dict[str, float]) -> dict[str, Any]:
    """Counts as whole numbers, and no window where it is 0."""
    result: dict[str, Any] = dict(arguments)
    for name in {"ranks", "nodes", "num_matrices"} & result.keys():
        result[name] = int(result[name])
    if "window" in result:
        result["window"] = result["window"] or None
    return result


@pytest.mark.parametrize("device", MEASURED)
def test_an_all_reduce_is_a_scatter_and_a_gather_of_one_launch(device: str) -> None:
    ring = MEASURED[device].ring
    for size, ranks in ((1e3, 2), (1e6, 4), (1e9, 8)):
        transfer_s = size * (ranks - 1) / ranks / ring.bytes_per_s
        apart = ring.startup_s(size) + 2 * (ring.latency_s(ranks) + transfer_s) + size / ranks / ring.own_bytes_per_s
        total = collectives.seconds(ring, np.array([size]), np.array([float(ranks)]), np.array([2.0]))
        assert total == pytest.approx(apart)


OF_ROWS = ("rows", "tokens", "size")
"""What is cut into micro-batches."""


@pytest.mark.parametrize("device", MEASURED)
@given(data=st.data())
def test_nothing_is_faster_for_being_larger_and_no_row_slower(device: str, data: st.DataObject) -> None:
    draws = data.draw(st.randoms(use_true_random=False))
    draw = log_uniform(draws.uniform)
    for kernel in kernels_of(MEASURED[device]):
        small = sizes(kernel, draw)
        took = kernel.seconds(**call_arguments(small))
        assert took > 0
        for name in small:
            large = {**small, name: math.ceil(small[name] * draws.choice((1.001, 1.5, 2, 8)))}
            if name == "window" and not small["window"]:
                continue  # there is no window to grow
            assert kernel.seconds(**call_arguments(large)) >= took * (1 - ROUNDING), (kernel, small, large)
        factor = draws.choice((1.001, 1.5, 2, 8))
        large = {name: value * factor if name in OF_ROWS else value for name, value in small.items()}
        assert kernel.seconds(**call_arguments(large)) <= factor * took * (1 + ROUNDING), (kernel, small, large)


@pytest.mark.parametrize("device", MEASURED)
def test_a_window_that_sees_everything_is_none(device: str) -> None:
    for kernel in MEASURED[device].attention.values():
        no_window, full_window, part = (kernel.seconds(8192, 4096, 32, 8, 256, window) for window in (None, 4096, 128))
        assert part < full_window == no_window


def test_constants_page_and_errors_are_those_of_the_record() -> None:
    """To change them, run `python -m benchmarks.device_constants`, or add `--render` to use the record as it is."""
    figures = device_constants.read_record()
    assert render_json(figures["constants"]) == PATH.read_text(encoding="utf-8")
    assert page.section(figures) in page.PAGE.read_text()
    for device, errors in figures["errors"].items():
        for kernel in figures["limits"].keys() & errors.keys():
            assert errors[kernel]["error"] <= figures["limits"][kernel], (device, kernel)


def test_tables_that_are_not_there_are_told_with_a_remedy(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.device_constants", "--data", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert run.returncode == 2
    assert f"--data (={tmp_path}) must be the folder that has a folder for each device" in run.stderr
    assert "Traceback" not in run.stderr
