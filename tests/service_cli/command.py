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
"""Where no control plane is."""
COMMAND = [sys.executable, "-m", "service.cli.main"]

IMPORTED_LATE = ("moe.plan", "service.cli.server", "service.cli.view.jobs", "service.cli.view.plan", "service.client")
"""What most commands import once they are called."""


def environment(url: str | None = None, **more: str) -> dict[str, str]:
    """This process's environment without what a developer may have set for a control plane of their own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SHARDYARD_")}
    kept |= {"PYTHONPATH": str(ROOT), "COLUMNS": "80", "NO_COLOR": "1"}
    kept |= {"SHARDYARD_PREPARE_CATALOGS": "no", **more}  # which takes the cores for some seconds
    return kept if url is None else {**kept, "SHARDYARD_URL": url}


def shardyard(
    *arguments: str | Path, url: str | None = None, stdin: str = "", timeout_s: float = DEADLINE_S, **more: str
) -> subprocess.CompletedProcess[str]:
    """What the command did: exit code, output, errors."""
    words = [str(argument) for argument in arguments]
    with TemporaryFile("w+") as given, TemporaryFile("w+") as out, TemporaryFile("w+") as errors:
        given.write(stdin)
        given.seek(0)
        running = forks("service.cli.main:main", *IMPORTED_LATE).start(
            words, given=given, out=out, errors=errors, environment=environment(url, **more)
        )
        try:
            code = running.wait(timeout_s)
        finally:
            running.kill()
        out.seek(0)
        errors.seek(0)
        said = out.read(), errors.read()
    return subprocess.CompletedProcess(words, code, *said)


def output_of(*arguments: str | Path, url: str | None = None, **more: str) -> str:
    """Output of a command that succeeds."""
    done = shardyard(*arguments, url=url, **more)
    assert done.returncode == 0, done.stderr
    return done.stdout


def json_of(*arguments: str | Path, url: str | None = None, **more: str) -> Any:
    return json.loads(output_of(*arguments, "--json", url=url, **more))


def check_refused(words: str, *arguments: str | Path, url: str | None = None, code: int = 2, **more: str) -> str:
    """Check that a command fails, prints nothing else and names the fault in these words; all of its errors."""
    done = shardyard(*arguments, url=url, **more)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert words in done.stderr, done.stderr
    return done.stderr
