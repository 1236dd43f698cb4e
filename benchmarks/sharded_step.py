"""A step of the demo's model as a program of `moe.sharding`, compared with the engine's hand-written layout of the same
plan on two gloo ranks, and with the plain module on one rank; the sides take turns in one run.

A step is the forward pass, loss, backward pass, gradient reduction and update; on both sides every rank has the loss of
the whole batch, as in the service's steps. On two ranks experts and batch are split, and everything else is replicated.
Limits: 1.05 times the reference's seconds, and 1.05 times the bytes that its collectives send. Seconds are those of the
slower rank, and the ratio is the median over turns. Processor seconds are those of all ranks; other load on the machine
affects them less. Memory is measured in processes that only take steps. All processes keep freed memory, as the
service's workers do.
"""

import ctypes
import gc
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import results
from benchmarks.training import EXAMPLE
from benchmarks.translation_loss import TranslationLoss
from moe import sharding
from moe.parallel import Layout, discard_gradients, reduce_gradients
from moe.plan import Cluster, plan_job
from moe.routing import BatchCounts
from moe.spec import AdamWSpec, JobSpec, ParallelSpec, ResourcesSpec, TranslationModelSpec, read_job
from moe.storage.folder import Folder
from moe.tasks.batch_context import BatchContext
from moe.tasks.build import build_task
from moe.tasks.translation import build_model
from moe.tasks.translation.batches import PairsBatch
from moe.train import expert_costs
from moe.train.environment import KEEP_FREED_MEMORY
from moe.train.train_state import TrainState

RANKS = 2
ROUNDS, STEPS_A_TURN, WARM_UP = 60, 4, 3
LENGTH = 32
"""Tokens of a row on each side: the mean in the demo's batches."""
LIMIT = 1.05
REFERENCES = {"engine": RANKS, "plain": 1}
"""Sides that a step is compared with, and their number of ranks."""

Step = Callable[[], float]
"""Takes a step and returns its loss."""


def job(num_workers: int) -> JobSpec:
    changes = {"resources": ResourcesSpec(num_workers=num_workers), "parallel": ParallelSpec(expert=num_workers)}
    return read_job(EXAMPLE).model_copy(update=changes)


def cluster_of(num_workers: int) -> Cluster:
    return Cluster(num_nodes=1, devices_per_node=num_workers, device="cpu", memory_bytes=8 << 30)


def batch(spec: JobSpec) -> tuple[Tensor, ...]:
    """A global batch of random rows: `source`, `target_in`, `target_out`, the step."""
    assert isinstance(spec.model, TranslationModelSpec)
    generator = torch.Generator().manual_seed(1)
    shape = (spec.train.batch_tokens // (2 * LENGTH), LENGTH)
    rows = [torch.randint(5, spec.model.target_vocab_size, shape, generator=generator) for _ in range(3)]
    return (*rows, torch.tensor(1))


def by_engine(spec: JobSpec, cache: Path) -> Step:
    """Steps as in `moe.train.step`, without measurements and clipping."""
    plan = plan_job(spec, cluster_of(spec.resources.max_num_workers))
    layout, task = Layout.build(plan), build_task(spec)
    state = TrainState.build(task, layout)
    state.shard_masters()
    layers = state.moe_layers.local_layers.values()
    expert_costs.decide(layers, layout.device, state.dtype, Folder(str(cache)), cache / "experts")
    source, target_in, target_out, step = batch(spec)
    num_groups = spec.num_groups
    rows_per_group = source.shape[0] // num_groups
    counts = BatchCounts(num_groups, source.shape[0], source.numel())
    local_groups = layout.local_groups(num_groups)
    part = slice(local_groups.start * rows_per_group, local_groups.stop * rows_per_group)
    context = BatchContext(int(step), spec.train.seed, True, part.start, rows_per_group, counts, counts)
    pairs_batch = PairsBatch(source[part], target_in[part], target_out[part], context)

    def take() -> float:
        discard_gradients(state.parameters)
        loss = task.loss(state.model, pairs_batch).objective / source.numel()
        loss.backward()
        reduce_gradients(state.parameters, layout)
        state.optimizer.step()
        return total(float(loss.detach()))

    return take


def plain(spec: JobSpec) -> TranslationLoss:
    assert isinstance(spec.model, TranslationModelSpec)
    return TranslationLoss(build_model(spec.model, seed=spec.train.seed), spec.label_smoothing, spec.train.seed)


def training_step(module: torch.nn.Module, spec: JobSpec) -> Step:
    """Step of a module as a user writes it."""
    adamw, pairs_batch = spec.train.optimizer, batch(spec)
    assert isinstance(adamw, AdamWSpec)
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=adamw.peak_lr, betas=(adamw.beta1, adamw.beta2), eps=adamw.eps,
        weight_decay=adamw.weight_decay, fused=True,
    )  # fmt: skip

    def take() -> float:
        optimizer.zero_grad()
        loss = module(*pairs_batch)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return take


def by_plan(spec: JobSpec) -> tuple[Step, sharding.Applied]:
    pairs_batch, module = batch(spec), plain(spec)
    num_workers = spec.resources.max_num_workers
    hints = {} if num_workers == 1 else as_engine(module)
    plan = sharding.plan(module, pairs_batch, quick_links(num_workers), hints, mesh={"expert": num_workers})
    applied = sharding.apply(module, plan, sample=pairs_batch)
    return training_step(applied, spec), applied


def as_engine(module: TranslationLoss) -> dict[str, sharding.Split | sharding.Replicate]:
    """Hints for the engine's plan."""
    whole_or_split = {
        name: sharding.Split(0) if ".experts." in name else sharding.Replicate()
        for name, _ in module.named_parameters()
    }
    return {"inputs": sharding.Split(0), **whole_or_split}


def quick_links(num_workers: int) -> Cluster:
    """Links without latency, so that only hints decide: with the latency between processes it would be faster to
    replicate so small a batch."""
    link = {"devices": num_workers, "bytes_per_s": 4e8, "latency_s": 0.0}
    return Cluster.model_validate({**cluster_of(num_workers).model_dump(), "links": [link]})


class Sent(TorchDispatchMode):
    """Bytes that this rank sends to others in the block, by kind of collective."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: dict[str, int] = {}
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and (kind := _KINDS.get(func._opname)) is not None:
            name, position, share = kind
            tensors = pytree.tree_leaves(args[position])
            num_bytes = share * sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))
            if name == "all-to-all" and (splits := args[4]):
                (rows,) = tensors
                num_bytes = (rows.shape[0] - splits[dist.get_rank()]) * rows[:1].nbytes
            self.num_bytes[name] = self.num_bytes.get(name, 0) + int(num_bytes)
            self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


_SHARE = (RANKS - 1) / RANKS
_KINDS = {
    "allreduce_": ("all-reduce", 0, 2 * _SHARE),
    "_allgather_base_": ("all-gather", 1, RANKS - 1),
    "_reduce_scatter_base_": ("reduce-scatter", 1, _SHARE),
    "alltoall_base_": ("all-to-all", 1, _SHARE),
}
"""Collectives of torch: (name, index of the argument with the data, share of it sent to other ranks)."""


def traffic_of(step: Step) -> dict[str, Any]:
    with Sent() as counter:
        step()
    return {"bytes": sum(counter.num_bytes.values()), "by_kind": counter.num_bytes, "calls": counter.calls}


def turns(steps: dict[str, Step]) -> dict[str, Any]:
    """Milliseconds of a step of each side in turns: of the slower rank, and processor time of all ranks."""
    clock: dict[str, list[float]] = {name: [] for name in steps}
    processor: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    gc.collect()
    for turn in range(ROUNDS):
        for name in names[:: 1 if turn % 2 else -1]:
            clock_ms, processor_ms = time_steps(steps[name])
            clock[name].append(slowest(clock_ms))
            processor[name].append(total(processor_ms))
    reference, contender = names
    return {
        **{
            name: {
                "median_ms": round(statistics.median(clock[name]), 3),
                "quartiles_ms": [round(cut, 3) for cut in statistics.quantiles(clock[name], n=4)[::2]],
                "least_ms": round(min(clock[name]), 3),
                "processor_ms": round(statistics.median(processor[name]), 3),
            }
            for name in names
        },
        "ratio": ratio(clock[contender], clock[reference]),
        "ratio_of_processor": ratio(processor[contender], processor[reference]),
        "limit": LIMIT,
    }


def ratio(values: list[float], references: list[float]) -> float:
    return round(statistics.median(value / reference for value, reference in zip(values, references, strict=True)), 4)


def time_steps(step: Step) -> tuple[float, float]:
    if dist.is_initialized():
        dist.barrier()
    began, processor_start = time.perf_counter(), time.process_time()
    for _ in range(STEPS_A_TURN):
        step()
    return tuple(
        1e3 * (end - begin) / STEPS_A_TURN
        for end, begin in ((time.perf_counter(), began), (time.process_time(), processor_start))
    )  # type: ignore[return-value]


def slowest(value: float) -> float:
    return over_ranks(value, dist.ReduceOp.MAX)


def total(value: float) -> float:
    return over_ranks(value, dist.ReduceOp.SUM)


def over_ranks(value: float, operation: dist.ReduceOp.RedOpType) -> float:
    tensor = torch.tensor(value, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(tensor, operation)
    return float(tensor)


def on_two(rank: int, folder: str, answer: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    spec = job(RANKS)
    plan_step, applied = by_plan(spec)
    steps = {"engine": by_engine(spec, Path(folder)), "sharding": plan_step}
    losses = {name: [step() for _ in range(WARM_UP)] for name, step in steps.items()}
    figures = {"losses": losses, **turns(steps), "sent": {name: traffic_of(step) for name, step in steps.items()}}
    if rank == 0:
        answer.send(figures)
    dist.barrier()
    sharding.close(applied)
    dist.destroy_process_group()


def on_one(rank: int, folder: str, answer: Connection) -> None:
    torch.set_num_threads(1)
    spec = job(1)
    steps = {"plain": training_step(plain(spec), spec), "sharding": by_plan(spec)[0]}
    losses = {name: [step() for _ in range(WARM_UP)] for name, step in steps.items()}
    answer.send({"losses": losses, **turns(steps)})


def memory(side: str, rank: int, ranks: int, folder: str) -> dict[str, float]:
    """Resident MiB of a rank before its steps, and the peak during them."""
    torch.set_num_threads(1)
    spec = job(ranks)
    if ranks > 1:
        dist.init_process_group("gloo", f"file://{folder}/{side}", rank=rank, world_size=ranks)
    match side:
        case "engine":
            step = by_engine(spec, Path(folder) / str(rank))
        case "plain":
            step = training_step(plain(spec), spec)
        case _:
            step = by_plan(spec)[0]
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # memory freed after planning
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    for _ in range(WARM_UP + STEPS_A_TURN):
        step()
    return {"before_mib": before, "peak_mib": resident("VmHWM")}


def resident(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return round(int(line.split()[1]) / 1024, 1)


def memories(ranks: int, sides: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """Memory of the rank with the higher peak, by side."""
    peak_by_side = {}
    for side in sides:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "benchmarks.sharded_step", side]
            processes = [
                subprocess.Popen([*command, str(rank), str(ranks), folder], stdout=subprocess.PIPE, text=True)
                for rank in range(ranks)
            ]
            rank_memories = [json.loads(process.communicate()[0]) for process in processes]
        peak_by_side[side] = max(rank_memories, key=lambda memory: memory["peak_mib"])
    return peak_by_side


def run_ranks(work: Callable[[int, str, Connection], None], ranks: int, folder: str) -> dict[str, Any]:
    """Run `work` in all ranks and return what rank 0 sends."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    processes = [context.Process(target=work, args=(rank, folder, sender)) for rank in range(ranks)]
    for process in processes:
        process.start()
    sender.close()  # so that recv ends when the ranks do
    answer: dict[str, Any] = receiver.recv()
    for process in processes:
        process.join()
    return answer


def measure(ranks: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        figures = run_ranks(on_two if ranks == RANKS else on_one, ranks, folder)
    if "sent" in figures:
        num_bytes = {name: sent_bytes["bytes"] for name, sent_bytes in figures["sent"].items()}
        figures["ratio_of_bytes"] = round(num_bytes["sharding"] / num_bytes["engine"], 4)
    return figures


def show(ranks: int, reference: str, figures: dict[str, Any]) -> None:
    for name in (reference, "sharding"):
        side, peak = figures[name], figures["memory"][name]
        print(f"{ranks} rank(s), {name:<9}{side['median_ms']:9.2f} ms, processor {side['processor_ms']:9.2f} ms, "
              f"{peak['before_mib']:.0f} MiB before steps, {peak['peak_mib']:.0f} MiB at most")  # fmt: skip
    print(f"{ranks} rank(s): {figures['ratio']:.3f} times {reference}, of processor time "
          f"{figures['ratio_of_processor']:.3f} (limit {LIMIT})")  # fmt: skip
    if "sent" in figures:
        sent_by = {name: sent_bytes["bytes"] for name, sent_bytes in figures["sent"].items()}
        print(f"bytes that a rank sends in a step: {sent_by['sharding']:,} for {sent_by['engine']:,}, "
              f"{figures['ratio_of_bytes']:.3f} times (limit {LIMIT})")  # fmt: skip


def main() -> None:
    if len(sys.argv) > 1:
        side, rank, num_ranks, folder = sys.argv[1:]
        print(json.dumps(memory(side, int(rank), int(num_ranks), folder)))
        return
    os.environ |= {"OMP_NUM_THREADS": "1", **KEEP_FREED_MEMORY}
    figures = {}
    for reference, ranks in REFERENCES.items():
        side_figures = measure(ranks)
        losses = side_figures["losses"]
        assert all(
            abs(reference_loss / loss - 1) < 1e-3
            for reference_loss, loss in zip(losses[reference], losses["sharding"], strict=True)
        ), losses
        side_figures["memory"] = memories(ranks, (reference, "sharding"))
        figures[f"{ranks}_ranks"] = side_figures
        show(ranks, reference, side_figures)
    print(f"written to {results.write('sharded_step', figures)}")


if __name__ == "__main__":
    main()
