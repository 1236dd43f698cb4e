"""`make parity`: every router under every layout with every option, in float64, in tables in docs/parity.md: of the
translation model, of a language model of every kind of attention, and of adapters of it.

    python -m tests.parity [--part K/N] [--into FOLDER]     runs the grid, or one part of it
    python -m tests.parity --compare BEFORE AFTER           two such folders, of two commits on one machine, bit for bit

Each row is left in the folder as it is found, and one of the same commit is not run again; the part that finds all rows
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
from tests.parity.findings import DIRTY, differences, found_or_run, read, read_all, together
from tests.parity.gloo_ranks import Pools
from tests.parity.grid import NAMES, row_of
from tests.parity.table import page

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs/parity.md"
FILE = f"{{}}-of-{len(NAMES)}.json"
"""File of a row, by its number from 1."""
DESCRIBE = ["describe", "--always", "--abbrev=40", "--exclude=*", f"--dirty={DIRTY}"]


def part(text: str) -> tuple[int, int]:
    """(which, of how many)."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]) <= len(NAMES):
        raise argparse.ArgumentTypeError(f"{text!r} is no K/N with K from 1 to N and N up to {len(NAMES)}")
    return int(match[1]), int(match[2])


def run(number: int, num_parts: int, folder: Path) -> int:
    """How many trajectories of this part differ from one process."""
    torch.set_num_threads(1)  # as ranks have: a second gains small models nothing, and parts run side by side
    commit = subprocess.check_output(["git", *DESCRIBE], cwd=ROOT, text=True).strip()
    ranks, num_differ = Pools(), 0
    for at in range(number - 1, len(NAMES), num_parts):
        row = found_or_run(folder / FILE.format(at + 1), commit, partial(row_of, ranks, at))
        print(row.name, row.num_same, flush=True)
        num_differ += sum(len(ROUTERS) - num_same for num_same in row.num_same.values())
    ranks.close()
    whole = together(found for found in map(read, folder.glob(FILE.format("*"))) if found.commit == commit)
    if not whole.missing:
        TABLE.write_text(page(whole))
    else:
        print(f"{len(whole.missing)} of {len(NAMES)} rows are in other parts; the last one writes {TABLE}")
    return num_differ


def compare(before: Path, after: Path) -> int:
    """How many trajectories differ."""
    one, other = read_all(before), read_all(after)
    lines = differences(one, other)
    print(*lines, sep="\n", end="\n" * bool(lines))
    both = len({**one.digests, **other.digests})
    print(f"{both - len(lines)} of {both} trajectories are equal in every bit at {one.commit} and {other.commit}")
    return len(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__.splitlines()[0])
    parser.add_argument("--part", type=part, default=(1, 1), metavar="K/N")
    parser.add_argument("--into", type=Path, default=ROOT / "build/parity", metavar="FOLDER")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    chosen = parser.parse_args()
    return int((compare(*chosen.compare) if chosen.compare else run(*chosen.part, chosen.into)) > 0)


if __name__ == "__main__":
    sys.exit(main())
