"""A process that records until it is killed, and prints each step: `URL STORAGE TMP NAME`."""

import os
import sys
import tempfile

from moe.records import StepRecord
from service.run.recorder import SpoolRecorder


def recorder(url: str, storage: str, name: str, attempt: int = 1) -> SpoolRecorder:
    return SpoolRecorder(
        job_id="job-aaaaaaaaaaaa", attempt=attempt, storage=storage, events_url=url, token="secret",
        name=name, speaks=True, sweeps=True,
    )  # fmt: skip


def main() -> None:
    url, storage, tempfile.tempdir, name = sys.argv[1:]
    run = recorder(url, storage, name)
    step = 0
    while True:
        step += 1
        run.metric(StepRecord(step, loss=1.0 / step))
        os.write(1, f"{step}\n".encode())


if __name__ == "__main__":
    main()
