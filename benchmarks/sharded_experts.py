"""An MoE layer split over two gloo ranks, as programs of `moe.sharding` run it: expert rows exchanged in one chunk, or
in two, one exchanged while experts work on the other. Steps are forward and backward passes; one and two chunks
alternate within a run, and a step takes as long as its slower rank. The time that ranks wait for rows is also reported.
"""

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import results
from benchmarks.sharded_peers import median_ratio
from moe.sharding.bindings import experts as operator
from moe.sharding.exchange.mesh import ShardingMesh
from moe.sharding.rules.differentiable import forward_kept, gradients_of_kept
from moe.train.environment import KEEP_FREED_MEMORY

RANKS, ROUNDS, WARM_UP = 2, 60, 3
TOKENS, WIDTH, HIDDEN, EXPERTS_HERE, PER_TOKEN = 2048, 256, 512, 4, 2
CHUNKS = (1, 2)


class WaitingMesh(ShardingMesh):
    """Mesh that adds up the seconds spent waiting for all-to-alls."""

    waited_s: ClassVar[list[float]] = [0.0]

    def begin_all_to_all(
        self, rows: Tensor, axis: int, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Callable[[], Tensor]:
        wait = super().begin_all_to_all(rows, axis, send_counts, receive_counts)

        def timed_wait() -> Tensor:
            began = time.perf_counter()
            output = wait()
            self.waited_s[0] += time.perf_counter() - began
            return output

        return timed_wait


def work(rank: int, rendezvous: str, answer: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=RANKS)
    mesh = WaitingMesh((RANKS,), (rank,), (dist.group.WORLD,))
    draw = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, WIDTH, generator=draw)
    expert = torch.randint(0, RANKS * EXPERTS_HERE, (TOKENS, PER_TOKEN), generator=draw)
    weight, is_kept = (torch.rand(TOKENS, PER_TOKEN, generator=draw), torch.ones(TOKENS, PER_TOKEN, dtype=torch.bool))
    w_in = torch.randn(EXPERTS_HERE, WIDTH, HIDDEN, generator=draw) * WIDTH**-0.5
    w_out = torch.randn(EXPERTS_HERE, HIDDEN, WIDTH, generator=draw) * HIDDEN**-0.5
    arguments: tuple[Any, ...] = (x, expert, weight, is_kept, w_in, w_out, None, None, None, None, "relu", [])
    layout = (RANKS * EXPERTS_HERE, (), (), 0)

    def step(num_chunks: int) -> tuple[float, float]:
        """Milliseconds of both passes and of waiting for rows, each on the slower rank."""
        operator.MAX_CHUNKS = num_chunks
        dist.barrier()
        mesh.waited_s[0], began = 0.0, time.perf_counter()
        (y,), saved_tensors = forward_kept(mesh, operator.EXPERTS.name, layout, *arguments)
        gradients_of_kept(saved_tensors, [torch.ones_like(y)])
        seconds = torch.tensor([time.perf_counter() - began, mesh.waited_s[0]], dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return 1e3 * float(seconds[0]), 1e3 * float(seconds[1])

    for _ in range(WARM_UP):
        for num_chunks in CHUNKS:
            step(num_chunks)
    times_ms: dict[int, list[tuple[float, float]]] = {num_chunks: [] for num_chunks in CHUNKS}
    for turn in range(ROUNDS):
        for num_chunks in CHUNKS[:: 1 if turn % 2 else -1]:
            times_ms[num_chunks].append(step(num_chunks))
    if rank == 0:
        answer.send(times_ms)
    dist.barrier()
    dist.destroy_process_group()


def measure() -> dict[int, list[tuple[float, float]]]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        receiver, sender = context.Pipe(duplex=False)
        processes = [context.Process(target=work, args=(rank, f"{folder}/rendezvous", sender)) for rank in range(RANKS)]
        for process in processes:
            process.start()
        sender.close()  # so that recv ends when the ranks do
        times_ms: dict[int, list[tuple[float, float]]] = receiver.recv()
        for process in processes:
            process.join()
    return times_ms


def main() -> None:
    os.environ |= {"OMP_NUM_THREADS": "1", **KEEP_FREED_MEMORY}
    times_ms = measure()
    steps = {num_chunks: [step for step, _ in times] for num_chunks, times in times_ms.items()}
    waits = {num_chunks: [wait for _, wait in times] for num_chunks, times in times_ms.items()}
    for num_chunks in CHUNKS:
        print(f"{num_chunks} chunk(s): {statistics.median(steps[num_chunks]):8.2f} ms a step, of which "
              f"{statistics.median(waits[num_chunks]):8.2f} ms wait for rows")  # fmt: skip
    figures = {
        "ranks": RANKS, "tokens": TOKENS, "width": WIDTH, "hidden": HIDDEN, "experts": RANKS * EXPERTS_HERE,
        "experts_per_token": PER_TOKEN, "rounds": ROUNDS,
        "median_ms": {str(num_chunks): round(statistics.median(steps[num_chunks]), 2) for num_chunks in CHUNKS},
        "waited_ms": {str(num_chunks): round(statistics.median(waits[num_chunks]), 2) for num_chunks in CHUNKS},
        "ratio": median_ratio(steps[2], steps[1]),
    }  # fmt: skip
    print(f"two chunks take {figures['ratio']} times one's; written to {results.write('sharded_experts', figures)}")


if __name__ == "__main__":
    main()
