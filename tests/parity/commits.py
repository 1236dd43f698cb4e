"""Commits at which rows are run."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

DIRTY = "-dirty"
"""End of a commit's name where files have changed since."""


def current_commit(repository: Path, written_paths: Sequence[str]) -> str:
    """Full name of the commit that is checked out, ending in `DIRTY` if files other than `written_paths` (from the root
    of the repository) have changed since."""
    others = [".", *(f":(exclude){path}" for path in written_paths)]
    return _git(repository, "rev-parse", "HEAD") + DIRTY * bool(
        _git(repository, "diff", "HEAD", "--name-only", *others)
    )


def commits_to(repository: Path) -> list[str]:
    """Full names of the commit that is checked out and of its ancestors, the newest first."""
    return _git(repository, "rev-list", "HEAD").split()


def _git(repository: Path, *arguments: str) -> str:
    return subprocess.check_output(["git", *arguments], cwd=repository, text=True).strip()
