"""Kinds of files that users can download, by path in the job's folder."""

import re
from enum import StrEnum


class FileKind(StrEnum):
    SPEC = "spec"
    RESULT = "result"
    CHECKPOINTS = "checkpoints"
    LOGS = "logs"
    PROFILE = "profile"


_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.\-]*"
_OF_KIND = {
    FileKind.SPEC: re.compile(r"spec\.json"),
    FileKind.RESULT: re.compile(r"attempts/[1-9][0-9]*/result\.json"),
    FileKind.CHECKPOINTS: re.compile(rf"checkpoints/step-[0-9]{{8,}}\.a[0-9]+\.g[0-9]+(\.commit\.json|(/\.?{_NAME})+)"),
    FileKind.LOGS: re.compile(r"logs/a[1-9][0-9]*\.(driver|g[0-9]+(\.rank-[0-9]+)?)/segment-[0-9]{8,}\.log"),
    FileKind.PROFILE: re.compile(r"profile/steps-[0-9]+-[0-9]+\.rank-[0-9]+\.json\.gz"),
}


def kind_of(path: str) -> FileKind | None:
    """Kind of the file at a path in a job's folder; None for private files."""
    return next((kind for kind, pattern in _OF_KIND.items() if pattern.fullmatch(path)), None)
