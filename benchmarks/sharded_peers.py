"""A training step of a GPT (4 blocks of width 256, float32) on two gloo ranks: DDP and FSDP2 of torch beside plans with
the hints that say the same, and beside the plan without hints, at rates measured on this machine. Contenders take
turns; a turn's time is that of the slower rank, and ratios are medians over turns. Limit: 1.05 times the peer, and for
the plan without hints 1.05 times the faster of both peers.

Where its tensors happen to lie makes the same step up to 4% slower or faster for as long as its processes live. Turns
are therefore spread over several launches, which build the contenders in different orders.
"""

import copy
import multiprocessing
import os
import statistics
import tempfile
import time
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
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, WIDTH))
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
    return Cluster(
        num_nodes=1, devices_per_node=RANKS, device="cpu", memory_bytes=8 << 30, calibration=calibration
    )


def stepping(module: nn.Module, batch: tuple[Tensor, ...]) -> Step:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)

    def take() -> float:
        optimizer.zero_grad()
        loss = module(*batch)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return take


def contenders(rank: int, calibration: Calibration, launch: int) -> dict[str, Step]:
    """Training steps by name, built in an order that depends on the number of the launch."""
    torch.manual_seed(0)
    model = GPT()
    batch = (torch.randint(0, VOCABULARY, BATCH), torch.randint(0, VOCABULARY, BATCH))
    rows = tuple(part.chunk(RANKS)[rank].contiguous() for part in batch)
    fsdp = copy.deepcopy(model)
    for block in fsdp.blocks:
        fully_shard(block)
    builders: dict[str, Callable[[], nn.Module]] = {
        "DDP": lambda: DistributedDataParallel(copy.deepcopy(model)),
        "FSDP2": lambda: sharded_by_fsdp(copy.deepcopy(model)),
        "plan, hints as DDP": lambda: planned({"*": sharding.Replicate(), "inputs": sharding.Split(0)}),
        "plan, hints as FSDP2": lambda: planned({"*": sharding.Split(0)}),
        AUTO: lambda: planned({}),
    }

    def planned(hints: dict[str, Any]) -> nn.Module:
        plan = sharding.plan(model, batch, cluster_of(calibration), hints, mesh={"data": RANKS})
        if rank == 0 and launch == 0:
            kinds = [(each.phase, each.kind) for each in plan.collectives if each.num_bytes > 8]
            counts = {" ".join(kind): kinds.count(kind) for kind in dict.fromkeys(kinds)}
            print(f"hints {hints}: predicted {1e3 * plan.step_s:.1f} ms; {counts}", flush=True)
        return sharding.apply(model, plan, sample=batch)

    return {
        name: stepping(builders[name](), rows if name in PEERS.values() else batch)
        for name in rotated(list(builders), launch)
    }


def sharded_by_fsdp(model: GPT) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def rotated(names: list[str], number: int) -> list[str]:
    """The names from another one on, in reverse order where the number is odd."""
    start = number % len(names)
    return (names[start:] + names[:start])[:: -1 if number % 2 else 1]


def timed(step: Step) -> float:
    """Milliseconds on the slower rank."""
    dist.barrier()
    began = time.perf_counter()
    step()
    taken = torch.tensor(1e3 * (time.perf_counter() - began), dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def work(rank: int, rendezvous: str, calibration: Calibration, launch: int, answer: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=RANKS)
    steps = contenders(rank, calibration, launch)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    names = list(steps)
    for turn in range(ROUNDS):
        for name in rotated(names, turn):
            times[name].append(timed(steps[name]))
    if rank == 0:
        answer.send(times)
    dist.barrier()
    dist.destroy_process_group()


def launched(calibration: Calibration, launch: int) -> dict[str, list[float]]:
    """Milliseconds of each contender by turn, in new processes."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = context.Pipe(duplex=False)
        processes = [
            context.Process(target=work, args=(rank, f"{folder}/rendezvous", calibration, launch, theirs))
            for rank in range(RANKS)
        ]
        for process in processes:
            process.start()
        theirs.close()  # so that waiting ends with them
        times: dict[str, list[float]] = ours.recv()
        for process in processes:
            process.join()
    return times


def ratio(ours: list[float], others: list[float]) -> float:
    return round(statistics.median(one / other for one, other in zip(ours, others, strict=True)), 4)


def main() -> None:
    os.environ |= {"OMP_NUM_THREADS": "1", **KEEP_FREED_MEMORY}
    calibration = measure_cpu()
    launches = [launched(calibration, number) for number in range(LAUNCHES)]
    times = {name: [ms for launch in launches for ms in launch[name]] for name in launches[0]}
    best = min(PEERS.values(), key=lambda name: statistics.median(times[name]))
    peers = PEERS | {AUTO: best}
    ratios = {name: ratio(times[name], times[peer]) for name, peer in peers.items()}
    by_launch = {
        name: sorted(ratio(launch[name], launch[peer]) for launch in launches) for name, peer in peers.items()
    }
    for name, each in times.items():
        beside = ""
        if name in ratios:
            least, *_, most = by_launch[name]
            beside = f"{ratios[name]:.3f} times {peers[name]}, by launch {least:.3f} to {most:.3f}"
        print(f"{name:22}{statistics.median(each):9.2f} ms, at least {min(each):8.2f}   {beside}")
    figures = {
        "ranks": RANKS, "blocks": NUM_BLOCKS, "width": WIDTH, "batch": list(BATCH), "limit": LIMIT,
        "median_ms": {name: round(statistics.median(each), 2) for name, each in times.items()},
        "least_ms": {name: round(min(each), 2) for name, each in times.items()},
        "launches": LAUNCHES, "rounds": ROUNDS, "ratios": ratios, "ratios_by_launch": by_launch,
    }  # fmt: skip
    print(f"limit {LIMIT}; written to {results.write('sharded_peers', figures)}")


if __name__ == "__main__":
    main()
