"""One MoE layer with its experts spread over two gloo ranks, forward and backward: ours, DeepSpeed's, and the limit.

Each rank has one thread, half of the tokens, new in each round, and half of the experts. A round's time is that of the
slower rank. The limit is each rank's share of the products, without routing and exchange.
"""

import multiprocessing
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import peers, results
from benchmarks.contenders import LIKE_DEEPSPEED, SHAPES, Contender, Shape, differences, gradients_for, limit
from benchmarks.layer import ROUNDS, once
from benchmarks.training import EXAMPLE
from moe import MoELayer
from moe.experts import measure
from moe.parallel import Layout, apply
from moe.plan import Cluster, plan_job
from moe.plan.degrees import ShardCounts
from moe.plan.placement import build_placements
from moe.spec import ParallelSpec, read_job

RANKS = 2
CASES = tuple(replace(shape, tokens=shape.tokens // RANKS) for shape in SHAPES)
"""Shapes with the tokens of one rank."""


def contenders(shape: Shape, layout: Layout, x: Tensor, **fields: Any) -> tuple[list[Contender], MoELayer, list[str]]:
    """(contenders, our layer, contenders that are not installed) for tokens like `x`; `fields` of our layers' spec."""
    fields |= LIKE_DEEPSPEED if shape.activation == "relu" else shape.dropless
    contenders: list[Contender] = []
    for name, num_chunks in (("shardyard", 1), ("shardyard, in 2 chunks", 2)):
        spec = shape.spec(**fields)
        weights = build_placements(spec.parameters(), ShardCounts.from_degrees(layout.degrees))
        layer = apply(MoELayer(spec, layer=1), weights, replace(layout, num_chunks=num_chunks))
        layer.experts.costs = measure(layer.experts.w_in.detach())
        run: Callable[[Tensor], Tensor] = lambda x, layer=layer: layer(x)[0]  # noqa: E731
        contenders.append(Contender(name, run, list(layer.parameters()), "shardyard"))
    absent = []
    if shape.activation == "relu":
        try:
            run, block = peers.deepspeed_top2(layer, RANKS)
            contenders.append(Contender("deepspeed top-2", run, list(block.parameters()), "shardyard"))
        except ImportError as error:
            absent.append(f"deepspeed top-2: {error}")
    half = replace(shape, num_experts=shape.num_experts // RANKS, tokens=shape.tokens)
    return [*contenders, limit(half, x)], layer, absent


def work(rank: int, rendezvous: str, answer: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=RANKS)
    spec = read_job(EXAMPLE)
    spec = spec.model_copy(update={"parallel": ParallelSpec(expert=RANKS)})
    cluster = Cluster(num_nodes=1, devices_per_node=RANKS, device="cpu", memory_bytes=8 * 1024**3)
    layout = Layout.build(plan_job(spec, cluster, RANKS))
    comparisons = [compare(shape, layout) for shape in CASES]
    if rank == 0:
        answer.send(comparisons)
    dist.barrier()
    dist.destroy_process_group()


def tokens(shape: Shape, layout: Layout, draw: int) -> Tensor:
    """Tokens `[T, M]` of this rank, different for each `draw`."""
    torch.manual_seed(1 + layout.rank + RANKS * draw)
    return torch.randn(shape.tokens, shape.model_dim, requires_grad=True)


def compare(shape: Shape, layout: Layout) -> dict[str, Any]:
    x = tokens(shape, layout, 0)
    difference = differences(contenders(shape, layout, x, aux_coefficient=0.0)[0], x)
    parts, layer, absent = contenders(shape, layout, x)
    gradients = gradients_for(parts, x)
    times: dict[str, list[float]] = {part.name: [] for part in parts}
    for turn in range(-2, ROUNDS):
        x = tokens(shape, layout, 3 + turn)
        for part in parts[turn % len(parts) :] + parts[: turn % len(parts)]:
            dist.barrier()
            seconds = torch.tensor(once(part, x, gradients[part.name]))
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if turn >= 0:
                times[part.name].append(float(seconds))
    layer.dispatch.take_traffic()
    once(parts[1], x, gradients[parts[1].name])
    traffic = layer.dispatch.take_traffic()
    figures = {
        part.name: {
            "median_ms": 1e3 * statistics.median(times[part.name]),
            "quartiles_ms": [1e3 * cut for cut in statistics.quantiles(times[part.name], n=4)[::2]],
            "difference": difference.get(part.name),
        }
        for part in parts
    }
    return {"shape": asdict(shape), "layers": figures, "not_installed": absent, "traffic": asdict(traffic)}


def show(comparison: dict[str, Any]) -> None:
    print(f"\n{Shape(**comparison['shape'])} on each of {RANKS} ranks, float32")
    fastest = comparison["layers"]["limit"]["median_ms"]
    for name, figures in comparison["layers"].items():
        low, high = figures["quartiles_ms"]
        line = f"  {name:<32}{figures['median_ms']:8.1f} ms  ({low:.1f} to {high:.1f})"
        line += f"  {figures['median_ms'] / fastest:5.2f}x the limit"
        print(line if figures["difference"] is None else f"{line}  differs by {figures['difference']:.1e}")
    traffic = comparison["traffic"]
    print(
        f"  a rank sends {traffic['num_bytes'] / 1024**2:.1f} MiB, waits {1e3 * traffic['transfer_s']:.1f} ms for rows "
        f"and {1e3 * traffic['waiting_s']:.1f} ms for the other (in 2 chunks)"
    )
    for line in comparison["not_installed"]:
        print(f"  not installed: {line}")


def main() -> None:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=work, args=(rank, f"{folder}/rendezvous", sender)) for rank in range(RANKS)]
        for process in processes:
            process.start()
        sender.close()
        comparisons = receiver.recv()
        for process in processes:
            process.join()
    for comparison in comparisons:
        show(comparison)
    print(f"\nwritten to {results.write('layer_two_ranks', {'rounds': ROUNDS, 'cases': comparisons})}")


if __name__ == "__main__":
    main()
