"""A training step of a GPT (4 blocks of width 256, float32) on two gloo ranks: DDP and FSDP2 of torch, plans with the
hints for the same sharding, and the plan without hints, at rates measured on this machine. Contenders take turns; a
turn's time is that of the slower rank, and ratios are medians over turns. Limit: 1.05 times the peer, and for the plan
without hints 1.05 times the faster of both peers.

The addresses of its tensors make a step up to 4% slower or faster for as long as the processes live. Turns are
therefore spread over several launches, which build the contenders in different orders.
"""

import copy
import multiprocessing
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks import results
from moe import sharding
from moe.calibrate.rates import measure_cpu
from moe.plan import Calibration, Cluster
from moe.train.environment import KEEP_FREED_MEMORY

RANKS, LAUNCHES, ROUNDS, WARM_UP = 2, 10, 20, 3
NUM_BLOCKS, WIDTH, NUM_HEADS, VOCABULARY = 4, 256, 8, 1024
BATCH = (8, 128)
LIMIT = 1.05
PEERS = {"plan, hints as DDP": "DDP", "plan, hints as FSDP2": "FSDP2"}
AUTO = "plan without hints"

Step = Callable[[], float]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.hidden_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.hidden = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        heads = self.attention(self.attention_norm(x)).view(rows, length, 3, NUM_HEADS, WIDTH // NUM_HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        attention = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.hidden(self.hidden_norm(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(BATCH[1], WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def cluster_of(calibration: Calibration) -> Cluster:
    """Two ranks of this machine, at measured rates."""
    return Cluster(num_nodes=1, devices_per_node=RANKS, device="cpu", memory_bytes=8 << 30, calibration=calibration)


def training_step(module: nn.Module, batch: tuple[Tensor, ...]) -> Step:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)

    def step() -> float:
        optimizer.zero_grad()
        loss = module(*batch)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def contenders(rank: int, calibration: Calibration, launch: int) -> dict[str, Step]:
    """Training steps by name, built in an order that depends on the launch's number."""
    torch.manual_seed(0)
    model = GPT()
    batch = (torch.randint(0, VOCABULARY, BATCH), torch.randint(0, VOCABULARY, BATCH))
    rows = tuple(part.chunk(RANKS)[rank].contiguous() for part in batch)
    builders: dict[str, Callable[[], nn.Module]] = {
        "DDP": lambda: DistributedDataParallel(copy.deepcopy(model)),
        "FSDP2": lambda: fsdp_module(copy.deepcopy(model)),
        "plan, hints as DDP": lambda: plan_module({"*": sharding.Replicate(), "inputs": sharding.Split(0)}),
        "plan, hints as FSDP2": lambda: plan_module({"*": sharding.Split(0)}),
        AUTO: lambda: plan_module({}),
    }

    def plan_module(hints: dict[str, Any]) -> nn.Module:
        plan = sharding.plan(model, batch, cluster_of(calibration), hints, mesh={"data": RANKS})
        if rank == 0 and launch == 0:
            kinds = [f"{call.phase} {call.kind}" for call in plan.collectives if call.num_bytes > 8]
            counts = dict(Counter(kinds))
            print(f"hints {hints}: predicted {1e3 * plan.step_s:.1f} ms; {counts}", flush=True)
        return sharding.apply(model, plan, sample=batch)

    return {
        name: training_step(builders[name](), rows if name in PEERS.values() else batch)
        for name in rotation(list(builders), launch)
    }


def fsdp_module(model: GPT) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def rotation(names: list[str], number: int) -> list[str]:
    """The names rotated by a number of places, in reverse order if the number is odd."""
    start = number % len(names)
    return (names[start:] + names[:start])[:: -1 if number % 2 else 1]


def step_ms(step: Step) -> float:
    """Milliseconds of a step on the slower rank."""
    dist.barrier()
    start_s = time.perf_counter()
    step()
    duration_ms = torch.tensor(1e3 * (time.perf_counter() - start_s), dtype=torch.float64)
    dist.all_reduce(duration_ms, dist.ReduceOp.MAX)
    return float(duration_ms)


def run_rank(rank: int, rendezvous: str, calibration: Calibration, launch: int, sender: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=RANKS)
    steps = contenders(rank, calibration, launch)
    times_ms: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    names = list(steps)
    for turn in range(ROUNDS):
        for name in rotation(names, turn):
            times_ms[name].append(step_ms(steps[name]))
    if rank == 0:
        sender.send(times_ms)
    dist.barrier()
    dist.destroy_process_group()


def launch_times_ms(calibration: Calibration, launch: int) -> dict[str, list[float]]:
    """Milliseconds by contender and turn, measured in new processes."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        receiver, sender = context.Pipe(duplex=False)
        processes = [
            context.Process(target=run_rank, args=(rank, f"{folder}/rendezvous", calibration, launch, sender))
            for rank in range(RANKS)
        ]
        for process in processes:
            process.start()
        sender.close()  # so that recv ends when the ranks do
        times_ms: dict[str, list[float]] = receiver.recv()
        for process in processes:
            process.join()
    return times_ms


def median_ratio(times_ms: list[float], peer_times_ms: list[float]) -> float:
    ratios = (time_ms / peer_ms for time_ms, peer_ms in zip(times_ms, peer_times_ms, strict=True))
    return round(statistics.median(ratios), 4)


def main() -> None:
    os.environ |= {"OMP_NUM_THREADS": "1", **KEEP_FREED_MEMORY}
    calibration = measure_cpu()
    launches = [launch_times_ms(calibration, number) for number in range(LAUNCHES)]
    times_ms = {name: [time_ms for launch in launches for time_ms in launch[name]] for name in launches[0]}
    fastest_peer = min(PEERS.values(), key=lambda name: statistics.median(times_ms[name]))
    peers = PEERS | {AUTO: fastest_peer}
    ratios = {name: median_ratio(times_ms[name], times_ms[peer]) for name, peer in peers.items()}
    ratios_by_launch = {
        name: sorted(median_ratio(launch[name], launch[peer]) for launch in launches) for name, peer in peers.items()
    }
    for name, contender_ms in times_ms.items():
        comparison = ""
        if name in ratios:
            smallest, *_, largest = ratios_by_launch[name]
            comparison = f"{ratios[name]:.3f} times {peers[name]}, by launch {smallest:.3f} to {largest:.3f}"
        median_ms, least_ms = statistics.median(contender_ms), min(contender_ms)
        print(f"{name:22}{median_ms:9.2f} ms, at least {least_ms:8.2f}   {comparison}")
    figures = {
        "ranks": RANKS, "blocks": NUM_BLOCKS, "width": WIDTH, "batch": list(BATCH), "limit": LIMIT,
        "median_ms": {name: round(statistics.median(values), 2) for name, values in times_ms.items()},
        "least_ms": {name: round(min(values), 2) for name, values in times_ms.items()},
        "launches": LAUNCHES, "rounds": ROUNDS, "ratios": ratios, "ratios_by_launch": ratios_by_launch,
    }  # fmt: skip
    print(f"limit {LIMIT}; written to {results.write('sharded_peers', figures)}")


if __name__ == "__main__":
    main()
