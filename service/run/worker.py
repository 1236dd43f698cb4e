"""One worker of a group: joins it, selects its device, prepares data, and trains.

Runs in a Ray Train worker with the default process group (gloo) up. Only the result is reported to Ray Train:
`ray.train.report` is a slow barrier, and the newest verified marker on storage alone decides where a run resumes.
"""

import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe.activity import doing
from moe.plan import Plan
from moe.records import CheckpointRecord, StepRecord
from moe.spec import SpecError
from moe.storage.folder import Folder
from moe.tasks.task import PreparedData, Task
from moe.train.checkpoint import marker
from moe.train.recorder import FinishActivity, Level, Recorder
from service.run.device import device_fault, device_of
from service.run.heartbeat import Heartbeat, heartbeat_of_process
from service.run.log_limit import share_of_writer
from service.run.preparation import PreparationProgress
from service.run.recorder import CLOSE_PATIENCE_S, CapturedOutput, SpoolRecorder
from service.run.worker_control import WorkerControl
from service.wire.attempt_folder import AttemptFolder
from service.wire.launch import Launch, Result

if TYPE_CHECKING:
    import torch

PATIENCE_AFTER_ERROR_S = 2.0
"""Short: Ray soon kills a failed group, and the next group delivers the rest."""


def train_worker(config: dict[str, Any]) -> dict[str, Any]:
    """Ray Train's `train_loop_per_worker`; returns a `Result` as plain data, the same on every rank.

    `config`: `launch` (URL, since the launch holds a token) and `fit_at` (time at which the driver requested the
    group). Mistakes in spec or data, a missing GPU and a non-finite loss end the run. Everything else raises, and Ray
    Train restarts the group.
    """
    began = time.time()
    import ray.train
    import torch

    from moe.parallel import json_collectives

    context = ray.train.get_context()
    rank = context.get_world_rank()
    heartbeat = heartbeat_of_process()
    folder, launch = AttemptFolder.open_launch(config["launch"])
    with doing("start", "starting the worker group"):
        group, resumed_step = json_collectives.broadcast_from_rank0(lambda: _begin_group(folder, launch))
    recorder = SpoolRecorder(
        job_id=launch.job_id,
        attempt=launch.attempt,
        storage=launch.storage,
        events_url=launch.events_url,
        token=launch.token.get_secret_value(),
        name=f"g{group}.rank-{rank}",
        speaks=rank == 0,
        sweeps=context.get_local_rank() == 0,
        max_log_bytes=share_of_writer(launch.spec.logs.max_bytes, launch.plan.num_workers),
    )
    patience_s = PATIENCE_AFTER_ERROR_S
    if heartbeat is not None:
        heartbeat.follow(recorder.line)
        recorder.report_driver_silence(heartbeat.unanswered_s)
    try:
        with CapturedOutput(recorder):
            kind = launch.spec.resources.trains_on(launch.gpus_per_worker)
            if faults := [fault for fault in json_collectives.all_gather_json(device_fault(kind)) if fault]:
                return Result(outcome="failed", step=resumed_step, message=faults[0], retryable=False).model_dump(
                    mode="json"
                )
            device = device_of(kind)
            torch.set_num_threads(launch.spec.resources.cpus_per_worker)
            workers = json_collectives.all_gather_json(
                {"rank": rank, "node": context.get_node_rank(), "host": socket.gethostname(),
                 "pid": os.getpid(), "device": str(device)}
            )  # fmt: skip
            recorder.record("started", {"group": group, "workers": workers})
            recorder.of_group = {"group": group, "num_workers": len(workers)}
            if group == launch.group_start:  # later groups start after a death, not at `fit_at`
                recorder.phase("worker_group", began - config["fit_at"])
            recorder.line("info", f"worker group {group}: this is {workers[rank]}")
            result = _run(launch, folder, group, resumed_step, device, recorder, heartbeat)
        patience_s = CLOSE_PATIENCE_S
    finally:
        if heartbeat is not None:
            heartbeat.unfollow()
        recorder.close(patience_s)
    return result.model_dump(mode="json")


def _run(
    launch: Launch,
    folder: AttemptFolder,
    group: int,
    resumed_step: int,
    device: "torch.device",
    recorder: SpoolRecorder,
    heartbeat: Heartbeat | None = None,
) -> Result:
    from moe.parallel import Layout
    from moe.tasks.build import build_task
    from moe.train.checkpoint.run_files import stored_tokenizers
    from moe.train.loop import train
    from moe.train.nonfinite import NonFiniteLoss

    try:
        began = time.perf_counter()
        task = build_task(launch.spec, launch.allowed_code)
        with doing("preparation", "preparing data"):
            data = task.prepare(
                launch.cache,
                roots=launch.data_roots,
                report=lambda message: recorder.log("info", message),
                read_checkpoint_files=lambda: stored_tokenizers(launch.storage),
                progress=PreparationProgress(recorder),
            )
        recorder.phase("data", time.perf_counter() - began)
        with doing("trials", "trying out plans"):
            plan = _plan(launch, folder, task, data, device, recorder)
        with doing("loading", "starting the process groups"):
            layout = Layout.build(plan, device)
        outcome = train(
            task,
            plan,
            layout,
            data=data,
            storage=launch.storage,
            cache=Path(launch.cache),
            attempt=launch.attempt,
            group=group,
            recorder=_FirstStepTimer(recorder, heartbeat),
            control=WorkerControl(recorder.control, heartbeat),
            roots=launch.data_roots,
            pause_at=launch.pause_at,
        )
    except SpecError as error:
        return Result(outcome="failed", step=resumed_step, message=str(error), retryable=False)
    except NonFiniteLoss as error:
        return Result(outcome="failed", step=error.step - 1, message=str(error), retryable=False)
    report = outcome.report.to_plain() if outcome.report else None
    message, spec = "a node or pod of it is about to end" if outcome.kind == "preempted" else "", launch.spec.train
    if outcome.kind == "succeeded" and outcome.step < spec.num_steps:
        reason = f"train.max_duration (={spec.max_duration}) has passed"
        message = f"finished at step {outcome.step} of {spec.num_steps}: {reason}"
    if outcome.kind == "paused" and outcome.step == launch.pause_at:
        message = f"paused at step {outcome.step}, where its sweep compares its members"
    return Result(outcome=outcome.kind, step=outcome.step, report=report, message=message)


def _plan(
    launch: Launch,
    folder: AttemptFolder,
    task: Task[Any, Any],
    data: PreparedData,
    device: "torch.device",
    recorder: SpoolRecorder,
) -> Plan:
    """The launch's plan, or the fastest of its trials, run once per attempt."""
    from moe.calibrate.trial import fastest, step_seconds
    from moe.parallel import json_collectives

    if not launch.trials:
        return launch.plan
    if (plan_fields := json_collectives.broadcast_from_rank0(lambda: _plain(folder.chosen_plan()))) is not None:
        return Plan.model_validate(plan_fields)
    began = time.perf_counter()
    seconds = [
        step_seconds(task, plan, device, data=data, storage=launch.storage, cache=Path(launch.cache))
        for plan in launch.trials
    ]
    plan = fastest(launch.trials, seconds)

    def store() -> dict[str, Any] | None:
        folder.write_chosen_plan(plan)
        recorder.record("plan", {"plan": plan.model_dump(mode="json")})
        recorder.phase("trials", time.perf_counter() - began)
        return _plain(plan)

    return Plan.model_validate(json_collectives.broadcast_from_rank0(store))


def _plain(plan: Plan | None) -> dict[str, Any] | None:
    return None if plan is None else plan.model_dump(mode="json")


class _FirstStepTimer(Recorder):
    """Passes everything on, records the durations of building the model and of the first step, and passes step
    durations to the heartbeat."""

    def __init__(self, recorder: SpoolRecorder, heartbeat: Heartbeat | None) -> None:
        self._recorder, self._heartbeat = recorder, heartbeat
        self._began: float | None = time.perf_counter()

    def metric(self, record: StepRecord) -> None:
        if self._began is not None:
            elapsed_s, step_s = time.perf_counter() - self._began, record.step_s or 0.0
            self._recorder.phase("model", elapsed_s - step_s)
            self._recorder.phase("first_step", step_s)
            self._began = None
        if self._heartbeat is not None:
            self._heartbeat.step_s = record.step_s or 0.0
        self._recorder.metric(record)

    def record_resume(self, step: int, checkpoint: str | None) -> None:
        self._recorder.record_resume(step, checkpoint)

    def record_finish(self, step: int, activity: FinishActivity) -> None:
        self._recorder.record_finish(step, activity)

    def checkpoint(self, record: CheckpointRecord) -> None:
        self._recorder.checkpoint(record)

    def checkpoint_failed(self, step: int, reason: str) -> None:
        self._recorder.checkpoint_failed(step, reason)

    def log(self, level: Level, message: str, **fields: Any) -> None:
        self._recorder.log(level, message, **fields)

    def close(self) -> None:
        """No-op: the worker closes the recorder itself at the end."""


def _begin_group(folder: AttemptFolder, launch: Launch) -> tuple[int, int]:
    """(number of this worker group, step of the newest committed checkpoint, possibly damaged)."""
    group = folder.begin_group(launch.group_start)
    newest = marker.list_committed(Folder.of_job(launch.storage).subfolder(marker.FOLDER))
    order = marker.order(newest[0]) if newest else None
    return group, order[0] if order else 0
