"""`python -m benchmarks [NAME ...]`: all benchmarks of the product, or the named ones, each in its own process.

`published` (writes a page of the docs), `upcycling` (trains for some minutes), `layer` and `layer_two_ranks` run only
when named. The last two need libraries that are installed separately; `make bench` runs them as well.
"""

import subprocess
import sys
from pathlib import Path

PRODUCT = (
    "packages",
    "streaming",
    "coverage",
    "interchange",
    "training",
    "pipeline",
    "plans",
    "planner",
    "recording",
    "tracking",
    "host_waits",
    "stream_delay",
    "launch_time",
    "cluster_start",
    "head_recovery",
    "first_job",
    "command_line",
    "control_plane",
    "job_page",
    "job_list",
    "log_pages",
    "kubernetes_watch",
    "sharded_experts",
    "sharded_optimizer",
    "planning",
    "one_program",
    "sharded_step",
    "sharded_peers",
    "own_models",
    "two_layouts",
    "language_step",
    "muon_step",
    "context",
    "language_generation",
)
NAMES = (*PRODUCT, "published", "upcycling", "layer", "layer_two_ranks")


def main() -> int:
    names = sys.argv[1:] or PRODUCT
    if unknown := [name for name in names if name not in NAMES]:
        print(f"benchmarks: no {', '.join(unknown)}; there are {', '.join(NAMES)}", file=sys.stderr)
        return 2
    failures = []
    for name in names:
        print(f"== {name}", flush=True)
        command = [sys.executable, "-m", f"benchmarks.{name}"]
        if subprocess.run(command, cwd=Path(__file__).parents[1], check=False).returncode:
            failures.append(name)
    if failures:
        print(f"benchmarks: {', '.join(failures)} failed", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
