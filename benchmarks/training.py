"""Tokens per second of the demo's model on one and on two workers, and the parts of a step.

One worker has two threads; two workers are two gloo processes of one thread each, with experts spread over both. Tokens
of both sides count, without padding. Shares are those of rank 0's step under torch's profiler: a backward operation
counts in the part of its forward operation.
"""

import os
import statistics
import tempfile
import time
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[1] / "examples" / "translate-100-to-english.yaml"
WARM_UP_STEPS, ROUNDS, STEPS_A_ROUND, PROFILED_STEPS = 20, 5, 40, 20


def run(rank: int, num_workers: int, num_threads: int, rendezvous: str, cache: str) -> dict[str, Any]:
    """Train the demo's model for some hundred steps and return the rank's figures."""
    import torch
    import torch.distributed as dist

    from moe.parallel import Layout
    from moe.plan import Cluster, plan_job
    from moe.spec import JobSpec, ParallelSpec, ResourcesSpec, read_job
    from moe.storage.folder import Folder
    from moe.tasks.build import build_task
    from moe.train import expert_costs
    from moe.train.batches import BatchPrefetcher
    from moe.train.signals import Signals
    from moe.train.step import step
    from moe.train.train_state import TrainState

    torch.set_num_threads(num_threads)
    spec: JobSpec = read_job(EXAMPLE)
    parallel = ParallelSpec(expert=num_workers)
    changes = {"resources": ResourcesSpec(num_workers=num_workers), "parallel": parallel}
    spec = spec.model_copy(update=changes)
    cluster = Cluster(num_nodes=1, devices_per_node=2, device="cpu", memory_bytes=8 * 1024**3)
    plan = plan_job(spec, cluster)
    if num_workers > 1:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=num_workers)
    layout = Layout.build(plan)
    task = build_task(spec)
    state = TrainState.build(task, layout)
    state.shard_masters()
    layers, folder = state.moe_layers.local_layers.values(), Folder(str(Path(rendezvous).parent))
    expert_costs.decide(layers, layout.device, state.dtype, folder, Path(cache) / "experts")
    batches = BatchPrefetcher(task.batches(task.prepare(cache), plan, layout))
    step_index = 0

    def steps(count: int) -> tuple[float, float, int]:
        nonlocal step_index
        wait_s, tokens, began = 0.0, 0, time.perf_counter()
        for _ in range(count):
            batch = batches.take(step_index)
            step(state, batch, Signals())
            wait_s, tokens, step_index = wait_s + batches.waited_s, tokens + batch.num_tokens, step_index + 1
        return time.perf_counter() - began, wait_s, tokens

    steps(WARM_UP_STEPS)
    rounds = [steps(STEPS_A_ROUND) for _ in range(ROUNDS)]
    shares = profile(state.model, state.optimizer, lambda: steps(PROFILED_STEPS))
    batches.close()
    if num_workers > 1:
        dist.barrier()
        dist.destroy_process_group()
    rates = [tokens / seconds for seconds, _, tokens in rounds]
    return {
        "num_workers": num_workers,
        "threads_a_worker": num_threads,
        "tokens_per_s": round(statistics.median(rates)),
        "tokens_per_s_rounds": [round(rate) for rate in rates],
        "step_ms": round(1e3 * statistics.median(seconds / STEPS_A_ROUND for seconds, _, _ in rounds), 1),
        "waiting_for_data": sum(wait_s for _, wait_s, _ in rounds) / sum(seconds for seconds, _, _ in rounds),
        "shares": shares,
    }


def profile(model: Any, optimizer: Any, work: Any) -> dict[str, float]:
    """Share of each part of the model in the time of `work`, forward and backward together."""
    import torch
    from torch.profiler import ProfilerActivity, record_function

    from moe.layers import MoELayer
    from moe.layers.feed_forward import FeedForward
    from moe.layers.grouped_query import GroupedQueryAttention

    modules = {GroupedQueryAttention: "attention", FeedForward: "dense feed-forward", MoELayer: "dispatch"}

    def with_label(function: Any, part: str) -> Any:
        def wrapper(*arguments: Any, **keywords: Any) -> Any:
            with record_function(f"part:{part}"):
                return function(*arguments, **keywords)

        return wrapper

    for module in model.modules():
        for kind, part in modules.items():
            if isinstance(module, kind):
                module.forward = with_label(module.forward, part)
        if isinstance(module, MoELayer):
            module.route = with_label(module.route, "routing")
            module._logits = with_label(module._logits, "routing")  # type: ignore[method-assign]
    optimizer.step = with_label(optimizer.step, "optimizer")
    for place, name, part in functions_of_parts():
        setattr(place, name, with_label(getattr(place, name), part))

    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("part:other"):
        work()
    return _shares(list(profiler.events()))


def functions_of_parts() -> list[tuple[Any, str, str]]:
    """(module or class, name of its function, part of a step) for parts that are not modules of the model."""
    from moe.dispatch.row_exchange import AllToAll, PendingAllToAll
    from moe.parallel import GradientReduction
    from moe.train import step as step_module
    from moe.train.optimizer import build as build_module

    # Imported by name: the package also has a function called feed_forward.
    with_arithmetic = [import_module(name) for name in ("moe.experts.feed_forward", "moe.dispatch.exchange")]
    return [
        (import_module("moe.tasks.translation.model"), "smoothed_nll", "vocabulary and loss"),
        (GradientReduction, "finish", "gradient all-reduce"),
        (step_module, "global_norm", "clipping"),
        (build_module, "scale_gradients", "clipping"),
        # Rows of other ranks are sent, waited for and multiplied in one autograd function.
        *((place, name, "expert arithmetic") for place in with_arithmetic for name in _ARITHMETIC),
        *((AllToAll, name, "all-to-all") for name in ("exchange_counts", "gather_counts", "start")),
        (PendingAllToAll, "wait", "all-to-all"),
    ]


_ARITHMETIC = ("forward_pass", "backward_pass")
_NODE = "autograd::engine::evaluate_function"


def _shares(events: list[Any]) -> dict[str, float]:
    """Share of each part without the parts nested in it; a backward operation counts in the part of its forward
    operation. On a CPU the backward pass runs in the calling thread, inside `other`."""
    made_by: dict[int, str] = {}

    def around(event: Any, nodes: bool) -> str | None:
        """Innermost part around an event. With `nodes`, nodes of the backward pass count as parts."""
        while event is not None:
            if event.name.startswith("part:"):
                return str(event.name).removeprefix("part:")
            if event.name.startswith("autograd::"):
                return made_by.get(event.sequence_nr, "other") if nodes else None
            event = event.cpu_parent
        return None

    # Operations have the number of the next autograd node: the last one with a number created that node.
    for event in sorted(events, key=lambda event: event.time_range.start):
        if event.sequence_nr >= 0 and (part := around(event, nodes=False)):
            made_by[event.sequence_nr] = part
    times_us: dict[str, float] = defaultdict(float)
    for event in events:
        if event.name.startswith(("part:", _NODE)):
            times_us[around(event, nodes=True) or "other"] += event.cpu_time_total
            if outer := around(event.cpu_parent, nodes=True):
                times_us[outer] -= event.cpu_time_total
    total = sum(times_us.values())
    return {part: time_us / total for part, time_us in sorted(times_us.items(), key=lambda item: -item[1])}


def measure(num_workers: int, num_threads: int, cache: str) -> dict[str, Any]:
    """Figures of rank 0, from new processes."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    from moe.train.environment import KEEP_FREED_MEMORY

    os.environ |= {"OMP_NUM_THREADS": str(num_threads), **KEEP_FREED_MEMORY}
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(num_workers, spawn) as workers:
        rendezvous = f"{folder}/rendezvous"
        ranks = [workers.submit(run, rank, num_workers, num_threads, rendezvous, cache) for rank in range(num_workers)]
        figures = [rank.result() for rank in ranks]
        return figures[0]


def main() -> None:
    from benchmarks import results
    from service.settings import Settings

    cache = str(Settings().cache_dir)
    figures = [measure(1, 2, cache), measure(2, 1, cache)]
    for row in figures:
        print(f"{row['num_workers']} worker(s) of {row['threads_a_worker']} thread(s): "
              f"{row['tokens_per_s']:,} tokens/s, {row['step_ms']} ms a step "
              f"(rounds of {STEPS_A_ROUND} steps: {', '.join(f'{rate:,}' for rate in row['tokens_per_s_rounds'])}); "
              f"waiting for data {row['waiting_for_data']:.2%}")  # fmt: skip
        for part, share in row["shares"].items():
            print(f"    {part:<22}{share:6.1%}")
    print(f"written to {results.write('training', figures)}")


if __name__ == "__main__":
    main()
