"""Command line: `python -m benchmarks.digests`; see the package."""

import argparse
import importlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SECTIONS = ("schema", "decoding", "plans", "answers", "trajectories")


def measure(sections: tuple[str, ...], quick: bool, contents: Path | None) -> dict[str, Any]:
    """Digests of all items of some sections, with the seconds each section took."""
    digests: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    for section in sections:
        began = time.perf_counter()
        module = importlib.import_module(f"benchmarks.digests.{section}")
        for item in module.items(quick):
            name = f"{section}: {item.name}"
            assert name not in digests, name
            digests[name] = {"sha256": item.sha256, **({"numbers": item.numbers} if item.numbers else {})}
            print(item.sha256[:16], name, flush=True)
            if contents is not None:
                contents.mkdir(parents=True, exist_ok=True)
                (contents / file_name(name)).write_text(item.text + "\n")
        seconds[section] = round(time.perf_counter() - began, 1)
    commit = subprocess.run(["git", "describe", "--always", "--dirty", "--exclude=*"], text=True, capture_output=True)
    return {"commit": commit.stdout.strip(), "quick": quick, "seconds": seconds, "items": digests}


def file_name(name: str) -> str:
    """Name of an item's file."""
    return "".join(c if c.isalnum() or c in "-=.," else "_" for c in name)[:200] + ".json"


def close(first: list[float], second: list[float], tolerance: float) -> bool:
    """Whether all figures agree within a tolerance relative to the larger figure or 1."""
    return len(first) == len(second) and all(
        abs(a - b) <= tolerance * max(1.0, abs(a), abs(b)) for a, b in zip(first, second, strict=True)
    )


def compare(before: dict[str, Any], after: dict[str, Any], tolerance: float) -> int:
    """Print the items that differ and return their number."""
    items_before, items_after = before["items"], after["items"]
    common_names = [name for name in items_before if name in items_after]
    unequal = [name for name in common_names if items_before[name]["sha256"] != items_after[name]["sha256"]]
    close_names = {
        name
        for name in unequal
        if tolerance
        and "numbers" in items_before[name]
        and close(items_before[name]["numbers"], items_after[name]["numbers"], tolerance)
    }
    lines = [f"differs: {name}" for name in unequal if name not in close_names]
    lines += [f"in the first alone: {name}" for name in items_before if name not in items_after]
    lines += [f"in the second alone: {name}" for name in items_after if name not in items_before]
    print(*lines, sep="\n", end="\n" * bool(lines))
    print(f"{len(common_names) - len(unequal)} of {len(common_names)} items are equal at {before['commit']} and "
          f"{after['commit']}; {len(close_names)} within {tolerance}; {len(lines)} differ or are missing")  # fmt: skip
    return len(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.digests")
    parser.add_argument("--quick", action="store_true", help="one layout of each kind; fewer plans")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, metavar="SECTION")
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--contents", type=Path, metavar="FOLDER", help="write each item's content to a file")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    parser.add_argument("--tolerance", type=float, default=0.0, help="of losses and norms of trajectories")
    options = parser.parse_args()
    if options.compare:
        before, after = (json.loads(path.read_text()) for path in options.compare)
        return int(compare(before, after, options.tolerance) > 0)
    record = measure(tuple(options.only), options.quick, options.contents)
    if options.out:
        options.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    print(", ".join(f"{section} {seconds} s" for section, seconds in record["seconds"].items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
