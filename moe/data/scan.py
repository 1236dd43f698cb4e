"""A look through all records of a user's corpus before a job is launched, for a bounded time, in a limited process."""

import json
from collections.abc import Sequence

from moe.data.file_kinds import DAMAGED, HEAD_BYTES, decompressed
from moe.data.limited import Ended, answer_of
from moe.data.locations import Location
from moe.spec import Problem, SpecError
from moe.spec.bad_records import BadRecordsFields

SECONDS = 10.0
"""Time for which records are looked at. What comes behind is found when the corpus is prepared."""
_TIMEOUT_S, _MEMORY_BYTES = 40.0, 4 << 30


def scan(
    data: BadRecordsFields, files: Sequence[Location], roots: Sequence[str] | None, checked_bytes: int
) -> None:
    """Raise SpecError with all kinds of records of a corpus that cannot be learned from. Its files were looked at up to
    `checked_bytes` of all together before; those of remote stores are not looked at any further, since the process has
    none of the credentials for them."""
    if any(file.protocol != "file" for file in files):
        return
    if not any(_is_longer(file, checked_bytes // len(files)) for file in files):
        return
    given: dict[str, object] = {
        "data": data.model_dump(mode="json"),
        "roots": None if roots is None else list(roots),
    }
    given["seconds"] = SECONDS
    try:
        answer = answer_of(
            "moe.data.scan_process",
            json.dumps(given).encode(),
            timeout_s=_TIMEOUT_S,
            memory_bytes=_MEMORY_BYTES,
        )
    except Ended:
        return  # what it is will be told when the corpus is prepared
    if problems := json.loads(answer):
        raise SpecError([Problem(*problem) for problem in problems])


def _is_longer(file: Location, limit_bytes: int) -> bool:
    """Whether a file may have more than the beginning that was looked at."""
    try:
        with file.raw() as raw:
            if raw.seek(0, 2) > limit_bytes:
                return True
            raw.seek(0)
            is_parquet = raw.read(HEAD_BYTES).startswith(b"PAR1")
            raw.seek(0)
            return is_parquet or decompressed(raw) is not None
    except DAMAGED:
        return False
