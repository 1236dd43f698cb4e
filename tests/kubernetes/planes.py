"""A controller that a test steps by hand, on a cluster where each job gets a RayJob."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from service.control.launcher.kuberay.launcher import KubeRayLauncher
from service.control.launcher.kuberay.names import ray_job_name
from service.control.launcher.launcher import Launcher
from service.control.store.jobs import JobRow
from service.wire.attempt_folder import AttemptFolder
from service.wire.launch import Result, submission_id
from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.launching import Clock, launcher_on
from tests.service.controllers import controller_on, stored_job, submit_job

STEP_INTERVAL_S = 0.02


class Plane:
    """One control plane at a time, on a state folder and an API server."""

    def __init__(
        self,
        server: ApiServer,
        folder: Path,
        wrap: Callable[[KubeRayLauncher], Launcher] = lambda launcher: launcher,
        **settings: Any,
    ) -> None:
        """`wrap`: returns the launcher that each control plane gets."""
        self._server, self._folder, self._settings, self._wrap = server, folder, settings, wrap
        self.clock = Clock()
        self.start()

    def start(self, wrap: Callable[[KubeRayLauncher], Launcher] | None = None) -> None:
        self.launcher = launcher_on(self._server, self.clock, **self._settings)
        self.services = controller_on(self._folder, (wrap or self._wrap)(self.launcher))

    def stop(self) -> None:
        """Stop it without a farewell: all it knows is in the store, on the storage and on the API server."""
        self.launcher.close()
        self.services.database.close()

    def restart(self) -> None:
        self.stop()
        self.start()

    def post(self, **changes: Any) -> str:
        """Id of a new job, which is retried at once."""
        retry = {"max_failures": 3, "backoff": {"first_s": 0.0, "max_s": 0.0}}
        resources = {"num_workers": 1, **changes.pop("resources", {})}
        return submit_job(self.services, retry=retry, resources=resources, **changes).id

    def job(self, job_id: str) -> JobRow:
        return stored_job(self.services, job_id)

    def name(self, job_id: str, attempt: int | None = None) -> str:
        """Name of the RayJob of the job's newest attempt."""
        return ray_job_name(submission_id(job_id, attempt or self.job(job_id).attempt))

    def await_job(self, job_id: str, condition: Callable[[JobRow], bool], timeout_s: float = 60.0) -> JobRow:
        """The job once the condition holds, which the controller's steps must bring about."""
        deadline = time.monotonic() + timeout_s
        while not condition(job := self.job(job_id)):
            assert time.monotonic() < deadline, (job.state, job.attempt, job.launch, job.reason)
            self.services.controller.step()
            time.sleep(STEP_INTERVAL_S)
        return job

    def await_reason(self, job_id: str, words: str) -> JobRow:
        return self.await_job(job_id, lambda job: words in job.reason)

    def await_launch(self, job_id: str, attempt: int = 1) -> str:
        """Name of the attempt's RayJob, once it was submitted."""
        self.await_job(job_id, lambda job: job.attempt == attempt and job.launch == "submitted")
        return self.name(job_id, attempt)

    def end(self, job_id: str, result: Result) -> None:
        """Leave the result of the newest attempt's driver."""
        job = self.job(job_id)
        AttemptFolder(job.storage, job.attempt).write_result(result)
