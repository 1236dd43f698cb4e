"""A row of 65,536 tokens on two context ranks, one core each, against one rank: bytes that the forward pass of a small
mixture-of-experts model saves for the backward pass, and the time of a training step, by exchange of keys and values.

Exchanges take turns, and rounds begin together. A step's time is that of the slower rank, by the clock, and of the
processor, which other work on the machine disturbs less.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import results
from moe.interface import LOOPBACK, listen_on
from moe.parallel import Layout
from moe.plan.degrees import Degrees
from moe.spec import JobSpec
from moe.spec.parallel import ContextExchange
from moe.tasks.batch_context import BatchContext, label_positions
from moe.tasks.build import build_task
from moe.tasks.language.batches import IGNORE_INDEX, SequencesBatch
from moe.tasks.task import RankBatch
from moe.train.signals import Signals
from moe.train.step import step
from moe.train.train_state import TrainState

RANKS, LENGTH, VOCABULARY = 2, 65_536, 512
"""`LENGTH` positions by default."""
EXCHANGES: tuple[ContextExchange, ...] = get_args(ContextExchange)
MOST_ACTIVATIONS, MOST_RING_TIME = 0.6, 1.1
"""Wanted: a rank's activations over one rank's, and the ring's time over that of gathered keys."""


def job_of(length: int) -> JobSpec:
    """Training of a small model on one row of `length` positions a step."""
    return JobSpec.parse({
        "name": "context",
        "model": {
            "kind": "language", "model_dim": 64, "num_layers": 2, "ffn_dim": 128, "vocab_size": VOCABULARY,
            "attention": {"kind": "grouped_query", "num_heads": 2, "num_kv_heads": 2, "head_dim": 16},
            "moe": {"num_experts": 4, "hidden_dim": 64, "top_k": 2, "router": "softmax_topk", "activation": "swiglu",
                    "group_tokens": length},
            "first_dense_layers": 1,
        },
        "data": {
            "corpus": "documents", "max_tokens": length, "sources": [{"name": "none", "paths": ["/none/*.jsonl"]}],
        },
        "train": {"num_steps": 1000, "batch_tokens": length, "dtype": "float32",
                  "optimizer": {"name": "adamw", "peak_lr": 1e-4}},
    })  # fmt: skip


class Side:
    """Training of the same model under one layout."""

    def __init__(self, layout: Layout, length: int) -> None:
        self.state = TrainState.build(build_task(job_of(length)), layout)
        self.state.shard_masters()
        torch.manual_seed(0)
        tokens = torch.randint(4, VOCABULARY, (1, length))
        labels = torch.cat((tokens[:, 1:], torch.full_like(tokens[:, :1], IGNORE_INDEX)), dim=1)
        positions = label_positions(labels.numpy(), IGNORE_INDEX, layout)
        rows = SequencesBatch(tokens, labels, BatchContext(rows_per_group=1), positions)
        self.batch = RankBatch(0, [rows], length - 1, length)

    def saved_bytes(self) -> int:
        """Bytes that a forward pass saves for the backward pass, without weights."""
        with saved_storages() as storages:
            loss = self.state.task.loss(self.state.model, self.batch.micro_batches[0])
        del loss
        for parameter in self.state.model.parameters():
            storages.pop(parameter.untyped_storage().data_ptr(), None)
        return sum(storages.values())

    def step(self) -> tuple[float, float, float]:
        """(seconds by the clock, of the processor, loss) of one step."""
        start, processor_start = time.perf_counter(), time.process_time()
        loss = step(self.state, self.batch, Signals()).record.loss
        return time.perf_counter() - start, time.process_time() - processor_start, loss


@contextmanager
def saved_storages() -> Iterator[dict[int, int]]:
    """Bytes of each storage that autograd saves meanwhile, by address."""
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield storages


def measure(rank: int, rendezvous: str, length: int, num_rounds: int, answer: Connection) -> None:
    """Measure on one of the ranks, and send the first one's figures."""
    torch.set_num_threads(1)
    one_rank_bytes = Side(Layout.single(), length).saved_bytes() if rank == 0 else 0
    listen_on(LOOPBACK)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    degrees = Degrees(data=RANKS, context=RANKS).axes
    sides = {exchange: Side(Layout.from_degrees(degrees, context_exchange=exchange), length) for exchange in EXCHANGES}
    saved = {exchange: largest(side.saved_bytes()) for exchange, side in sides.items()}
    rounds: dict[str, list[tuple[float, float]]] = {exchange: [] for exchange in EXCHANGES}
    losses: dict[str, list[float]] = {exchange: [] for exchange in EXCHANGES}
    for number in range(num_rounds):
        for exchange in (*EXCHANGES[number % len(EXCHANGES) :], *EXCHANGES[: number % len(EXCHANGES)]):
            dist.barrier()
            seconds, processor_s, loss = sides[exchange].step()
            rounds[exchange].append((largest(seconds), largest(processor_s)))
            losses[exchange].append(loss)
    if rank == 0:
        answer.send({
            "length": length, "ranks": RANKS, "rounds": num_rounds, "one_rank_saved_bytes": one_rank_bytes,
            "exchanges": {
                exchange: {
                    "saved_bytes": int(saved[exchange]), "saved_share": saved[exchange] / one_rank_bytes,
                    "step_s": [seconds for seconds, _ in rounds[exchange]],
                    "processor_s": [processor_s for _, processor_s in rounds[exchange]],
                    "losses": losses[exchange],
                }
                for exchange in EXCHANGES
            },
        })  # fmt: skip
    dist.barrier()
    dist.destroy_process_group()


def largest(value: float) -> float:
    """The largest of the ranks' values."""
    values = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return float(values)


def add_ratios(figures: dict[str, Any]) -> None:
    """Add the median, over rounds, of each exchange's time over that of gathered keys."""
    exchanges = figures["exchanges"]
    for exchange in exchanges.values():
        for kind in ("step_s", "processor_s"):
            pairs = zip(exchange[kind], exchanges["gather"][kind], strict=True)
            exchange[f"{kind}_over_gather"] = statistics.median(own / gathered for own, gathered in pairs)


def show(figures: dict[str, Any]) -> None:
    print(f"\na row of {figures['length']:,} tokens on {RANKS} ranks; one rank saves "
          f"{figures['one_rank_saved_bytes'] / 1024**2:,.0f} MiB for the backward pass")  # fmt: skip
    for name, exchange in figures["exchanges"].items():
        seconds, processor_s = (statistics.median(exchange[kind]) for kind in ("step_s", "processor_s"))
        print(
            f"  {name:<7}{exchange['saved_bytes'] / 1024**2:6,.0f} MiB a rank, {exchange['saved_share']:.2f} of one "
            f"rank's (at most {MOST_ACTIVATIONS}); {seconds:6.1f} s a step, processor {processor_s:6.1f} s; "
            f"{exchange['step_s_over_gather']:.2f} times gathered, by processor "
            f"{exchange['processor_s_over_gather']:.2f}"
        )
    print(f"  wanted of the ring: at most {MOST_RING_TIME} times gathered")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--length", type=int, default=LENGTH, help="positions of the row")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=measure, args=(rank, f"{folder}/rendezvous", args.length, args.rounds, sender))
            for rank in range(RANKS)
        ]
        for process in processes:
            process.start()
        sender.close()
        figures = receiver.recv()
        for process in processes:
            process.join()
    add_ratios(figures)
    show(figures)
    print(f"written to {results.write('context', figures)}")


if __name__ == "__main__":
    main()
