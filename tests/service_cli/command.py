"""The command as users run it: a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

from tests.processes import DEADLINE_S

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "service.cli.main"]


def environment(url: str | None = None, **more: str) -> dict[str, str]:
    """This process's environment without what a developer may have set for a control plane of their own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SHARDYARD_")}
    kept |= {"PYTHONPATH": str(ROOT), "COLUMNS": "80", "NO_COLOR": "1", **more}
    return kept if url is None else {**kept, "SHARDYARD_URL": url}


def shardyard(
    *arguments: str | Path,
    url: str | None = None,
    stdin: str = "",
    timeout_s: float = DEADLINE_S,
    **more: str,
) -> subprocess.CompletedProcess[str]:
    """What the command did: exit code, output, errors. Python's warnings are errors in it, as they are here."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False, env=environment(url, **more),
    )  # fmt: skip
