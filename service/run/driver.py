"""Driver of a job on the cluster: `python -m service.run.driver <launch file>`.

Runs one attempt: a Ray Train run that restarts dead worker groups. The attempt ends with `result.json`; one without
it died. The driver needs no control plane.
"""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from moe.spec import FailureKind, SpecError
from moe.train.control import Request
from moe.train.environment import KEEP_FREED_MEMORY
from service.run.attempt_keeper import AttemptKeeper
from service.run.end_notice import has_notice
from service.run.examine import ATTEMPT_VARIABLE
from service.run.group_watch import GroupWatch
from service.run.heartbeat_server import HeartbeatServer
from service.run.log_limit import remove_oldest, share_of_writer
from service.run.placement import explain_placement
from service.run.preparation import PreparationProgress
from service.run.recorder import CapturedOutput, SpoolRecorder
from service.run.status import status_of
from service.wire.attempt_folder import AttemptFolder
from service.wire.launch import FENCED_EXIT_CODE, Result

COLLECTIVE_TIMEOUT_S = 1800
"""Timeout of the default process group, in which ranks wait for data preparation. Heartbeats detect stuck ranks
sooner."""
PATIENCE_TERMINATED_S = 1.0
"""Ray kills a driver 3 s after SIGTERM."""
WATCH_INTERVAL_S = 0.25
LOOKS_WITHOUT_GROUP = 2
"""Polls without a worker group after which the reason is reported."""
LOOK_INTERVAL_S = 10.0
HEARTBEATS_INTERVAL_S = 1.0
FILES_INTERVAL_S, REMOTE_FILES_INTERVAL_S = 1.0, 15.0
"""Interval of checks for removed files, each a request on remote storage."""
MAX_REASON = 2000

if TYPE_CHECKING:
    from service.run.notices import GroupFailures  # it imports Ray

RAY_ENVIRONMENT = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "30",
    # Our output goes to the job's storage; Ray's copy of each line is redundant.
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    # The controller logs to the driver's log, in the driver's format.
    "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": "0",
    # Saves a process per run; a drained node is handled as a lost one.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
}
"""Default environment of the driver, Ray Train's controller and the workers."""

_log = logging.getLogger("service.run.driver")


def workers_environment(gpus_per_worker: int) -> dict[str, str]:
    """Environment of workers besides their node's; this process's own values take precedence."""
    variables = RAY_ENVIRONMENT if gpus_per_worker else RAY_ENVIRONMENT | KEEP_FREED_MEMORY
    return {name: os.environ.get(name, value) for name, value in variables.items()}


PlacementExplainer = Callable[[int, int, int], str | None]


class Driver:
    """Runs one attempt, from its launch to its result."""

    def __init__(self, launch_path: str, explain_placement: PlacementExplainer = explain_placement) -> None:
        self._explain_placement = explain_placement
        self._launch_path = launch_path
        self._folder, self._launch = AttemptFolder.open_launch(launch_path)
        self._keeper = AttemptKeeper(launch_path)
        self._recorder = SpoolRecorder(
            job_id=self._launch.job_id,
            attempt=self._launch.attempt,
            storage=self._launch.storage,
            events_url=self._launch.events_url,
            token=self._launch.token.get_secret_value(),
            name="driver",
            speaks=True,
            sweeps=True,
            max_log_bytes=share_of_writer(self._launch.spec.logs.max_bytes, self._launch.plan.num_workers),
        )
        self._num_notices = 0  # read so far
        self._num_dead_groups = 0
        self._num_limited = -1
        """Number of dead groups when past logs were last trimmed."""
        self._looks_without_group = 0
        self._missing_resources: str | None = None
        """Missing resources that were last reported; "" for placed workers that did not start."""
        self._result: Result | None = None
        """Result of an attempt that ends before its run; None if terminated."""
        self._ended = threading.Event()
        self._group_watch: GroupWatch | None = None
        self._heartbeats: HeartbeatServer | None = None
        self._failures: GroupFailures | None = None

    def run(self) -> int:
        """Return the process's exit status: 0 for a succeeded, paused or cancelled attempt, 1 for a failed one, 143
        if terminated."""
        result: Result | None
        with CapturedOutput(self._recorder):
            try:
                result = self._attempt()
            except KeyboardInterrupt:
                result = self._result
            except Exception as error:
                _log.exception("attempt %d failed", self._launch.attempt)
                reason, kind = self._failure_reason(error)
                result = Result(outcome="failed", step=self._last_step(), message=reason, failure_kind=kind)
            self._ended.set()
            if result is not None:
                self._folder.write_result(result)
                _log.info("attempt %d: %s at step %d %s", self._launch.attempt, result.outcome, result.step,
                          result.message)  # fmt: skip
        if result is None:
            self._recorder.close(PATIENCE_TERMINATED_S)
            return 128 + signal.SIGTERM
        self._recorder.close(after_workers=True)
        return 1 if result.outcome == "failed" else 0

    def _attempt(self) -> Result:
        signal.signal(signal.SIGUSR1, self._on_ended)
        for name, value in RAY_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import ray

        variables = workers_environment(self._launch.gpus_per_worker)
        ray.init(
            address="auto", log_to_driver=False, logging_level=logging.WARNING,
            runtime_env={"env_vars": {**variables, ATTEMPT_VARIABLE: self._launch.submission_id}},
        )  # fmt: skip
        signal.signal(signal.SIGTERM, self._on_terminated)  # replaces ray.init's handler
        from service.run.process_group import node_address

        heartbeats = HeartbeatServer(node_address())
        self._heartbeats = heartbeats
        self._group_watch = GroupWatch(heartbeats)
        self._recorder.report_status(lambda: status_of(heartbeats.ranks()))
        trainer = self._trainer(heartbeats)
        self._recorder.phase("imports", _seconds_since_start())
        self._begin_watch()
        # Not earlier: it would compete with the imports (GIL) and delay the start of the workers.
        threading.Thread(target=self._prepare_data, name="data", daemon=True).start()
        try:
            answer = trainer.fit()
        finally:
            self._ended.set()
            heartbeats.close()
        return Result.model_validate(answer.return_value)

    def _trainer(self, heartbeats: HeartbeatServer) -> Any:
        from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig

        from service.run.lost_nodes import LossExplainer
        from service.run.notices import GroupFailures
        from service.run.process_group import GlooConfig
        from service.run.trainer import LeanTrainer, memory_file_system
        from service.run.worker import train_worker

        launch, resources = self._launch, self._launch.spec.resources
        take_reason = self._group_watch.take_reason if self._group_watch else lambda: ""
        self._failures = GroupFailures(launch, take_reason, LossExplainer(heartbeats))
        worker_resources = {"CPU": float(resources.cpus_per_worker)}
        if launch.gpus_per_worker:
            worker_resources["GPU"] = float(launch.gpus_per_worker)
        return LeanTrainer(
            train_worker,
            train_loop_config={"launch": self._launch_path, "fit_at": time.time()},
            # Always gloo, for CPU tensors and objects; Layout creates the NCCL groups.
            backend_config=GlooConfig(COLLECTIVE_TIMEOUT_S, heartbeats.address),
            scaling_config=ScalingConfig(
                num_workers=launch.plan.num_workers,
                use_gpu=launch.gpus_per_worker > 0,
                resources_per_worker=worker_resources,
                placement_strategy="PACK",  # Ray numbers ranks by node, and expert groups are consecutive
            ),
            run_config=RunConfig(
                # Ray Train resumes runs by name; submission ids are unique.
                name=launch.submission_id,
                storage_path="/ray",
                storage_filesystem=memory_file_system(),
                failure_config=FailureConfig(max_failures=launch.max_failures),  # the policy below decides
                checkpoint_config=CheckpointConfig(num_to_keep=None),
            ),
            failure_policy=self._failures,
        )

    def _prepare_data(self) -> None:
        """Prepare the data while workers start, which use it or wait for it."""
        from moe.tasks.build import build_task
        from moe.train.checkpoint.run_files import stored_tokenizers

        launch = self._launch
        try:
            build_task(launch.spec, launch.allowed_code).prepare(
                launch.cache,
                roots=launch.data_roots,
                report=lambda message: self._recorder.log("info", message),
                read_checkpoint_files=lambda: stored_tokenizers(launch.storage),
                progress=PreparationProgress(self._recorder),
            )
        except SpecError as error:
            self._end(Result(outcome="failed", step=0, message=str(error), retryable=False))
        except Exception:
            _log.exception("the driver could not prepare the corpus; the workers will try")

    def _begin_watch(self) -> list[threading.Thread]:
        """Start the threads that watch the run; separate, since storage may hang."""
        is_remote = "://" in self._launch.storage and not self._launch.storage.startswith("file://")
        watches: list[tuple[str, float, Callable[[], object]]] = [
            ("watch", WATCH_INTERVAL_S, self._look),
            ("waiting", LOOK_INTERVAL_S, lambda: self._report_waiting(self._group_runs())),
            ("files", REMOTE_FILES_INTERVAL_S if is_remote else FILES_INTERVAL_S, self._look_after_files),
        ]
        if self._group_watch is not None:
            watches.append(("heartbeat watch", HEARTBEATS_INTERVAL_S, self._group_watch.look))
        threads = [
            threading.Thread(target=self._repeat, args=(interval_s, look), name=name, daemon=True)
            for name, interval_s, look in watches
        ]
        for thread in threads:
            thread.start()
        return threads

    def _repeat(self, interval_s: float, look: Callable[[], object]) -> None:
        """Call `look` periodically until the attempt is over."""
        last_message = ""
        while not self._ended.wait(interval_s):
            try:
                look()
            except Exception as error:  # no error may end the watch
                if (message := repr(error)) != last_message:  # not four times a second
                    _log.exception("cannot watch the run; will retry")
                    last_message = message
            else:
                last_message = ""

    def _look(self) -> None:
        """Report dead groups, pass an end notice on to the ranks, and obey requests and the notice while no group
        runs."""
        self._report_dead_groups()
        request, is_ending = self._recorder.control.poll(), has_notice()
        if is_ending and self._heartbeats is not None:
            self._heartbeats.is_ending = True
        if (request or is_ending) and not self._group_runs():
            self._end_between_groups(request)

    def _look_after_files(self) -> None:
        """Restore files of the attempt, and trim past logs after each group's death."""
        self._keeper.look()
        if self._num_limited != (num_dead := self._num_dead_groups):
            self._limit_past_logs()
            self._num_limited = num_dead

    def _report_dead_groups(self) -> None:
        if self._failures is None or not (notices := self._failures.notices()[self._num_notices :]):
            return
        # Count begun groups: a group may also die before it begins.
        self._num_dead_groups = len(self._folder.groups())
        for notice in notices:
            self._num_notices += 1
            if notice.is_replaced:
                _log.warning("worker group died; starting another: %s", notice.reason)
                self._recorder.record("recovering", {
                    "reason": notice.reason, "kind": notice.kind, "preempted": notice.preempted,
                    "at_start": notice.at_start,
                })  # fmt: skip

    def _limit_past_logs(self) -> None:
        launch = self._launch
        try:
            remove_oldest(launch.storage, launch.attempt, self._num_dead_groups, launch.spec.logs.max_bytes)
        except OSError as error:
            _log.warning("cannot trim older logs to logs.max_bytes: %s", error)

    def _report_waiting(self, runs: bool) -> None:
        """Report why no worker group has begun for a while, each reason once."""
        self._looks_without_group = 0 if runs else self._looks_without_group + 1
        if self._looks_without_group < LOOKS_WITHOUT_GROUP:
            self._missing_resources = None
            return
        launch = self._launch
        count, resources = launch.plan.num_workers, launch.spec.resources
        missing = self._explain_placement(count, resources.cpus_per_worker, launch.gpus_per_worker) or ""
        if not missing and self._group_watch is not None:
            self._group_watch.end_stopped_starts(self._launch.submission_id)
        if missing == self._missing_resources:
            return
        self._missing_resources = missing
        worker_resources = f"{resources.cpus_per_worker} CPU"
        if launch.gpus_per_worker:
            worker_resources += f" and {launch.gpus_per_worker} GPU"
        workers = "1 worker" if count == 1 else f"{count} workers"
        if missing:
            reason = f"waiting for resources for {workers} ({worker_resources} each): {missing}"
        else:
            reason = f"{workers} placed ({worker_resources} each); waiting for them to start"
        _log.info("%s", reason)  # a warning would repeat the job's reason
        self._recorder.record("waiting", {"reason": reason})

    def _failure_reason(self, error: Exception) -> tuple[str, FailureKind]:
        """(reason, kind) of the run's failure; for failed workers, those of the last dead group."""
        notices = self._failures.notices() if self._failures is not None else []
        if notices and getattr(error, "worker_failures", None):
            return notices[-1].reason, notices[-1].kind
        return (str(error).strip() or type(error).__name__)[:MAX_REASON], "driver"

    def _group_runs(self) -> bool:
        """Whether a worker group has begun and is not known to be dead."""
        return len(self._folder.groups()) > self._num_dead_groups

    def _end_between_groups(self, request: Request | None) -> None:
        outcome: Literal["cancelled", "paused", "preempted"] = "preempted"
        message = "the node or pod of its driver is about to end"
        if request is not None:
            outcome = "cancelled" if request == "cancel" else "paused"
            message = f"{outcome} while no worker group ran"
        self._end(Result(outcome=outcome, step=self._last_step(), message=message))

    def _last_step(self) -> int:
        """Step of the newest committed checkpoint; 0 without one."""
        from moe.storage.folder import Folder
        from moe.train.checkpoint import marker

        newest = marker.list_committed(Folder.of_job(self._launch.storage).subfolder(marker.FOLDER))
        order = marker.order(newest[0]) if newest else None
        return order[0] if order else 0

    def _end(self, result: Result) -> None:
        """End the attempt; callable from any thread."""
        self._result = result
        if not self._ended.is_set():
            os.kill(os.getpid(), signal.SIGUSR1)

    def _on_ended(self, _number: int, _frame: FrameType | None) -> None:
        if not self._ended.is_set():
            # The only exception that Ray lets through while the main thread waits in it.
            raise KeyboardInterrupt

    def _on_terminated(self, _number: int, _frame: FrameType | None) -> None:
        if not self._ended.is_set():
            _log.warning("terminated: the attempt ends without a result")
            raise KeyboardInterrupt


def _seconds_since_start() -> float:
    """Age of this process, including the start of its interpreter."""
    if sys.platform.startswith("linux"):
        # psutil adds the start time to the boot time, which has a resolution of whole seconds.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    import psutil

    return time.time() - float(psutil.Process().create_time())


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m service.run.driver LAUNCH_FILE", file=sys.stderr)
        return 2
    folder, launch = AttemptFolder.open_launch(sys.argv[1])
    if not folder.claim_driver():
        # It may still run: its spool, records and workers are left alone.
        print(f"attempt {launch.attempt} of {launch.job_id} already had a driver; this one ends", file=sys.stderr)
        return FENCED_EXIT_CODE
    return Driver(sys.argv[1]).run()


if __name__ == "__main__":
    sys.exit(main())
