"""A standing cluster in memory, which a test moves."""

from moe.plan import Calibration
from service.control.launcher.launcher import ClusterFacts, Launcher, LauncherUnavailable, LaunchRefusal, Observation
from service.wire.launch import Launch
from tests.service.control_plane import NODE


class StandingCluster(Launcher):
    """Submissions by id with their status, and whether it answers.

    A stand-in for Ray without processes: the random sequences that use it are about the controller, and start dozens.
    """

    def __init__(self) -> None:
        self.is_reachable = True
        self.statuses: dict[str, str] = {}

    def cluster(self) -> ClusterFacts:
        self._reach()
        return ClusterFacts(nodes=(NODE,))

    def submit(self, launch: Launch) -> None:
        self._reach()
        self.statuses.setdefault(launch.submission_id, "running")

    def observe(self, submission_id: str) -> Observation:
        self._reach()
        return Observation.model_validate({"status": self.statuses.get(submission_id, "unknown")})

    def stop(self, submission_id: str) -> None:
        self._reach()
        if self.statuses.get(submission_id) == "running":
            self.statuses[submission_id] = "stopped"

    def calibrate(self) -> Calibration:
        raise LaunchRefusal("there is nothing to measure")

    def dashboard_url(self, submission_id: str) -> str | None:
        return None

    def _reach(self) -> None:
        if not self.is_reachable:
            raise LauncherUnavailable("connection refused")
