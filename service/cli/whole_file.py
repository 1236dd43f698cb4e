"""Files that are there whole or not at all."""

import secrets
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Writes beside `path` and renames: whoever reads sees what was there before, or all of `text`. Raises OSError with
    the name of `path`."""
    is_of_the_system = path.absolute().parts[1] in ("dev", "proc")  # /dev/stdout may lead to a file
    is_a_file = path.is_file() or not path.exists()
    if is_of_the_system or not is_a_file:  # not a regular file, which os.replace would replace
        path.write_text(text, encoding="utf-8")
        return
    final = path.resolve()  # keep a symbolic link
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
