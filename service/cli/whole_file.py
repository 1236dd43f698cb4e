"""Atomic writes of files."""

import secrets
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
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
