"""Controllers that a test steps by hand, in its own process, and clusters that fail at a chosen call."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe.plan import Calibration
from moe.spec import JobSpec, ResourcesSpec
from service.control.api.services import Services
from service.control.composition import open_services
from service.control.launcher.launcher import ClusterFacts, ClusterKind, Launcher, Observation, Submission
from service.control.report.hub import Hub
from service.control.report.prometheus import Figures
from service.control.store.jobs import JobRow, get_job
from service.settings import Settings
from service.wire.launch import Launch
from tests.service.control_plane import NODE, spec
from tests.service.local_launcher import LocalLauncher


class SimulatedKill(BaseException):
    """Passes through every exception handler, as SIGKILL would."""


class DeadlyLauncher(Launcher):
    """Kills the controller before or after the call of the given number; none by default."""

    def __init__(self, launcher: Launcher, call: int = 0, after: bool = False) -> None:
        self._launcher, self._left, self._after = launcher, call, after

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self._left -= 1
        if self._left == 0 and not self._after:
            raise SimulatedKill
        answer = function(*arguments)
        if self._left == 0:
            raise SimulatedKill
        return answer

    def cluster(self) -> ClusterFacts:
        return self._launcher.cluster()

    def submit(self, launch: Launch) -> None:
        self._call(self._launcher.submit, launch)

    def observe(self, submission_id: str) -> Observation:
        return self._call(self._launcher.observe, submission_id)

    def stop(self, submission_id: str) -> None:
        self._call(self._launcher.stop, submission_id)

    def calibrate(self) -> Calibration:
        return self._call(self._launcher.calibrate)

    def by_kind(self) -> Mapping[ClusterKind, Launcher]:
        return dict.fromkeys(self._launcher.by_kind(), self)

    def check(self, resources: ResourcesSpec) -> None:
        self._launcher.check(resources)

    def queue_of(self, resources: ResourcesSpec) -> str:
        return self._launcher.queue_of(resources)

    def forget_job(self, job_id: str) -> None:
        self._call(self._launcher.forget_job, job_id)

    def submissions(self, instance: str) -> Sequence[Submission]:
        return self._launcher.submissions(instance)

    def dashboard_url(self, submission_id: str) -> str | None:
        return self._call(self._launcher.dashboard_url, submission_id)


def local_cluster(folder: Path) -> LocalLauncher:
    """A cluster of one node."""
    cluster = LocalLauncher(folder / "cluster")
    cluster.set_nodes(NODE)
    return cluster


def controller_on(folder: Path, launcher: Launcher | None = None, **settings: Any) -> Services:
    """A controller on a state folder, with a cluster of one node by default."""
    values = {"lease_s": 0.01, "lost_grace_s": 0.2, "events_url": "http://127.0.0.1:9", **settings}
    return open_services(
        Settings(state_dir=folder / "state", **values), launcher or local_cluster(folder), Hub(), Figures()
    )


def submit_job(services: Services, key: str | None = None, **changes: Any) -> JobRow:
    """A job of `spec`, posted under an idempotency key."""
    return services.requests.submit(JobSpec.parse(spec(**changes)), "tester", key)[0]


def stored_job(services: Services, job_id: str) -> JobRow:
    with services.database.read() as tx:
        job = get_job(tx, job_id)
    assert job is not None
    return job


def step_job(services: Services, job_id: str) -> JobRow:
    """A job after another step of the controller."""
    services.controller.step()
    return stored_job(services, job_id)
