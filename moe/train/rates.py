"""What a device and its links reach, measured in a few seconds: a `Calibration` for the planner."""

import multiprocessing
import os
import platform
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from moe.experts.choice import processor
from moe.models import BatchContext, build_model
from moe.parallel import Layout
from moe.plan import Calibration
from moe.plan.calibration import read_calibration, write_calibration
from moe.spec import TranslationModelSpec, presets
from moe.train.loss import smoothed_nll

_WIDE, _ROWS, _FEW_ROWS = 512, 512, 16
_LAYERS = 4
_ROUNDS, _MOMENT_S = 3, 0.1


def calibrated(cache: Path, *, again: bool = False) -> Calibration:
    """What was measured of this machine's CPU with these versions; measured now where it was not, and stored."""
    found = read_calibration(cache)
    if found is not None and found.machine == machine() and not again:
        return found
    found = measure_cpu()
    write_calibration(cache, found)
    return found


def machine() -> str:
    """Processor, cores, and the versions that decide how fast they are."""
    return f"{processor()}, {os.cpu_count()} cores, torch {torch.__version__}, Python {platform.python_version()}"


def measure_cpu() -> Calibration:
    """Rates of one core while another one is busy too, and of gloo between two processes of this machine."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(2, spawn) as workers:
        ranks = [workers.submit(_measure, rank, f"{folder}/rendezvous") for rank in range(2)]
        found, *_ = [rank.result() for rank in ranks]
    return found


def _measure(rank: int, rendezvous: str) -> Calibration:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    try:
        x, w = torch.randn(_ROWS, _WIDE), torch.randn(_WIDE, _WIDE)
        narrow_x, narrow_w = x.bfloat16(), w.bfloat16()
        experts = torch.randn(8, 64, 128), torch.randn(8, 128, 512)
        a, b = torch.ones(1 << 24), torch.ones(1 << 24)
        heads = torch.randn(8, 4, 128, 32)
        seconds = _in_quiet_moments(
            {
                "product": lambda: x @ w,
                "few_rows": lambda: x[:_FEW_ROWS] @ w,
                "narrow": lambda: narrow_x @ narrow_w,
                "experts": lambda: torch.bmm(*experts),
                "add": lambda: a.add_(b),
                "attention": lambda: functional.scaled_dot_product_attention(heads, heads, heads),
                "layers": _little_step(),
            }
        )
        flops = 2 * x.numel() * _WIDE
        rate = flops / seconds["product"]
        latency_s, bytes_per_s = _links()
        return Calibration(
            machine=machine(),
            flops_per_s={"float32": rate, "bfloat16": flops / seconds["narrow"], "float64": rate / 2},
            memory_bytes_per_s=3 * a.nbytes / seconds["add"],
            half_rows=_half_rows(seconds["few_rows"], _FEW_ROWS, 2 * _FEW_ROWS * _WIDE**2, rate),
            expert_half_rows=_half_rows(seconds["experts"], 64, 2 * 8 * 64 * 128 * 512, rate),
            attention_flops_per_s=2 * 2 * heads.numel() * 128 / seconds["attention"],
            layer_s=seconds["layers"] / _LAYERS,
            within_node_bytes_per_s=bytes_per_s,
            latency_s=latency_s,
            cores=os.cpu_count() or 1,
        )
    finally:
        dist.barrier()
        dist.destroy_process_group()


def _in_quiet_moments(works: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds of each, the least of the medians of some moments, in turns: what others take of the machine for a while
    is left out."""
    rounds = [{name: _seconds(work) for name, work in works.items()} for _ in range(_ROUNDS)]
    return {name: min(each[name] for each in rounds) for name in works}


def _seconds(work: Callable[[], object]) -> float:
    """The median of what `work` takes, within a moment."""
    work()
    taken: list[float] = []
    began = time.perf_counter()
    while time.perf_counter() - began < _MOMENT_S or len(taken) < 3:
        at = time.perf_counter()
        work()
        taken.append(time.perf_counter() - at)
    return sorted(taken)[len(taken) // 2]


def _half_rows(seconds: float, rows: int, flops: float, rate: float) -> float:
    """From seconds = flops / rate · (rows + half_rows) / rows."""
    return max(0.0, rows * (seconds * rate / flops - 1))


def _links() -> tuple[float, float]:
    """(seconds that a small exchange takes of ranks that were busy before it, bytes a second of large collectives)."""
    small, large = torch.ones(256), torch.ones(1 << 22)
    x, w = torch.randn(_ROWS, _WIDE), torch.randn(_WIDE, _WIDE)

    def exchange(rows: Tensor) -> None:
        dist.all_to_all_single(torch.empty_like(rows), rows)

    def busy() -> None:
        x @ w
        exchange(small)

    for warm_up in (busy, lambda: exchange(large), lambda: dist.all_reduce(large)):
        warm_up()
    waits, exchanges, sums = [], [], []
    for _ in range(5):
        waits.append(_same_number(busy, 40) - _same_number(lambda: x @ w, 40))
        exchanges.append(_same_number(lambda: exchange(large), 3))
        sums.append(_same_number(lambda: dist.all_reduce(large), 3))
    # Of two ranks each sends half of what it exchanges, and as much as it has of what is summed.
    return max(1e-6, sorted(waits)[2]), 1.5 * large.nbytes / (min(exchanges) + min(sums))


def _same_number(work: Callable[[], object], times: int) -> float:
    """The mean of as many calls on every rank."""
    began = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - began) / times


def _little_step() -> Callable[[], None]:
    """Of the demo's model, forward and backward, with next to no work."""
    model = presets.load("gshard-tiny")
    assert isinstance(model, TranslationModelSpec)
    built = build_model(model, Layout.single())
    tokens = torch.randint(5, 300, (4, 4))

    def step() -> None:
        hidden = built.hidden(tokens, tokens, BatchContext(rows_per_group=4), [])
        smoothed_nll(hidden, built.output_embedding, tokens, 0.0)[0].backward()

    return step
