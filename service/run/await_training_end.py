"""Wait until no training runs in this container: the hook of a pod that is told to end.

It leaves a notice, by which the run commits a checkpoint and ends. Until then this process keeps the kubelet from
terminating Ray, at most for the pod's grace period.
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
    """Ids of the drivers and workers that this container's processes include."""
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
