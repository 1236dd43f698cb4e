"""Seconds to build the programs of a plan against the number of devices: one for all ranks, as `moe.sharding` builds
it, and one per rank, with that rank's positions and lengths as constants (GShard, arXiv 2006.16668, Figure 2).

The program is the training step of `benchmarks.planning`'s model, planned on one mesh axis; experts and batch grow with
the devices. Plan and captured graph exist before and are the same for both. Programs of each rank are built for up to
256 devices; all points are measured. One thread does everything, so that processor time equals the time on an idle
machine. It is drawn in `docs/pictures/figure2.svg`.
"""

import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from benchmarks import results
from benchmarks.planning import batch_for, h100s, mesh_of, model_for
from moe import sharding
from moe.sharding.applied.callable_program import program_of
from moe.sharding.capture.capture import capture
from moe.sharding.exchange import exchange
from moe.sharding.exchange.mesh import Mesh, OneDevice
from moe.sharding.partition import runtime
from moe.sharding.partition.program import Program

ONE_PROGRAM = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
RANK_BY_RANK = ONE_PROGRAM[: ONE_PROGRAM.index(256) + 1]
ROUNDS = 5
"""Rounds of one program; the programs of all ranks are built once."""
Made = TypeVar("Made")
PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "figure2.svg"


def pad_and_narrow(part: Tensor, dim: int, full_size: int, first: int, size: int) -> Tensor:
    return exchange.pad_end(part, dim, full_size).narrow(dim, first, size)


def with_numbers(module: fx.GraphModule, mesh: Mesh) -> None:
    """Replace what a program computes from the rank's place by constants: positions, lengths, whether it is the
    first."""
    for node in list(module.graph.nodes):
        arguments = node.args[1:]
        with module.graph.inserting_before(node):
            if node.target in (runtime.first, runtime.valid):
                replacement = node.target(mesh, *arguments)
            elif node.target is exchange.take_part:
                part, axis, dim, size = arguments
                places = mesh.degrees[axis] * size, mesh.indices[axis] * size, size
                replacement = module.graph.call_function(pad_and_narrow, (part, dim, *places))
            elif node.target in (runtime.zero_other_ranks, exchange.keep_first):
                part, mesh_axis, *combine = arguments
                is_here = mesh.is_first([mesh_axis] if combine else mesh_axis) or combine in (["max"], ["min"])
                replacement = part if is_here else module.graph.call_function(torch.zeros_like, (part,))
            else:
                continue
        node.replace_all_uses_with(replacement)
        module.graph.erase_node(node)
    module.recompile()


def text(program: Program) -> str:
    passes = [graph for graph in (program.forward, program.backward) if graph is not None]
    return "\n".join(graph.code for graph in passes)


def made_for(devices: int, rank_by_rank: bool) -> dict[str, Any]:
    """Processor seconds, and the length of the programs' code in characters."""
    model, batch, mesh = model_for(devices), batch_for(devices), mesh_of(devices, axes=1)
    plan = sharding.plan(model, batch, h100s(devices), mesh=mesh)
    captured_graph = capture(model, batch)

    def build_one() -> str:
        return text(program_of(captured_graph, plan))

    def build_all() -> list[str]:
        return [of_rank(rank) for rank in range(devices)]

    def of_rank(rank: int) -> str:
        program = program_of(captured_graph, plan)
        for graph in (program.forward, program.backward):
            if graph is not None:
                with_numbers(graph, OneDevice((devices,), (rank,)))
        return text(program)

    build_one()
    gc.collect()
    gc.freeze()  # objects left by planning do not count
    figures = {"devices": devices}
    timings = [time_call(build_one) for _ in range(ROUNDS)]
    figures["one_program_s"] = statistics.median(seconds for seconds, _ in timings)
    figures["one_program_characters"] = len(timings[0][1])
    if rank_by_rank:
        figures["rank_by_rank_s"], texts = time_call(build_all)
        figures["rank_by_rank_characters"] = sum(map(len, texts))
        assert len(set(texts)) == devices, "a rank's program has nothing of its own"
    return figures


def time_call(make: Callable[[], Made]) -> tuple[float, Made]:
    began = time.process_time()
    program = make()
    return time.process_time() - began, program


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw both against the number of devices, with a mark for each measured point."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "shardyard"
    from matplotlib import pyplot, ticker

    figure, panel = pyplot.subplots(figsize=(8, 4.5), constrained_layout=True)
    for key, label, place in (
        ("rank_by_rank_s", "a program for each rank", (-8, 0)),
        ("one_program_s", "one program for all ranks", (-8, 12)),
    ):
        points = [(row["devices"], row[key]) for row in rows if key in row]
        (line,) = panel.plot(*zip(*points, strict=True), marker="o", markersize=5)
        panel.annotate(
            f"{label}: {points[-1][1]:.2g} s on {points[-1][0]:,}", points[-1], place, textcoords="offset points",
            ha="right", va="center", color=line.get_color(),
        )  # fmt: skip
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_ylim(bottom=0.1)
    panel.xaxis.set_major_locator(ticker.FixedLocator(ONE_PROGRAM))
    panel.xaxis.set_major_formatter(ticker.FuncFormatter(lambda devices, _: f"{devices:,.0f}"))
    panel.xaxis.set_minor_locator(ticker.NullLocator())
    panel.yaxis.set_major_formatter(ticker.FuncFormatter(lambda seconds, _: f"{seconds:g}"))
    panel.set_xlabel("devices")
    panel.set_ylabel("seconds to make the program")
    panel.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    torch.set_num_threads(1)
    rows = [made_for(devices, devices in RANK_BY_RANK) for devices in ONE_PROGRAM]
    print("seconds to make the program of a step, or those of all ranks")
    print(f"{'devices':>9}{'one program':>13}{'rank by rank':>14}")
    for row in rows:
        rank_by_rank = f"{row['rank_by_rank_s']:.2f}" if "rank_by_rank_s" in row else "not made"
        print(f"{row['devices']:>9,}{row['one_program_s']:>13.3f}{rank_by_rank:>14}")
    draw(rows, PICTURE)
    print(f"written to {results.write('one_program', rows)} and {PICTURE}")


if __name__ == "__main__":
    main()
