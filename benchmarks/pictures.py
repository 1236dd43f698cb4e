"""`make pictures`: the terminal of a real demo and of a real plan, and the demo's model sharded by `moe.sharding`.
`python -m benchmarks.pictures plan` draws only that picture."""

import io
import re
import sys
import tempfile
import uuid
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from benchmarks.translation_loss import TranslationLoss
from moe import sharding
from moe.plan import Cluster, Plan, plan_job
from moe.plan.request import read_plan_request
from moe.records import StoredCheckpoint
from moe.spec import TranslationModelSpec, read_job
from service.cli.child import ControlPlaneChild
from service.cli.footprint import Footprint
from service.cli.view.follow import style_notice
from service.cli.view.frame import frame
from service.cli.view.kinds import report_view, words_of
from service.cli.view.progress import RunProgress
from service.cli.view.result import footprint_line, training_summary
from service.cli.view.verdict import short_plan_view
from service.client import Client

ROOT = Path(__file__).parents[1]
EXAMPLE, PLANNED = (
    ROOT / "examples" / name for name in ("translate-100-to-english.yaml", "deepseek-v3-1024-h100.yaml")
)
FOLDER = ROOT / "docs" / "pictures"
WIDTH, HEIGHT = 104, 30
PAIRS, TOKENS = 4096, 32
"""Pairs in the batch for which the demo's model is sharded, and tokens on each side of a pair."""
MIDWAY = 0.6
"""Share of the steps after which the live display is shown."""
STATE = "~/.local/state/shardyard/demo"
"""State folder of a user's demo; the picture shows it instead of the temporary folder."""


def screen(command: str) -> Console:
    """A terminal that records its output."""
    console = Console(
        record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor",
        highlight=False, emoji=False, markup=False,
    )  # fmt: skip
    console.print(Text(f"$ {command}", "bold"))
    return console


def keep(console: Console, name: str, title: str) -> None:
    FOLDER.mkdir(exist_ok=True)
    svg = console.export_svg(title=title, unique_id=name)
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # fonts from another server
    (FOLDER / f"{name}.svg").write_text(svg)
    print(f"written to docs/pictures/{name}.svg")


def plan_on_screen(plan: Plan) -> Console:
    """The terminal of `shardyard plan` with the plan of `PLANNED`."""
    request = read_plan_request(PLANNED)
    assert request.cluster is not None
    console = screen(f"shardyard plan examples/{PLANNED.name}")
    nodes, devices_per_node, device = (
        request.cluster.num_nodes,
        request.cluster.devices_per_node,
        request.cluster.device,
    )
    console.print(short_plan_view(plan, f"{nodes:,} nodes of {devices_per_node:,} {device}"))
    return console


def draw_plan() -> None:
    """DeepSeek-V3 on 1,024 H100."""
    request = read_plan_request(PLANNED)
    assert request.cluster is not None
    plan = plan_job(request.spec, request.cluster)
    keep(plan_on_screen(plan), "plan", "shardyard plan")


def draw_demo() -> None:
    """The whole demo, with the live display shown once."""
    spec, console = read_job(EXAMPLE), screen("make demo")
    midway = int(MIDWAY * spec.train.num_steps)
    with tempfile.TemporaryDirectory() as folder, Footprint(mark=uuid.uuid4().hex) as footprint:
        with ControlPlaneChild(Path(folder), None, footprint.mark) as plane:
            plane.await_ready()
            with Client(plane.url, token="") as client:
                job = client.submit(EXAMPLE)
                progress, is_shown = (RunProgress(job.id, job.name, job.num_steps, words_of(job).last_work), False)
                with closing(job.events()) as events:
                    for event in events:
                        if (notice := progress.take(event)) is not None and not is_shown:
                            console.print(style_notice(notice))
                        if progress.step == midway and not is_shown:
                            is_shown = True
                            console.print(frame(progress, WIDTH, HEIGHT))
                job.refresh()
                checkpoints = [StoredCheckpoint.read(checkpoint) for checkpoint in job.checkpoints()]
                shown_checkpoints = [
                    replace(checkpoint, path=f"{STATE}/checkpoints/{checkpoint.name}") for checkpoint in checkpoints
                ]
                workers = job.plan().num_workers
                report = report_view(job)
                assert report is not None
                console.print(
                    training_summary(job, report, shown_checkpoints, progress, workers, "shardyard translate")
                )
        console.print(footprint_line(footprint))
    keep(console, "demo", "make demo")


def draw_module() -> None:
    """The demo's model, as a plain module without hints, on eight H100."""
    spec = read_job(EXAMPLE).model
    assert isinstance(spec, TranslationModelSpec)
    sides = [torch.empty(PAIRS, TOKENS, dtype=torch.int64, device="meta") for _ in range(3)]
    cluster = Cluster(num_nodes=1, devices_per_node=8, device="h100")
    plan = sharding.plan(TranslationLoss.on_meta(spec), [*sides, torch.tensor(0)], cluster, mesh={"devices": 8})
    plan.draw(FOLDER / "sharding.svg")
    print("written to docs/pictures/sharding.svg")


PICTURES = {"plan": draw_plan, "sharding": draw_module, "demo": draw_demo}


def main() -> None:
    for name in sys.argv[1:] or PICTURES:
        PICTURES[name]()


if __name__ == "__main__":
    main()
