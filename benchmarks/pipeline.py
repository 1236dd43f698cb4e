"""Every pipeline schedule on two stages, one core each, against a pipeline that never waits.

Two processes of one thread train a small mixture-of-experts decoder on batches of eight micro-batches, with each
schedule in turns. The reference: both processes train the whole model alone at the same time, so that both cores and
their memory are as busy; a pipeline without bubble or transfers would take half as long. The simulator of
`moe.plan.schedule` predicts each schedule's passes from the measured processor time of its actions; a pass waits in no
other way than the schedule has it wait if it takes as long.
"""

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from benchmarks import results
from moe.plan.degrees import Degrees
from moe.plan.schedule import Action, StageSeconds, schedule, simulate, splits_backward
from moe.spec.parallel import PipelineSchedule

RANKS, MICRO_BATCHES, ROWS, LENGTH, LAYERS = 2, 8, 2, 256, 8
ROUNDS = 7
AIM, MARGIN = 0.85, 0.1
"""Least share of the reference's rate; largest difference of a pass from its prediction."""
SCHEDULES: dict[PipelineSchedule, int] = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 1, "zb_v": 2}
"""Virtual stages per rank, by schedule."""
REFERENCE = "alone"
MODEL: dict[str, Any] = {
    "kind": "language", "num_layers": LAYERS, "model_dim": 256, "vocab_size": 512,
    "attention": {"kind": "grouped_query", "num_heads": 4, "num_kv_heads": 2, "head_dim": 64},
    "moe": {"router": "softmax_topk", "num_experts": 8, "top_k": 2, "hidden_dim": 384, "activation": "swiglu"},
}  # fmt: skip


@dataclass(frozen=True)
class Round:
    """One rank's part of a step."""

    step_s: float
    began_s: float
    """Of the first action, by the machine's clock."""
    ended_s: float
    processor_s: float
    actions: tuple[tuple[Action, float], ...]
    """Actions with their processor seconds."""


def work(rank: int, rendezvous: str, num_rounds: int, pipe: Connection) -> None:
    """Run the rounds of all sides; send the rank's rounds by side."""
    import torch
    import torch.distributed as dist

    from moe.interface import LOOPBACK, listen_on
    from moe.parallel import Layout

    torch.set_num_threads(1)
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    listen_on(LOOPBACK)
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=RANKS)
    sides = {REFERENCE: _side(Layout.single())}
    for name, virtual_stages in SCHEDULES.items():
        axes = Degrees(pipeline=RANKS).axes
        num_stages = RANKS * virtual_stages
        cut = (LAYERS // num_stages,) * num_stages  # embeddings and head take hardly any time here
        sides[name] = _side(Layout.from_degrees(axes, schedule=name, virtual_stages=virtual_stages, stages=cut))
    rounds = defaultdict[str, list[Round]](list)
    for number in range(num_rounds + 1):
        for name, run in sides.items():
            dist.barrier()
            result = run()
            if number:  # the first one warms up
                rounds[name].append(result)
    pipe.send(dict(rounds))
    dist.barrier()
    dist.destroy_process_group()


def _side(layout: Any) -> Callable[[], Round]:
    """A model under a layout; the result runs a step of training."""
    import torch

    from moe.spec import JobSpec
    from moe.tasks.batch_context import BatchContext, label_positions
    from moe.tasks.build import build_task
    from moe.tasks.language.batches import IGNORE_INDEX, SequencesBatch
    from moe.tasks.task import RankBatch
    from moe.train.passes import ScheduledPasses
    from moe.train.signals import Signals
    from moe.train.step import step
    from moe.train.train_state import TrainState

    spec = JobSpec.parse({
        "name": "pipeline", "model": MODEL,
        "data": {
            "corpus": "documents", "max_tokens": LENGTH, "sources": [{"name": "none", "paths": ["/none/*.jsonl"]}],
        },
        "train": {"num_steps": 1000, "batch_tokens": MICRO_BATCHES * ROWS * LENGTH, "optimizer": {"name": "adamw"}},
    })  # fmt: skip
    state = TrainState.build(build_task(spec), layout)
    state.shard_masters()
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(MODEL["vocab_size"], (ROWS, LENGTH), generator=generator)
    labels = torch.cat((tokens[:, 1:], torch.full_like(tokens[:, :1], IGNORE_INDEX)), dim=1)
    positions = label_positions(labels.numpy(), IGNORE_INDEX, layout)
    micro_batch = SequencesBatch(tokens, labels, BatchContext(rows_per_group=ROWS), positions)
    num_rows = MICRO_BATCHES * ROWS
    batch = RankBatch(0, [micro_batch] * MICRO_BATCHES, num_rows * (LENGTH - 1), num_rows * LENGTH)
    assert isinstance(state.passes, ScheduledPasses)
    timed = _TimedExecutor(state.passes.executor)
    state.passes.executor = timed  # type: ignore[assignment]

    def run() -> Round:
        timed.actions_s.clear()
        began_s, processor_s = time.perf_counter(), time.process_time()
        step(state, batch, Signals())
        return Round(
            time.perf_counter() - began_s, timed.began_s, timed.ended_s, time.process_time() - processor_s,
            tuple(timed.actions_s),
        )  # fmt: skip

    return run


class _TimedExecutor:
    """An executor whose actions are timed by the thread's processor time, in which a rank that waits spends none."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self.actions_s: list[tuple[Action, float]] = []
        self.began_s = self.ended_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def forward(self, action: Action, *arguments: Any) -> Any:
        return self._timed(self._executor.forward, action, *arguments)

    def backward(self, action: Action, *arguments: Any) -> Any:
        return self._timed(self._executor.backward, action, *arguments)

    def _timed(self, run: Callable[..., Any], action: Action, *arguments: Any) -> Any:
        if not self.actions_s:
            self.began_s = time.perf_counter()
        processor_s = time.thread_time()
        result = run(action, *arguments)
        self.actions_s.append((action, time.thread_time() - processor_s))
        self.ended_s = time.perf_counter()
        return result


def measure(num_rounds: int) -> list[dict[str, list[Round]]]:
    """Rounds of each side, by rank."""
    context, pipes, processes = multiprocessing.get_context("spawn"), [], []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(RANKS):
            receiver, sender = context.Pipe()
            arguments = (rank, f"{folder}/rendezvous", num_rounds, sender)
            processes.append(context.Process(target=work, args=arguments))
            processes[-1].start()
            sender.close()  # so that recv ends when the rank does
            pipes.append(receiver)
        rounds = [pipe.recv() for pipe in pipes]
        for process in processes:
            process.join()
    return rounds


def stage_seconds(rounds: list[list[Round]], name: PipelineSchedule) -> list[StageSeconds]:
    """Median processor seconds of each stage's passes. Whole backward passes count as those of inputs."""
    seconds = defaultdict[tuple[int, str], list[float]](list)
    for round_ in (round_ for rank_rounds in rounds for round_ in rank_rounds):
        for action, action_s in round_.actions:
            seconds[action.stage, action.kind].append(action_s)
    median_s = {key: statistics.median(values) for key, values in seconds.items()}
    backward = "backward_input" if splits_backward(name) else "backward"
    return [
        StageSeconds(
            median_s[stage, "forward"], median_s[stage, backward], median_s.get((stage, "backward_weight"), 0.0)
        )
        for stage in range(RANKS * SCHEDULES[name])
    ]


def figures_of(name: PipelineSchedule, rounds: list[dict[str, list[Round]]]) -> dict[str, Any]:
    """Figures of a schedule, from the rounds of each rank."""
    own = [rank_rounds[name] for rank_rounds in rounds]
    alone = [rank_rounds[REFERENCE] for rank_rounds in rounds]
    seconds = stage_seconds(own, name)
    simulation = simulate(schedule(name, RANKS, SCHEDULES[name], MICRO_BATCHES), seconds)
    pairs = list(zip(*own, strict=True))
    passes_s = statistics.median(max(r.ended_s for r in pair) - min(r.began_s for r in pair) for pair in pairs)
    busy_s = [statistics.median(sum(s for _, s in r.actions) for r in rank_rounds) for rank_rounds in own]
    alone_s = [max(r.step_s for r in pair) / RANKS for pair in zip(*alone, strict=True)]
    alone_processor_s = [sum(r.processor_s for r in pair) / RANKS**2 for pair in zip(*alone, strict=True)]
    rest_s = statistics.median(
        max(r.processor_s - sum(s for _, s in r.actions) for r in pair) for pair in pairs
    )  # the optimizer's
    return {
        "step_s": statistics.median(max(r.step_s for r in pair) for pair in pairs),
        "share": statistics.median(
            reference_s / max(r.step_s for r in pair) for reference_s, pair in zip(alone_s, pairs, strict=True)
        ),
        "share_by_processor": statistics.median(alone_processor_s) / (simulation.makespan_s + rest_s),
        "passes_s": passes_s, "predicted_passes_s": simulation.makespan_s,
        "bubble": [1 - rank_s / passes_s for rank_s in busy_s], "predicted_bubble": list(simulation.idle_shares),
        "stage_s": [vars(stage) for stage in seconds], "peak_in_flight": list(simulation.peak_in_flight),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    num_rounds = parser.parse_args().rounds
    rounds = measure(num_rounds)
    alone_s = statistics.median(
        max(r.step_s for r in pair) for pair in zip(*(rank_rounds[REFERENCE] for rank_rounds in rounds), strict=True)
    )
    print(f"{LAYERS} layers, {MICRO_BATCHES} micro-batches of {ROWS * LENGTH} tokens; both cores with the whole model: "
          f"{alone_s:.2f} s a step, half of which a pipeline that never waits would take")  # fmt: skip
    print(f"{'':14}{'s a step':>9}{'share':>7}{'by processor':>14}{'passes s':>10}{'predicted':>11}{'bubbles':>14}"
          f"{'predicted':>14}")  # fmt: skip
    figures = {name: figures_of(name, rounds) for name in SCHEDULES}
    for name, row in figures.items():
        bubbles, predicted = (
            " ".join(f"{100 * share:.1f}%" for share in row[key]) for key in ("bubble", "predicted_bubble")
        )
        print(f"{name:14}{row['step_s']:9.2f}{row['share']:7.2f}{row['share_by_processor']:14.2f}{row['passes_s']:10.2f}"
              f"{row['predicted_passes_s']:11.2f}{bubbles:>14}{predicted:>14}")  # fmt: skip
    best = max(row["share"] for row in figures.values())
    print(f"the best schedule has {best:.2f} of the reference's rate (aim {AIM}); passes may take {MARGIN:.0%} longer "
          "than predicted")  # fmt: skip
    print(results.write("pipeline", {
        "ranks": RANKS, "micro_batches": MICRO_BATCHES, "tokens_per_micro_batch": ROWS * LENGTH, "model": MODEL,
        "rounds": num_rounds, "aim": AIM, "margin": MARGIN, "alone_step_s": alone_s, "schedules": figures,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
