"""Standard output: tables and words for people, JSON for programs."""

import json
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 20_000
"""Wider than any line: what is in a pipe is read by grep and cut, and must not be folded where no terminal ends."""
_SIZE = frozenset({"COLUMNS", "LINES"})


def console() -> "Console":
    """Standard output as it is: coloured and as wide as the terminal, plain and never folded in a pipe."""
    from rich.console import Console

    if not on_terminal():
        return Console(highlight=False, emoji=False, markup=False, width=PIPE_WIDTH)
    # COLUMNS and LINES are those of the shell's start; a resized terminal has other ones.
    environment = {name: value for name, value in os.environ.items() if name not in _SIZE}
    return Console(highlight=False, emoji=False, markup=False, _environ=environment)


def on_terminal() -> bool:
    """Whether standard output is a terminal: where colours are forced (`FORCE_COLOR`), a pipe is still a pipe."""
    return sys.stdout.isatty()


def columns_of(out: "Console") -> int | None:
    """Width that a line may have; None in a pipe, where lines are whole."""
    return out.width if on_terminal() else None


def say(note: str) -> None:
    """Prints a remark on a listing: below it on a terminal, beside it where the listing goes into a pipe."""
    print(note, file=sys.stdout if on_terminal() else sys.stderr)


def print_json(data: Any, lines: bool = False) -> None:
    """`data` on standard output; with `lines`, on one line, and at once."""
    text = json.dumps(data, ensure_ascii=False, indent=None if lines else 2)
    print(text, flush=lines)
