"""`make parity`: every router under every layout with every option, in float64, in the tables of docs/parity.md (of the
translation model, of a language model of every kind of attention, and of adapters of it), and every family under every
layout, in docs/parity-of-families.md.

    python -m tests.parity [--page PAGE] [--rows PATTERN] [--only-missing] [--part K/N]    runs rows of the grid
    python -m tests.parity --pages                    writes the pages from the records alone
    python -m tests.parity --compare BEFORE AFTER     two folders of rows, of two commits on one machine, bit for bit

Each finished row is recorded, with the commit at which it was run, in benchmarks/results/parity, and the pages are
written from these records. So rows may be run in several goes: those without a record first, then those that differ,
then those of the oldest commits; rows of the current commit are not run again. A row of a tree with uncommitted changes
is not recorded. Each row is also stored with its digests in a folder, for --compare.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import as_completed
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from tests.parity.commits import DIRTY, commits_to, current_commit
from tests.parity.findings import differences, read_all
from tests.parity.grid import FAMILY_ROWS, NAMES, ROUTER_ROWS, num_trainings_of
from tests.parity.records import Record, add_record, read_records
from tests.parity.row_processes import row_processes, run_row
from tests.parity.table import page_of_families, page_of_routers
from tests.parity.wanted import wanted_rows

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Page:
    """A page of docs, its rows and the file of their records; paths from the root of the repository."""

    path: str
    records_path: str
    row_names: tuple[str, ...]
    text_of: Callable[[Mapping[str, Record]], str]

    def write(self) -> None:
        """Write the page from the records of its rows."""
        (ROOT / self.path).write_text(self.text_of(read_records(ROOT / self.records_path)))


PAGES = {
    "families": Page(
        "docs/parity-of-families.md", "benchmarks/results/parity/families.json", FAMILY_ROWS, page_of_families
    ),
    "routers": Page("docs/parity.md", "benchmarks/results/parity/routers.json", ROUTER_ROWS, page_of_routers),
}
FILE = f"{{}}-of-{len(NAMES)}.json"
"""File of a row with its digests, by its number from 1."""


def part(text: str) -> tuple[int, int]:
    """(number of the part, number of parts)"""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]) <= len(NAMES):
        raise argparse.ArgumentTypeError(f"{text!r} is no K/N with K from 1 to N and N up to {len(NAMES)}")
    return int(match[1]), int(match[2])


def run(names: Iterable[str], folder: Path, num_processes: int) -> int:
    """Run rows in processes side by side, record them and write their pages. Return the number of trainings that differ
    from one process."""
    commit = current_commit(ROOT, [path for page in PAGES.values() for path in (page.path, page.records_path)])
    num_differ = 0
    with row_processes(num_processes) as executor:
        futures = [
            executor.submit(run_row, index, commit, folder / FILE.format(index + 1))
            for index in map(NAMES.index, names)
        ]
        for future in as_completed(futures):
            (row,), minutes = future.result().rows, future.result().minutes
            num_differ += sum(row.num_trainings.values()) - sum(row.num_same.values())
            print(row.name, row.num_same, f"{minutes:.1f} minutes", flush=True)
            if not commit.endswith(DIRTY):
                page = next(page for page in PAGES.values() if row.name in page.row_names)
                add_record(ROOT / page.records_path, row.name, Record.of_row(row, commit, minutes))
                page.write()
    return num_differ


def compare(before: Path, after: Path) -> int:
    """Number of trajectories that differ."""
    first, second = read_all(before), read_all(after)
    lines = differences(first, second)
    print(*lines, sep="\n", end="\n" * bool(lines))
    num_trajectories = len({**first.digests, **second.digests})
    print(
        f"{num_trajectories - len(lines)} of {num_trajectories} trajectories are equal in every bit at "
        f"{first.commit} and {second.commit}"
    )
    return len(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__.splitlines()[0])
    parser.add_argument("--page", choices=PAGES, help="rows of one page instead of both")
    parser.add_argument("--rows", default="*", metavar="PATTERN", help="rows whose name matches, as 'language, *'")
    parser.add_argument("--only-missing", action="store_true", help="no rows that are the same at an older commit")
    parser.add_argument("--part", type=part, default=(1, 1), metavar="K/N")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="rows at a time")
    parser.add_argument("--into", type=Path, default=ROOT / "build/parity", metavar="FOLDER")
    parser.add_argument("--pages", action="store_true", help="write the pages from the records, and run nothing")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    arguments = parser.parse_args()
    if arguments.compare:
        return int(compare(*arguments.compare) > 0)
    pages = [PAGES[arguments.page]] if arguments.page else list(PAGES.values())
    if arguments.pages:
        for page in pages:
            page.write()
        return 0
    number, num_parts = arguments.part
    names = [name for page in pages for name in page.row_names
             if fnmatch(name, arguments.rows) and NAMES.index(name) % num_parts == number - 1]  # fmt: skip
    records = {name: record for page in pages for name, record in read_records(ROOT / page.records_path).items()}
    num_trainings = {name: num_trainings_of(name) for name in names}
    names = wanted_rows(num_trainings, records, commits_to(ROOT), arguments.only_missing)
    return int(run(names, arguments.into, arguments.processes) > 0)


if __name__ == "__main__":
    sys.exit(main())
