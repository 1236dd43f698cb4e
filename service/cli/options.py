"""Arguments and options shared by several commands."""

from pathlib import Path
from typing import Annotated

import typer

Url = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", help="The control plane. [env: SHARDYARD_URL; http://127.0.0.1:8321]"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="The job's id, as shown by `shardyard ls`.")]
StateDir = Annotated[
    Path | None,
    typer.Option("--state-dir", metavar="DIR", help="State folder of this machine's control plane. [~/.shardyard]"),
]
