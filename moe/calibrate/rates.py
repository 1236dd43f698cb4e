"""Calibration: compute, memory and link rates of devices, measured in a few seconds for the planner."""

import multiprocessing
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from moe.experts.measurement import processor
from moe.interface import LOOPBACK, listen_on
from moe.parallel import Layout
from moe.parallel.accelerator import accelerator
from moe.plan import Calibration
from moe.plan.cluster.calibration import read_calibration, write_calibration
from moe.spec import JobSpec
from moe.tasks.build import build_task
from moe.train.environment import children_keep_freed_memory


@dataclass(frozen=True)
class _Sizes:
    """Benchmark sizes: large enough to reach full speed, small enough to run quickly."""

    wide: int
    """Both dims of a weight matrix."""
    rows: int
    few_rows: int
    expert_rows: int
    add: int
    """Elements of a memory-bound addition."""
    heads: tuple[int, int, int, int]
    """[batch, heads, positions, head dim]"""
    exchanged: int
    """Elements of a large collective."""

    @property
    def product_flops(self) -> int:
        return 2 * self.rows * self.wide**2


_SIZES = {
    "cpu": _Sizes(512, 512, 16, 64, 1 << 24, (24, 4, 20, 32), 1 << 22),
    "cuda": _Sizes(4096, 8192, 256, 256, 1 << 28, (8, 16, 2048, 128), 1 << 26),
}
_EXPERTS = 8
_LAYERS = 4
_SMALL_JOB = {"model": {"preset": "gshard-tiny"}, "data": {"corpus": "catalogs"}, "train": {"num_steps": 1}}
"""Job with the demo model; its data is never read."""
_ROUNDS, _MOMENT_S = 3, 0.08


def load_or_measure(cache: Path, *, refresh: bool = False) -> Calibration:
    """Stored calibration of this machine's CPU with these versions; measured, and stored, if missing."""
    calibration = read_calibration(cache)
    if calibration is not None and calibration.machine == machine() and not refresh:
        return calibration
    calibration = measure_cpu()
    write_calibration(cache, calibration)
    return calibration


def machine(device: str = "cpu") -> str:
    """Processor and core count, or GPU name, with the versions that affect speed."""
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    if (name := accelerator(device).name) is not None:
        return f"{name}, {versions}"
    return f"{processor()}, {os.cpu_count()} cores, {versions}"


def measure_cpu() -> Calibration:
    """Measure one core while another is also busy, and gloo between two processes of this machine."""
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        children_keep_freed_memory(),
        ProcessPoolExecutor(2, spawn) as workers,
    ):
        ranks = [workers.submit(_measure_rank, rank, f"{folder}/rendezvous") for rank in range(2)]
        calibration, *_ = [rank.result() for rank in ranks]
    return calibration


def _measure_rank(rank: int, rendezvous: str) -> Calibration:
    torch.set_num_threads(1)
    listen_on(LOOPBACK)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    try:
        return measure("cpu", (0, 0))
    finally:
        dist.destroy_process_group()


def measure(device: str, nodes: Sequence[int]) -> Calibration:
    """Measure the rates of each device while the others are also busy, and of the links between them. Collective.

    `nodes[r]` is the node number of rank r; rank 0's results are used. Links are measured between pairs, all at the
    same time: the first two ranks of each node, and ranks of equal position in the first two nodes. GPU latencies keep
    their defaults, since a small exchange between two ranks measures mostly launch overhead.
    """
    calibration = _arithmetic(device)
    by_node = [[rank for rank, rank_node in enumerate(nodes) if rank_node == node] for node in dict.fromkeys(nodes)]
    intra_node_pairs = [ranks[:2] for ranks in by_node if len(ranks) > 1]
    inter_node_pairs = [list(pair) for pair in zip(*by_node[:2], strict=False)] if len(by_node) > 1 else []
    for pairs, latency, rate in (
        (intra_node_pairs, "latency_s", "within_node_bytes_per_s"),
        (inter_node_pairs, "across_latency_s", "across_nodes_bytes_per_s"),
    ):
        groups = {
            rank: group
            for pair in pairs
            for group in [dist.new_group(pair, backend=accelerator(device).collectives)]
            for rank in pair
        }
        if (process_group := groups.get(dist.get_rank() if groups else -1)) is not None:
            latency_s, bytes_per_s = _links(device, process_group)
            link_rates = (
                {rate: bytes_per_s} if accelerator(device).runs_ahead else {rate: bytes_per_s, latency: latency_s}
            )
            calibration = calibration.model_copy(update=link_rates)
        if groups:
            dist.barrier()
    return calibration


def _arithmetic(device: str) -> Calibration:
    kind, native_dtype = accelerator(device).kind, accelerator(device).matrix_dtype
    sizes, target = _SIZES[kind], torch.device(device)
    other_dtype = torch.float32 if native_dtype == torch.bfloat16 else torch.bfloat16
    x = torch.randn(sizes.rows, sizes.wide, device=target, dtype=native_dtype)
    w = torch.randn(sizes.wide, sizes.wide, device=target, dtype=native_dtype)
    other_x, other_w = (tensor.to(other_dtype) for tensor in (x, w))
    experts = (
        torch.randn(_EXPERTS, sizes.expert_rows, sizes.wide // 4, device=target, dtype=native_dtype),
        torch.randn(_EXPERTS, sizes.wide // 4, sizes.wide, device=target, dtype=native_dtype),
    )
    a, b = torch.ones(sizes.add, device=target), torch.ones(sizes.add, device=target)
    heads = torch.randn(sizes.heads, device=target, dtype=native_dtype)
    seconds = _best_seconds(
        device,
        {
            "product": lambda: x @ w,
            "other_dtype": lambda: other_x @ other_w,
            "few_rows": lambda: x[: sizes.few_rows] @ w,
            "experts": lambda: torch.bmm(*experts),
            "add": lambda: a.add_(b),
            "attention": lambda: functional.scaled_dot_product_attention(heads, heads, heads),
            "layers": _small_step(target),
        },
    )
    rate, other_rate = (sizes.product_flops / seconds[name] for name in ("product", "other_dtype"))
    batch, num_heads, positions, width = sizes.heads
    expert_flops = 2 * sizes.expert_rows * sizes.wide**2 // 4
    by_dtype = {native_dtype: rate, other_dtype: other_rate}
    return Calibration(
        machine=machine(device),
        device=kind,
        flops_per_s={
            "float32": by_dtype[torch.float32],
            "bfloat16": by_dtype[torch.bfloat16],
            **({"float64": rate / 2} if kind == "cpu" else {}),
        },
        memory_bytes_per_s=3 * a.nbytes / seconds["add"],
        half_rows=_half_rows(seconds["few_rows"], sizes.few_rows, 2 * sizes.few_rows * sizes.wide**2, rate),
        expert_half_rows=_half_rows(seconds["experts"], sizes.expert_rows, _EXPERTS * expert_flops, rate),
        attention_flops_per_s=2 * 2 * batch * num_heads * positions**2 * width / seconds["attention"],
        layer_s=seconds["layers"] / _LAYERS,
        cores=(os.cpu_count() or 1) if kind == "cpu" else None,
    )


def _best_seconds(device: str, calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds of each function: minimum over rounds of the median call, to exclude temporary load."""
    rounds = [{name: _seconds(device, call) for name, call in calls.items()} for _ in range(_ROUNDS)]
    return {name: min(seconds[name] for seconds in rounds) for name in calls}


def _seconds(device: str, call: Callable[[], object]) -> float:
    """Median seconds of `call` over several calls."""
    call()
    times_s: list[float] = []
    accelerator(device).synchronize()
    began = time.perf_counter()
    while time.perf_counter() - began < _MOMENT_S or len(times_s) < 3:
        start = time.perf_counter()
        call()
        accelerator(device).synchronize()
        times_s.append(time.perf_counter() - start)
    return sorted(times_s)[len(times_s) // 2]


def _half_rows(seconds: float, rows: int, flops: float, rate: float) -> float:
    """Solve seconds = flops / rate · (rows + half_rows) / rows for half_rows."""
    return max(0.0, rows * (seconds * rate / flops - 1))


def _links(device: str, pair: dist.ProcessGroup) -> tuple[float, float]:
    """(latency in seconds of a small all-to-all between busy ranks, bytes per second of large collectives)."""
    sizes, target = _SIZES[accelerator(device).kind], torch.device(device)
    small, large = torch.ones(256, device=target), torch.ones(sizes.exchanged, device=target)
    x = torch.randn(sizes.few_rows * 32, sizes.wide, device=target)
    w = torch.randn(sizes.wide, sizes.wide, device=target)

    def exchange(rows: Tensor) -> None:
        dist.all_to_all_single(torch.empty_like(rows), rows, group=pair)

    def busy() -> None:
        x @ w
        exchange(small)

    for warm_up in (busy, lambda: exchange(large), lambda: dist.all_reduce(large, group=pair)):
        warm_up()
    waits, exchanges, sums = [], [], []
    for _ in range(5):
        waits.append(_mean_seconds(device, busy, 25) - _mean_seconds(device, lambda: x @ w, 25))
        exchanges.append(_mean_seconds(device, lambda: exchange(large), 3))
        sums.append(_mean_seconds(device, lambda: dist.all_reduce(large, group=pair), 3))
    # Each of two ranks sends half of its all-to-all buffer, and its whole buffer in the all-reduce.
    return max(1e-6, sorted(waits)[2]), 1.5 * large.nbytes / (min(exchanges) + min(sums))


def _mean_seconds(device: str, call: Callable[[], object], times: int) -> float:
    """Mean seconds over `times` calls, the same number on every rank."""
    accelerator(device).synchronize()
    began = time.perf_counter()
    for _ in range(times):
        call()
    accelerator(device).synchronize()
    return (time.perf_counter() - began) / times


def _small_step(device: torch.device) -> Callable[[], None]:
    """Forward and backward pass of the demo model on a minimal batch."""
    task, layout = build_task(JobSpec.parse(_SMALL_JOB)), Layout.single(device)
    model, micro_batch = task.build_model(layout), task.dummy_batch(4, 4, layout)
    return lambda: task.loss(model, micro_batch).objective.backward()
