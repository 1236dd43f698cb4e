"""`calibrate`: measures devices and links, for the planner."""

import sys
from typing import Annotated

import typer

from service.cli.options import AsJson, StateDir, Url


def calibrate(
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Measure the control plane's cluster, through Ray.")
    ] = False,
    repeat: Annotated[
        bool, typer.Option("--again", help="Measure this machine again, even if a measurement exists.")
    ] = False,
    url: Url = None,
    state_dir: StateDir = None,
    as_json: AsJson = False,
) -> None:
    """Measure the speed of this machine or a cluster, for plans.

    Measuring this machine's CPU takes seconds, on two processes; the result is cached, and plans of CPU jobs use it.
    With --cluster, workers on two nodes of the control plane's cluster measure devices and links while jobs run, and
    the control plane stores the result.
    """
    from rich.table import Table

    from service.cli.failures import Misuse
    from service.cli.local import settings_for
    from service.cli.server import connect
    from service.cli.view.output import console, print_json

    if cluster:
        if repeat or state_dir is not None:
            raise Misuse("--again and --state-dir apply to this machine; omit them with --cluster")
        with connect(url) as client:
            if holders := ", ".join(entry["job_id"] for entry in client.cluster()["held"]):
                print(f"measuring while {holders} runs; waits up to 120 s for free CPUs or GPUs", file=sys.stderr)
            calibration = client.calibrate()
    elif url is not None:
        raise Misuse("--url names a control plane; add --cluster to measure its cluster")
    else:
        from moe.calibrate.rates import load_or_measure  # torch, seconds of a core, which nothing else here needs

        calibration = load_or_measure(settings_for(state_dir=state_dir).cache_dir, refresh=repeat)
    if as_json:
        print_json(calibration.model_dump(mode="json"))
        return
    grid = Table.grid(padding=(0, 2, 0, 0))
    device_words = "a GPU" if calibration.device == "cuda" else "a core"
    grid.add_row("machine", calibration.machine)
    for dtype, rate in calibration.flops_per_s.items():
        grid.add_row(f"{dtype} matrix products", f"{rate / 1e9:,.0f} GFLOP/s {device_words}")
    for name, value, unit, words in (
        ("half that rate at", calibration.half_rows, 1, "rows per product"),
        ("experts: half the rate at", calibration.expert_half_rows, 1, "rows per expert"),
        ("attention", calibration.attention_flops_per_s, 1e9, f"GFLOP/s {device_words}"),
        ("memory", calibration.memory_bytes_per_s, 1e9, f"GB/s {device_words}"),
        ("overhead of a layer", calibration.layer_s, 1e-3, "ms"),
        ("links within a node", calibration.within_node_bytes_per_s, 1e9, "GB/s"),
        ("latency of a collective", calibration.latency_s, 1e-3, "ms"),
        ("links between nodes", calibration.across_nodes_bytes_per_s, 1e9, "GB/s"),
        ("latency of a collective", calibration.across_latency_s, 1e-3, "ms"),
    ):
        if value is not None:
            grid.add_row(name, f"{value / unit:,.3g} {words}")
    console().print(grid)
