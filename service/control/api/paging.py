"""Cursors: positions in a list that stay valid when entries are added."""

import base64
import binascii

from moe.spec.errors import Problem
from service.control.errors import Invalid


def write_cursor(number: int) -> str:
    """For jobs, the last one's number; for metrics, the next page's first step. Opaque to clients."""
    return base64.urlsafe_b64encode(f"n{number}".encode()).decode().rstrip("=")


def read_cursor(cursor: str) -> int:
    """Number in a cursor. Raises Invalid for one that this service did not write."""
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode("ascii")
    except (binascii.Error, ValueError):
        text = ""
    if not (text.startswith("n") and text[1:].isdecimal() and len(text) < 20):
        problem = Problem(
            "invalid_value", "query.cursor", cursor, "is not a cursor of this service", "use the next_cursor of a page"
        )
        raise Invalid(str(problem), problem)
    return int(text[1:])
