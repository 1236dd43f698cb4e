"""Files of commands: the job file, a path or `-` for standard input; atomic writes."""

import secrets
import sys
from pathlib import Path
from typing import Any

from service.cli.failures import Misuse

STANDARD_INPUT = Path("-")


def plain_job(file: Path) -> dict[str, Any]:
    """The job as plain data. Raises SpecError, OSError, Misuse if it is not a job."""
    from moe.spec.files import MAX_SPEC_BYTES, parse_stream, read_plain

    if file == STANDARD_INPUT:
        fields = parse_stream(sys.stdin.buffer.read(MAX_SPEC_BYTES + 1), "standard input")
    else:
        fields = read_plain(file)
    if not isinstance(fields, dict):
        source = "standard input" if file == STANDARD_INPUT else file
        raise Misuse(f"{source} is empty; write a job: model, data and train")
    return fields


def write_atomically(path: Path, text: str) -> None:
    """Write `path` atomically. Raises OSError with its name."""
    is_of_the_system = path.absolute().parts[1] in ("dev", "proc")  # /dev/stdout may lead to a file
    is_a_file = path.is_file() or not path.exists()
    if is_of_the_system or not is_a_file:  # os.replace would replace the special file
        path.write_text(text, encoding="utf-8")
        return
    final = path.resolve()  # keeps symbolic links
    draft = final.with_name(f".{final.name}.{secrets.token_hex(8)}.draft")
    try:
        stream = draft.open("x", encoding="utf-8")
    except OSError as error:
        error.filename = str(path)
        raise
    try:
        with stream:
            stream.write(text)
        draft.replace(final)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
