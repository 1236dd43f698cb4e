"""How an attempt says that it ended."""

import fsspec
from pydantic import ValidationError

from service.launch.launcher import Result


def read_result(storage: str, attempt: int) -> Result | None:
    """The driver's last word, or None where it left none. Raises OSError when storage cannot be read."""
    files, path = fsspec.core.url_to_fs(f"{storage}/attempts/{attempt}/result.json")
    try:
        files.invalidate_cache()
        text = files.cat_file(path)
    except FileNotFoundError:
        return None
    try:
        return Result.model_validate_json(text)
    except ValidationError:
        return None  # it is written in one piece, so this is not a driver's word
