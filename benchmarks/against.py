"""`make bench AGAINST=COMMIT`: time the layer and the demo's training step at that commit and in this worktree, in
turns.

Each side is a separate process with the memory settings and threads of training; the commit's runs from a worktree of
it. Both get the same tokens, weights and measured costs of experts. They run their rounds in turns, and which one is
first alternates. The result is the median of the differences of these pairs, with their quartiles.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import results

ROOT = Path(__file__).parents[1]
DTYPES = ("float32", "bfloat16")
ROUNDS = 31
PASSES_A_ROUND, STEPS_A_ROUND = 5, 10
WARM_UP_ROUNDS = 2


class Side:
    """A process with one commit's package, for one case."""

    def __init__(self, root: Path, num_threads: int) -> None:
        from moe.train.environment import KEEP_FREED_MEMORY

        self._process = subprocess.Popen(
            [sys.executable, "-P", ROOT / "benchmarks/side.py"],
            env={**os.environ, **KEEP_FREED_MEMORY, "PYTHONPATH": str(root), "OMP_NUM_THREADS": str(num_threads)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def begin(self, case: dict[str, Any]) -> str | None:
        """Return why this commit cannot run the case, or None if it can."""
        return self._ask(case)["lacking"]

    def seconds(self, number: int) -> float:
        """Seconds of one round."""
        return self._ask({"round": number})["seconds"]

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"a side ended with code {self._process.wait()}: see above")
        return json.loads(line)


def compare(before_side: Side, current_side: Side, case: dict[str, Any], num_rounds: int) -> dict[str, Any]:
    """Figures of the pairs of rounds, or under `lacking` why a side cannot run the case."""
    sides = {"before": before_side, "now": current_side}
    lacking = {name: words for name, side in sides.items() if (words := side.begin(case))}
    if lacking:
        return {"lacking": lacking}
    pairs = []
    for number in range(-WARM_UP_ROUNDS, num_rounds):
        order = list(sides) if number % 2 else list(sides)[::-1]
        seconds = {name: sides[name].seconds(number + WARM_UP_ROUNDS) for name in order}
        if number >= 0:
            pairs.append((seconds["before"], seconds["now"]))
    return figures(pairs)


def figures(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """Figures of pairs of seconds (before, now)."""
    differences = [current_s / earlier_s - 1 for earlier_s, current_s in pairs]
    low, _, high = statistics.quantiles(differences, n=4)
    return {
        "before_ms": 1e3 * statistics.median(earlier_s for earlier_s, _ in pairs),
        "now_ms": 1e3 * statistics.median(current_s for _, current_s in pairs),
        "difference": statistics.median(differences),
        "quartiles": [low, high],
        "rounds": len(pairs),
    }


def cases(folder: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, request that begins the case). Both sides share the files in `folder`."""
    from benchmarks.contenders import SHAPES
    from service.settings import Settings

    demo = ROOT / "examples/translate-100-to-english.yaml"
    cache = str(Settings().cache_dir)
    yield "the demo's training step", {
        "kind": "demo", "job": str(demo), "cache": cache, "folder": folder, "steps": STEPS_A_ROUND,
    }  # fmt: skip
    for dtype in DTYPES:
        for shape in SHAPES:
            spec = shape.spec(**shape.dropless).model_dump(mode="json", exclude_unset=True)
            yield f"{shape}, {dtype}", {
                "kind": "layer", "spec": spec, "tokens": shape.tokens, "dtype": dtype, "folder": folder,
                "passes": PASSES_A_ROUND,
            }  # fmt: skip


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """Temporary worktree of the commit."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "before"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", root, commit], cwd=ROOT, check=True)
        try:
            yield root
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", root], cwd=ROOT, check=True)


def line(case: dict[str, Any]) -> str:
    """Figures of a case as a line of text."""
    if "lacking" in case:
        return "left out: " + "; ".join(f"{side}, {words}" for side, words in case["lacking"].items())
    low, high = case["quartiles"]
    return (
        f"{case['before_ms']:8.1f} ms before, {case['now_ms']:8.1f} now: {case['difference']:+.1%} "
        f"({low:+.1%} to {high:+.1%}, {case['rounds']} rounds)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.against", description=__doc__)
    parser.add_argument("commit")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    commits = {
        "before": subprocess.check_output(["git", "rev-parse", args.commit], cwd=ROOT, text=True).strip(),
        "now": subprocess.check_output(["git", "describe", "--always", "--dirty"], cwd=ROOT, text=True).strip(),
    }
    case_figures = {}
    with checked_out(args.commit) as before, tempfile.TemporaryDirectory() as folder:
        for name, case in cases(folder):
            with Side(before, args.threads) as before_side, Side(ROOT, args.threads) as current_side:
                case_figures[name] = compare(before_side, current_side, case, args.rounds)
            print(f"{name:<56}{line(case_figures[name])}", flush=True)
    path = results.write("against", {"commits": commits, "threads": args.threads, "cases": case_figures})
    print(f"written to {path}")


if __name__ == "__main__":
    main()
