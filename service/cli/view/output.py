"""Standard output: tables and words for people, JSON for programs."""

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 200


def console() -> "Console":
    """Standard output as it is: coloured and as wide as the terminal, plain and wide in a pipe."""
    from rich.console import Console

    found = Console(highlight=False, emoji=False, markup=False)
    if not found.is_terminal:
        # A table in a pipe is read by grep and cut: it must not be folded at the 80 columns of no terminal.
        found = Console(highlight=False, emoji=False, markup=False, width=PIPE_WIDTH)
    return found


def print_json(data: Any, lines: bool = False) -> None:
    """`data` on standard output; with `lines`, on one line, and at once."""
    text = json.dumps(data, ensure_ascii=False, indent=None if lines else 2)
    print(text, flush=lines)
