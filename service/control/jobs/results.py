"""Result by which an attempt says that it ended."""

import structlog
from pydantic import ValidationError

from moe.storage.folder import FileTooLarge, Folder
from service.wire.launch import Result

MAX_BYTES = 1 << 24
"""Of a result: many times what a report of a thousand languages has."""
log = structlog.get_logger(__name__)


def read_result(storage: Folder, attempt: int) -> Result | None:
    """The driver's last word, or None where it left none. Raises OSError when storage cannot be read."""
    try:
        text = storage.read(f"attempts/{attempt}/result.json", max_bytes=MAX_BYTES)
    except FileNotFoundError:
        return None
    except FileTooLarge as error:
        log.warning("a result is passed over", storage=storage.url, error=str(error))
        return None
    try:
        return Result.model_validate_json(text)
    except ValidationError:
        return None  # it is written in one piece, so this is not a driver's word
