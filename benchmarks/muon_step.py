"""A training step of the decoder of `language_step` with Muon, and with AdamW, in turns.

Muon orthogonalizes every matrix once a step, whatever the number of micro-batches, so its share of the step is measured
at several numbers of micro-batches of 2,048 tokens.
"""

import argparse
import os
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.decoders import Case, Side, in_turns, ratio, save_weights
from benchmarks.language_step import ADAMW, LENGTH, ROWS, shardyard_round

LIMIT = 1.2
MUON = {"name": "muon", **{name: value for name, value in ADAMW.items() if name != "name"}}


def compare(folder: str, dtype: str, num_threads: int, num_micro_batches: int, num_rounds: int) -> dict[str, Any]:
    """Seconds of both steps, and the median of their ratios by the clock and by processor time."""
    case = Case(folder, dtype, num_threads)
    sides = {
        optimizer["name"]: Side(
            partial(shardyard_round, optimizer=optimizer, num_micro_batches=num_micro_batches), case
        )
        for optimizer in (ADAMW, MUON)
    }
    rounds = in_turns(sides, num_rounds)
    peaks = {name: side.end() / 1024**2 for name, side in sides.items()}
    seconds = {name: [result.seconds for result in rounds[name]] for name in sides}
    processor_s = {name: [result.processor_s for result in rounds[name]] for name in sides}
    return {
        "dtype": dtype, "threads": num_threads, "micro_batches": num_micro_batches,
        "step_s": {name: statistics.median(values) for name, values in seconds.items()},
        "processor_s": {name: statistics.median(values) for name, values in processor_s.items()},
        "peak_anonymous_mib": peaks, "losses": {name: [result.answer for result in rounds[name]] for name in sides},
        "ratio": ratio(seconds["muon"], seconds["adamw"]),
        "ratio_by_processor": ratio(processor_s["muon"], processor_s["adamw"]),
    }  # fmt: skip


def show(row: dict[str, Any]) -> None:
    step_s, processor_s = row["step_s"], row["processor_s"]
    print(f"\n{row['dtype']}, {row['threads']} threads, {row['micro_batches']} micro-batches of {ROWS * LENGTH} tokens")
    for name in step_s:
        print(
            f"  {name:<6}{step_s[name]:6.2f} s a step, processor {processor_s[name]:6.2f} s, "
            f"{row['peak_anonymous_mib'][name]:7.0f} MiB at the peak"
        )
    print(
        f"  Muon's step takes {row['ratio']:.2f} times as long (by the processor's time "
        f"{row['ratio_by_processor']:.2f}; limit {LIMIT})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4, 8])
    args, cases = parser.parse_args(), []
    with tempfile.TemporaryDirectory() as folder:
        save_weights(Path(folder))
        for dtype in args.dtypes:
            for num_micro_batches in args.micro_batches:
                cases.append(compare(folder, dtype, args.threads, num_micro_batches, args.rounds))
                show(cases[-1])
    shape = {"rows": ROWS, "length": LENGTH, "rounds": args.rounds}
    print(f"written to {results.write('muon_step', {**shape, 'cases': cases})}")


if __name__ == "__main__":
    main()
