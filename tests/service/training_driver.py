"""A driver that trains in this one process, without Ray: real losses, real checkpoints.

It heeds one label of `local_driver`: `die_at`.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch

from moe.parallel import Layout
from moe.records import CheckpointRecord, StepRecord
from moe.tasks.build import build_task
from moe.train.control import Control, Request
from moe.train.loop import train
from moe.train.recorder import FinishActivity, Level, Recorder
from service.wire.attempt_folder import AttemptFolder
from service.wire.launch import Launch, Result
from tests.service.local_driver import Sender


class _Reports(Recorder):
    """Hands every record to the sender, and dies at the step in `die_at`, once all records before it are sent."""

    def __init__(self, launch: Launch, sender: Sender) -> None:
        self._launch, self._sender = launch, sender

    def record_resume(self, step: int, checkpoint: str | None) -> None:
        self._sender.add("resumed", group=0, num_workers=1, step=step, checkpoint=checkpoint)

    def record_finish(self, step: int, activity: FinishActivity) -> None:
        self._sender.add("finishing", step=step, activity=activity)

    def metric(self, record: StepRecord) -> None:
        if self._launch.spec.labels.get("die_at") == str(record.step) and self._launch.attempt == 1:
            self._sender.close()
            os._exit(1)
        self._sender.add("metric", **record.to_plain())

    def checkpoint(self, record: CheckpointRecord) -> None:
        self._sender.add("checkpoint", **record.to_plain())

    def checkpoint_failed(self, step: int, reason: str) -> None:
        self._sender.add("checkpoint_failed", step=step, reason=reason)

    def log(self, level: Level, message: str, **fields: Any) -> None:
        self._sender.add("log", level=level, message=message)

    def close(self) -> None:
        """The sender is closed when the run is over."""


class _Requests(Control):
    def __init__(self, sender: Sender) -> None:
        self._sender = sender

    def poll(self) -> Request | None:
        return self._sender.request  # type: ignore[return-value]


def main(path: str) -> None:
    folder, launch = AttemptFolder.open_launch(path)
    torch.set_num_threads(1)
    sender = Sender(launch.model_dump(mode="json"))
    sender.add("started", group=0, workers=[{"rank": 0, "node": "local", "device": "cpu"}])
    try:
        task = build_task(launch.spec, launch.allowed_code)
        data = task.prepare(launch.cache, roots=launch.data_roots)
        outcome = train(
            task, launch.plan, Layout.build(launch.plan), data=data, storage=launch.storage,
            cache=Path(launch.cache), attempt=launch.attempt, group=0, recorder=_Reports(launch, sender),
            control=_Requests(sender), pause_at=launch.pause_at,
        )  # fmt: skip
    finally:
        sender.close()
    report = outcome.report.to_plain() if outcome.report else None
    folder.write_result(Result(outcome=outcome.kind, step=outcome.step, report=report))


if __name__ == "__main__":
    main(sys.argv[1])
