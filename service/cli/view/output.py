"""Standard output: tables and text for people, JSON for programs."""

import json
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 20_000
"""Wider than any line: piped lines must not be wrapped."""
_SIZE = frozenset({"COLUMNS", "LINES"})


def console() -> "Console":
    """Console for standard output: as wide as the terminal, plain and unwrapped in a pipe."""
    from rich.console import Console

    if not on_terminal():
        return Console(highlight=False, emoji=False, markup=False, width=PIPE_WIDTH)
    # COLUMNS and LINES may be outdated after a resize of the terminal.
    environment = {name: value for name, value in os.environ.items() if name not in _SIZE}
    return Console(highlight=False, emoji=False, markup=False, _environ=environment)


def on_terminal() -> bool:
    """Whether standard output is a terminal, regardless of `FORCE_COLOR`."""
    return sys.stdout.isatty()


def columns_of(out: "Console") -> int | None:
    """Maximal line width; None in a pipe."""
    return out.width if on_terminal() else None


def say(note: str) -> None:
    """Print a remark on a listing; to standard error if that is piped."""
    print(note, file=sys.stdout if on_terminal() else sys.stderr)


def print_json(data: Any, lines: bool = False) -> None:
    """Print `data` as JSON; with `lines`, on one line, flushed."""
    text = json.dumps(data, ensure_ascii=False, indent=None if lines else 2)
    print(text, flush=lines)
