"""preStop hook of a pod: leaves an end notice, on which the run commits a checkpoint and ends, and waits for that.

The kubelet does not terminate Ray while the hook runs, at most for the pod's grace period.
"""

import time
from collections.abc import Iterator
from pathlib import Path

from service.run.end_notice import give_notice

LOOK_INTERVAL_S = 0.5
_DRIVER = "service.run.driver"
_WORKER = "ray::RayTrainWorker"
"""Title of Ray Train's worker processes, before the name of a running method."""


def training_processes(proc: Path = Path("/proc")) -> Iterator[int]:
    """Process ids of the drivers and workers in this container."""
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            arguments = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # it has ended
        if arguments[0].startswith(_WORKER) or _DRIVER in arguments:
            yield int(folder.name)


def main() -> None:
    give_notice()
    while any(training_processes()):
        time.sleep(LOOK_INTERVAL_S)


if __name__ == "__main__":
    main()
