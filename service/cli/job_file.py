"""Job file of a command: a path, or `-` for standard input."""

import sys
from pathlib import Path
from typing import Any

from service.cli.failures import Misuse

STANDARD_INPUT = Path("-")


def plain_job(file: Path) -> dict[str, Any]:
    """The job as plain data. Raises SpecError, OSError, Misuse if it is no job."""
    from moe.spec.files import MAX_SPEC_BYTES, parse_stream, read_plain

    if file == STANDARD_INPUT:
        fields = parse_stream(sys.stdin.buffer.read(MAX_SPEC_BYTES + 1), "standard input")
    else:
        fields = read_plain(file)
    if not isinstance(fields, dict):
        where = "standard input" if file == STANDARD_INPUT else file
        raise Misuse(f"{where} is empty; write a job: model, data and train")
    return fields
