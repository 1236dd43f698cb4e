"""Arguments, options and confirmation shared by several commands, and the program's name."""

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from service.cli.failures import CommandError, Misuse

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


def confirm(question: str, yes: bool) -> None:
    """Ask for confirmation unless `yes`. Raises Misuse without a terminal, CommandError for a no."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise Misuse(f"{question} No terminal to ask on: add --yes to confirm")
    if not typer.confirm(question, err=True):
        raise CommandError("nothing was done")


NAME = "shardyard"


def program() -> str:
    """`shardyard`, or the path it was started by if the search path does not find it."""
    path = sys.argv[0]
    if os.path.basename(path) != NAME or not os.path.isfile(path):
        return NAME
    on_path = shutil.which(NAME)
    return NAME if on_path is not None and os.path.samefile(on_path, path) else shlex.quote(path)
