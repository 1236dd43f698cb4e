"""`make parity`: every router under every layout with every option, in float64, in the tables of docs/parity.md (of the
translation model, of a language model of every kind of attention, and of adapters of it), and every family under every
layout, in docs/parity-of-families.md.

    python -m tests.parity [--part K/N] [--rows PAGE] [--into FOLDER]    runs the grid, a part of it, or a page's rows
    python -m tests.parity --compare BEFORE AFTER    two such folders, of two commits on one machine, bit for bit

Each finished row is stored in the folder, and a row of the same commit is not run again. The part that finds all rows
of a page there writes it.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from tests.parity.findings import DIRTY, Findings, combine, differences, read, read_all, read_or_run
from tests.parity.gloo_ranks import Pools
from tests.parity.grid import FAMILY_ROWS, NAMES, ROUTER_ROWS, row_of
from tests.parity.table import page_of_families, page_of_routers

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Page:
    """A page of docs, and the rows that it has."""

    path: Path
    row_names: tuple[str, ...]
    text_of: Callable[[Findings], str]


PAGES = {
    "routers": Page(ROOT / "docs/parity.md", ROUTER_ROWS, page_of_routers),
    "families": Page(ROOT / "docs/parity-of-families.md", FAMILY_ROWS, page_of_families),
}
FILE = f"{{}}-of-{len(NAMES)}.json"
"""File of a row, by its number from 1."""
DESCRIBE = ["describe", "--always", "--abbrev=40", "--exclude=*", f"--dirty={DIRTY}"]


def part(text: str) -> tuple[int, int]:
    """(number of the part, number of parts)"""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]) <= len(NAMES):
        raise argparse.ArgumentTypeError(f"{text!r} is no K/N with K from 1 to N and N up to {len(NAMES)}")
    return int(match[1]), int(match[2])


def run(number: int, num_parts: int, pages: list[Page], folder: Path) -> int:
    """Number of trainings of this part that differ from one process."""
    torch.set_num_threads(1)  # as on ranks: small models gain nothing from a second, and parts run side by side
    commit = subprocess.check_output(["git", *DESCRIBE], cwd=ROOT, text=True).strip()
    ranks, num_differ = Pools(), 0
    for name in [name for page in pages for name in page.row_names][number - 1 :: num_parts]:
        index = NAMES.index(name)
        row = read_or_run(folder / FILE.format(index + 1), commit, partial(row_of, ranks, index))
        print(row.name, row.num_same, flush=True)
        num_differ += sum(row.num_trainings.values()) - sum(row.num_same.values())
    ranks.close()
    for page in pages:
        paths = [folder / FILE.format(NAMES.index(name) + 1) for name in page.row_names]
        findings = combine(part for path in paths if path.exists() and (part := read(path)).commit == commit)
        if not findings.missing(page.row_names):
            page.path.write_text(page.text_of(findings))
        else:
            num_missing, num_rows = len(findings.missing(page.row_names)), len(page.row_names)
            print(f"{num_missing} of {num_rows} rows are in other parts; the last one writes {page.path}")
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
    parser.add_argument("--part", type=part, default=(1, 1), metavar="K/N")
    parser.add_argument("--rows", choices=PAGES, help="rows of one page instead of both")
    parser.add_argument("--into", type=Path, default=ROOT / "build/parity", metavar="FOLDER")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    arguments = parser.parse_args()
    if arguments.compare:
        return int(compare(*arguments.compare) > 0)
    pages = [PAGES[arguments.rows]] if arguments.rows else list(PAGES.values())
    return int(run(*arguments.part, pages, arguments.into) > 0)


if __name__ == "__main__":
    sys.exit(main())
