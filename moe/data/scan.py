"""Scan of a user's corpus before a job is launched, for a bounded time, in a limited process."""

import json
from collections.abc import Sequence

from moe.data.file_kinds import DAMAGED, HEAD_BYTES, decompress
from moe.data.limited_process import NoAnswer, answer_of
from moe.data.locations import Location
from moe.spec import Problem, SpecError
from moe.spec.bad_records import BadRecordsFields

SECONDS = 10.0
"""Time limit of a scan. Faults beyond it are found when the corpus is prepared."""
_TIMEOUT_S, _MEMORY_BYTES = 40.0, 4 << 30


def scan(
    data: BadRecordsFields, files: Sequence[Location], roots: Sequence[str] | None, checked_bytes: int
) -> None:
    """Raise SpecError with every kind of unusable record of a corpus. `checked_bytes` of all files together were
    checked before; nothing is done if there is no more. Remote files are not scanned, since the process has no
    credentials for them."""
    if any(file.protocol != "file" for file in files):
        return
    if not any(_is_longer(file, checked_bytes // len(files)) for file in files):
        return
    request: dict[str, object] = {
        "data": data.model_dump(mode="json"),
        "roots": None if roots is None else list(roots),
    }
    request["seconds"] = SECONDS
    try:
        answer = answer_of(
            "moe.data.scan_process",
            json.dumps(request).encode(),
            timeout_s=_TIMEOUT_S,
            memory_bytes=_MEMORY_BYTES,
        )
    except NoAnswer:
        return  # preparation reports the cause
    if problems := json.loads(answer):
        raise SpecError([Problem(**problem) for problem in problems])


def _is_longer(file: Location, limit_bytes: int) -> bool:
    """Whether a file may hold more than the beginning that was checked."""
    try:
        with file.raw() as raw:
            if raw.seek(0, 2) > limit_bytes:
                return True
            raw.seek(0)
            is_parquet = raw.read(HEAD_BYTES).startswith(b"PAR1")
            raw.seek(0)
            return is_parquet or decompress(raw) is not None
    except DAMAGED:
        return False
