"""`make parity`: every router under every layout with every option, in float64, in tables in docs/parity.md: of the
translation model, of a language model of every kind of attention, and of adapters of it.

    python -m tests.parity [--part K/N] [--into FOLDER]     runs the grid, or one part of it
    python -m tests.parity --compare BEFORE AFTER           two such folders, of two commits on one machine, bit for bit

Each finished row is stored in the folder, and a row of the same commit is not run again. The part that finds all rows
there writes the tables.
"""

import argparse
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch

from tests.parity.combinations import ROUTERS
from tests.parity.findings import DIRTY, combine, differences, read, read_all, read_or_run
from tests.parity.gloo_ranks import Pools
from tests.parity.grid import NAMES, row_of
from tests.parity.table import page

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs/parity.md"
FILE = f"{{}}-of-{len(NAMES)}.json"
"""File of a row, by its number from 1."""
DESCRIBE = ["describe", "--always", "--abbrev=40", "--exclude=*", f"--dirty={DIRTY}"]


def part(text: str) -> tuple[int, int]:
    """(number of the part, number of parts)"""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]) <= len(NAMES):
        raise argparse.ArgumentTypeError(f"{text!r} is no K/N with K from 1 to N and N up to {len(NAMES)}")
    return int(match[1]), int(match[2])


def run(number: int, num_parts: int, folder: Path) -> int:
    """Number of trajectories of this part that differ from one process."""
    torch.set_num_threads(1)  # as on ranks: small models gain nothing from a second, and parts run side by side
    commit = subprocess.check_output(["git", *DESCRIBE], cwd=ROOT, text=True).strip()
    ranks, num_differ = Pools(), 0
    for index in range(number - 1, len(NAMES), num_parts):
        row = read_or_run(folder / FILE.format(index + 1), commit, partial(row_of, ranks, index))
        print(row.name, row.num_same, flush=True)
        num_differ += sum(len(ROUTERS) - num_same for num_same in row.num_same.values())
    ranks.close()
    all_findings = combine(
        findings for findings in map(read, folder.glob(FILE.format("*"))) if findings.commit == commit
    )
    if not all_findings.missing:
        TABLE.write_text(page(all_findings))
    else:
        print(f"{len(all_findings.missing)} of {len(NAMES)} rows are in other parts; the last one writes {TABLE}")
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
    parser.add_argument("--into", type=Path, default=ROOT / "build/parity", metavar="FOLDER")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    arguments = parser.parse_args()
    return int((compare(*arguments.compare) if arguments.compare else run(*arguments.part, arguments.into)) > 0)


if __name__ == "__main__":
    sys.exit(main())
