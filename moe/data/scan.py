"""Check of a corpus before a job is launched; the user's own files are scanned for a limited time, in a limited
process."""

import json
from collections.abc import Sequence

from moe.data.compression import DAMAGED, decompress
from moe.data.corpus import CHECK_BYTES, Corpus
from moe.data.file_kinds import HEAD_BYTES, TABLE_MAGICS
from moe.data.limited_process import LimitedProcessError, run_limited
from moe.data.locations import Location
from moe.spec import Problem, SpecError
from moe.spec.bad_records import BadRecordsFields
from moe.spec.base import Spec

SECONDS = 10.0
"""Time limit of a scan. Faults beyond it are found when the corpus is prepared."""
_TIMEOUT_S, _MEMORY_BYTES = 40.0, 4 << 30


def check_corpus(corpus: Corpus, data: Spec, roots: Sequence[str] | None) -> tuple[str, ...]:
    """Check a corpus quickly; return warnings. Raises SpecError for its faults. `roots`: folders that must contain the
    user's files (None: anywhere)."""
    warnings = corpus.check()
    if isinstance(data, BadRecordsFields):
        _scan(data, corpus.user_files, roots)
    return warnings


def _scan(data: BadRecordsFields, files: Sequence[Location], roots: Sequence[str] | None) -> None:
    """Raise SpecError with every kind of unusable record of a corpus, unless its check has read all of it. Remote files
    are not scanned, since the process has no credentials for them."""
    if any(file.protocol != "file" for file in files):
        return
    if not any(_is_longer(file, CHECK_BYTES // len(files)) for file in files):
        return
    request: dict[str, object] = {"data": data.model_dump(mode="json"), "roots": None if roots is None else list(roots)}
    request["seconds"] = SECONDS
    try:
        answer = run_limited(
            "moe.data.scan_process", json.dumps(request).encode(), timeout_s=_TIMEOUT_S, memory_bytes=_MEMORY_BYTES
        )
    except LimitedProcessError:
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
            has_schema = raw.read(HEAD_BYTES).startswith(TABLE_MAGICS)
            raw.seek(0)
            return has_schema or decompress(raw) is not None
    except DAMAGED:
        return False
