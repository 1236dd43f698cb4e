"""How an attempt says that it ended."""

from pydantic import ValidationError

from moe.train.folder import Folder
from service.launch.launcher import Result


def read_result(storage: Folder, attempt: int) -> Result | None:
    """The driver's last word, or None where it left none. Raises OSError when storage cannot be read."""
    try:
        text = storage.read(f"attempts/{attempt}/result.json")
    except FileNotFoundError:
        return None
    try:
        return Result.model_validate_json(text)
    except ValidationError:
        return None  # it is written in one piece, so this is not a driver's word
