"""Result of an attempt, from storage."""

import structlog
from pydantic import ValidationError

from moe.storage.folder import FileTooLarge, Folder
from service.wire.launch import Result

MAX_BYTES = 1 << 24
"""Largest result: many times a report on a thousand languages."""
log = structlog.get_logger(__name__)


def read_result(storage: Folder, attempt: int) -> Result | None:
    """The driver's result; None without one. Raises OSError when storage cannot be read."""
    try:
        text = storage.read(f"attempts/{attempt}/result.json", max_bytes=MAX_BYTES)
    except FileNotFoundError:
        return None
    except FileTooLarge as error:
        log.warning("ignored an unreadable result", storage=storage.url, error=str(error))
        return None
    try:
        return Result.model_validate_json(text)
    except ValidationError:
        return None  # results are written atomically, so no driver wrote this
