"""Arguments and options shared by several commands."""

from pathlib import Path
from typing import Annotated

import typer

Url = Annotated[
    str | None,
    typer.Option(
        "--url", metavar="URL", help="The control plane. [env: SHARDYARD_URL; http://127.0.0.1:8321]"
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do it without asking back.")]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="The job's id, as `shardyard ls` shows it.")]
StateDir = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        metavar="DIR",
        help="Where a control plane of this machine keeps its state. [~/.shardyard]",
    ),
]
