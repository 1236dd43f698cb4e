"""`calibrate`: what this machine's CPU reaches, for the planner to count with."""

from typing import Annotated

import typer

from service.cli.options import AsJson, StateDir


def calibrate(
    again: Annotated[
        bool, typer.Option("--again", help="Measure also where it was measured before.")
    ] = False,
    state_dir: StateDir = None,
    as_json: AsJson = False,
) -> None:
    """Measures this machine, for plans that count with what it reaches.

    Some seconds, on two processes. The table is kept with the caches; a control plane on this machine plans CPU jobs
    with it from then on.
    """
    from rich.table import Table

    from moe.train.rates import calibrated
    from service.cli.local import settings_for
    from service.cli.view.output import console, print_json

    settings = settings_for(state_dir=state_dir)
    found = calibrated(settings.cache_dir, again=again)
    if as_json:
        print_json(found.model_dump(mode="json"))
        return
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_row("machine", found.machine)
    for dtype, rate in found.flops_per_s.items():
        grid.add_row(f"{dtype} products", f"{rate / 1e9:,.0f} GFLOP/s a core")
    rows = {
        "attention": (found.attention_flops_per_s, 1e9, "GFLOP/s a core"),
        "memory": (found.memory_bytes_per_s, 1e9, "GB/s a core"),
        "half of that with": (found.half_rows, 1, "rows of a product"),
        "experts, half with": (found.expert_half_rows, 1, "rows of each"),
        "a layer at least": (found.layer_s, 1e-3, "ms"),
        "between workers": (found.within_node_bytes_per_s, 1e9, "GB/s"),
        "a collective at least": (found.latency_s, 1e-3, "ms"),
    }
    for name, (value, unit, words) in rows.items():
        if value is not None:
            grid.add_row(name, f"{value / unit:,.3g} {words}")
    console().print(grid)
