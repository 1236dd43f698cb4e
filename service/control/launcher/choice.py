"""Launcher that offers both a standing Ray cluster and clusters of jobs' own."""

from collections.abc import Callable
from typing import Literal

from moe.plan import Calibration
from moe.spec import ResourcesSpec
from service.control.launcher.launcher import ClusterFacts, Launcher, LauncherUnavailable, Observation
from service.wire.launch import Launch


class LauncherChoice(Launcher):
    """Two launchers: new attempts go where their gang was admitted, others to the launcher that knows them."""

    def __init__(self, shared: Launcher, own: Launcher, default: Literal["own", "shared"]) -> None:
        """`default`: cluster of jobs that name none."""
        self._shared, self._own, self._default = shared, own, default
        self._launchers = (own, shared)  # the first answers from memory
        self._homes: dict[str, Launcher] = {}
        """Launchers of submissions, as far as known."""

    def check(self, resources: ResourcesSpec) -> None:
        cluster = resources.cluster or self._default
        without_cluster = resources.model_copy(update={"cluster": None})
        (self._own if cluster == "own" else self._shared).check(without_cluster)

    def cluster(self) -> ClusterFacts:
        nodes = tuple(node for launcher in (self._shared, self._own) for node in launcher.cluster().nodes)
        return ClusterFacts(nodes=nodes, default_cluster=self._default)

    def submit(self, launch: Launch) -> None:
        home = self._own if launch.pool else self._shared
        self._homes[launch.submission_id] = home
        home.submit(launch)

    def observe(self, submission_id: str) -> Observation:
        if (home := self._homes.get(submission_id)) is not None:
            observation = home.observe(submission_id)
            if observation.has_ended and observation.released:
                self._homes.pop(submission_id, None)
            return observation
        unknown: list[Observation] = []
        failure: LauncherUnavailable | None = None
        for launcher in self._launchers:
            try:
                observation = launcher.observe(submission_id)
            except LauncherUnavailable as error:
                failure = error
                continue
            if observation.status != "unknown":
                self._homes[submission_id] = launcher
                return observation
            unknown.append(observation)
        if failure is not None:
            raise failure  # it may know the submission
        return next((observation for observation in unknown if observation.forgotten), unknown[0])

    def stop(self, submission_id: str) -> None:
        home = self._homes.get(submission_id)  # its end is still to be observed
        for launcher in self._launchers if home is None else (home,):
            launcher.stop(submission_id)

    def calibrate(self) -> Calibration:
        return self._shared.calibrate()

    def dashboard_url(self, submission_id: str) -> str | None:
        home = self._homes.get(submission_id)
        return None if home is None else home.dashboard_url(submission_id)

    def queue_of(self, resources: ResourcesSpec) -> str:
        return self._own.queue_of(resources) if (resources.cluster or self._default) == "own" else ""

    def forget_job(self, job_id: str) -> None:
        for launcher in self._launchers:
            launcher.forget_job(job_id)

    def on_change(self, wake: Callable[[], None]) -> None:
        for launcher in self._launchers:
            launcher.on_change(wake)

    def close(self) -> None:
        for launcher in self._launchers:
            launcher.close()
