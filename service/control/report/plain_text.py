"""Lines of text without what steers a terminal: whatever a job prints is read in terminals, editors and pages."""

import re

_SEQUENCES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, movements of the cursor
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)"  # OSC and its like: titles, links, clipboards
    r"|\x1b[ -/]*[0-~]?"
    r"|\x9b[0-?]*[ -/]*[@-~]"
)
"""Escape sequences of ECMA-48; of one that was cut short, its beginning."""
_CONTROLS = re.compile(
    "[\x00-\x08\x0a-\x1f\x7f-\x9f\u200e\u200f\u061c\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)
"""Control characters other than tabs, and characters that change the direction of text."""


def plain_text(line: str) -> str:
    """A line as it is to be read; where a carriage return was, a space is."""
    if line.isprintable():
        return line
    return _CONTROLS.sub("", _SEQUENCES.sub("", line).rstrip("\r").replace("\r", " "))
