"""The command as users run it: a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from tests.forks import forks
from tests.processes import DEADLINE_S

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "translate-100-to-english.yaml"
NOWHERE = "http://127.0.0.1:1"
"""An address where no control plane listens."""
COMMAND = [sys.executable, "-m", "service.cli.main"]

IMPORTED_LATE = ("moe.plan", "service.cli.server", "service.cli.view.jobs", "service.cli.view.plan", "service.client")
"""Modules that most commands import once they are called."""
OF_MODELS = (*IMPORTED_LATE, "moe.export.hub", "moe.export.load", "moe.tasks.language.generator")
"""Modules that commands on a model import, torch among them, which takes seconds."""


def environment(url: str | None = None, **overrides: str) -> dict[str, str]:
    """This process's environment without a developer's own settings of shardyard."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("SHARDYARD_")}
    variables |= {"PYTHONPATH": str(ROOT), "COLUMNS": "80", "NO_COLOR": "1"}
    variables |= {"SHARDYARD_PREPARE_CATALOGS": "no", **overrides}  # preparation takes the cores for some seconds
    return variables if url is None else {**variables, "SHARDYARD_URL": url}


def shardyard(
    *arguments: str | Path,
    url: str | None = None,
    stdin: str = "",
    timeout_s: float = DEADLINE_S,
    modules: tuple[str, ...] = IMPORTED_LATE,
    **overrides: str,
) -> subprocess.CompletedProcess[str]:
    """Run the command, with `modules` imported already; return its exit code, output and errors."""
    words = [str(argument) for argument in arguments]
    with TemporaryFile("w+") as stdin_file, TemporaryFile("w+") as out, TemporaryFile("w+") as errors:
        stdin_file.write(stdin)
        stdin_file.seek(0)
        process = forks("service.cli.main:main", *modules).start(
            words, stdin=stdin_file, out=out, errors=errors, environment=environment(url, **overrides)
        )
        try:
            code = process.wait(timeout_s)
        finally:
            process.kill()
        out.seek(0)
        errors.seek(0)
        outputs = out.read(), errors.read()
    return subprocess.CompletedProcess(words, code, *outputs)


def output_of(
    *arguments: str | Path, url: str | None = None, modules: tuple[str, ...] = IMPORTED_LATE, **overrides: str
) -> str:
    """Output of a command that succeeds."""
    result = shardyard(*arguments, url=url, modules=modules, **overrides)
    assert result.returncode == 0, result.stderr
    return result.stdout


def json_of(
    *arguments: str | Path, url: str | None = None, modules: tuple[str, ...] = IMPORTED_LATE, **overrides: str
) -> Any:
    return json.loads(output_of(*arguments, "--json", url=url, modules=modules, **overrides))


def check_refused(
    words: str,
    *arguments: str | Path,
    url: str | None = None,
    code: int = 2,
    modules: tuple[str, ...] = IMPORTED_LATE,
    **overrides: str,
) -> str:
    """Check that a command fails, with these words among its errors and no output; return its errors."""
    result = shardyard(*arguments, url=url, modules=modules, **overrides)
    assert (result.returncode, result.stdout) == (code, ""), result.stderr
    assert words in result.stderr, result.stderr
    return result.stderr
