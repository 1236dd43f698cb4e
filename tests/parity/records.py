"""Rows that were run, with the commit of each, in files under version control."""

import fcntl
import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tests.parity.row import Row


@dataclass(frozen=True)
class Record:
    """Results of a row without digests."""

    commit: str
    """Full name of the commit at which the row was run."""
    torch: str
    machine: str
    minutes: float
    num_ranks: int
    num_same: dict[str, int]
    num_trainings: dict[str, int]

    @classmethod
    def of_row(cls, row: Row, commit: str, minutes: float) -> "Record":
        """Record of a row that was run on this machine."""
        return cls(
            commit, torch.__version__, platform.machine(), round(minutes, 2), row.num_ranks, row.num_same,
            row.num_trainings,
        )  # fmt: skip

    @property
    def differs(self) -> bool:
        """Whether any training differs from one process."""
        return self.num_same != self.num_trainings


def read_records(path: Path) -> dict[str, Record]:
    """Records of a page by the row's name; none if there is no file."""
    if not path.exists():
        return {}
    return {name: Record(**fields) for name, fields in json.loads(path.read_text()).items()}


def add_record(path: Path, name: str, record: Record) -> dict[str, Record]:
    """Replace or add a row's record, and return all of the page. Parts of the grid that run side by side take turns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        records = {**read_records(path), name: record}
        write_records(path, records)
    finally:
        os.close(folder)
    return records


def write_records(path: Path, records: dict[str, Record]) -> None:
    """Write a page's records, a row a line."""
    lines = [f" {json.dumps(name)}: {json.dumps(asdict(record))}" for name, record in records.items()]
    draft = path.with_suffix(f".{os.getpid()}.draft")
    draft.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    draft.replace(path)
