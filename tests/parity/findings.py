"""Results of runs of the grid or of parts of it: stored in a folder, combined, and compared bit for bit."""

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.parity.commits import DIRTY
from tests.parity.grid import NAMES
from tests.parity.row import Row


@dataclass(frozen=True)
class Findings:
    """Rows of one commit, in the order of the grid."""

    commit: str
    minutes: float
    rows: tuple[Row, ...]

    @property
    def digests(self) -> dict[str, dict[str, str]]:
        return {trajectory: digests for row in self.rows for trajectory, digests in row.digests.items()}

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}.draft")
        draft.write_text(json.dumps(asdict(self), indent=1) + "\n")
        draft.replace(path)


def read(path: Path) -> Findings:
    content = json.loads(path.read_text())
    return Findings(**{**content, "rows": tuple(Row(**row) for row in content["rows"])})


def read_or_run(path: Path, commit: str, run: Callable[[], Row]) -> Findings:
    """The findings in a file if they are of this commit without changes and nothing differs; otherwise the row that
    `run` returns, stored there."""
    if path.exists() and not commit.endswith(DIRTY):
        findings = read(path)
        if findings.commit == commit and not any(row.differs for row in findings.rows):
            return findings
    began = time.monotonic()
    row = run()
    findings = Findings(commit, (time.monotonic() - began) / 60, (row,))
    findings.write(path)
    return findings


def combine(parts: Iterable[Findings]) -> Findings:
    """Raise ValueError if the parts are not of one commit, or if there are none."""
    parts = list(parts)
    commits = {part.commit for part in parts}
    if len(commits) != 1:
        raise ValueError(f"parts of one commit are put together, and these are of {sorted(commits)}")
    by_name = {row.name: row for part in parts for row in part.rows}
    rows = tuple(by_name[name] for name in NAMES if name in by_name)
    return Findings(commits.pop(), sum(part.minutes for part in parts), rows)


def read_all(folder: Path) -> Findings:
    """All findings in a folder, combined."""
    return combine(read(path) for path in sorted(folder.glob("*.json")))


def differences(before: Findings, after: Findings) -> list[str]:
    """A line for each trajectory that differs in any bit or is not in both."""
    lines = []
    for trajectory in {**before.digests, **after.digests}:
        first, second = (findings.digests.get(trajectory) for findings in (before, after))
        if first is None or second is None:
            lines.append(f"{trajectory}: only {'after' if first is None else 'before'}")
        elif not first or not second:
            lines.append(f"{trajectory}: did not end")
        elif kinds := [kind for kind in {**first, **second} if first.get(kind) != second.get(kind)]:
            lines.append(f"{trajectory}: {', '.join(kinds)} differ")
    return lines
