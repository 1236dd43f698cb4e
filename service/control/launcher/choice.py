"""Launcher that offers both a standing Ray cluster and clusters of jobs' own."""

from collections.abc import Callable, Mapping, Sequence

from moe.plan import Calibration
from moe.spec import ResourcesSpec
from service.control.launcher.launcher import (
    ClusterFacts,
    ClusterKind,
    Launcher,
    LauncherUnavailable,
    Observation,
    Submission,
)
from service.wire.launch import Launch


class LauncherChoice(Launcher):
    """Two launchers: new attempts go where their gang was admitted.

    A caller that knows the cluster of an attempt uses its launcher through `by_kind`, as the other may not answer.
    """

    def __init__(self, shared: Launcher, own: Launcher, default: ClusterKind) -> None:
        """`default`: cluster of jobs that name none."""
        self._shared, self._own, self._default = shared, own, default
        self._launchers = (own, shared)  # the first answers from memory

    def check(self, resources: ResourcesSpec) -> None:
        without_cluster = resources.model_copy(update={"cluster": None})
        self._of(resources).check(without_cluster)

    def cluster(self) -> ClusterFacts:
        nodes = tuple(node for launcher in (self._shared, self._own) for node in launcher.cluster().nodes)
        return ClusterFacts(nodes=nodes, default_cluster=self._default)

    def by_kind(self) -> Mapping[ClusterKind, Launcher]:
        launchers: dict[ClusterKind, Launcher] = {"shared": self._shared, "own": self._own}
        return {self._default: launchers[self._default], **launchers}

    def submit(self, launch: Launch) -> None:
        (self._own if launch.pool else self._shared).submit(launch)

    def observe(self, submission_id: str) -> Observation:
        unknown: list[Observation] = []
        failure: LauncherUnavailable | None = None
        for launcher in self._launchers:
            try:
                observation = launcher.observe(submission_id)
            except LauncherUnavailable as error:
                failure = error
                continue
            if observation.status != "unknown":
                return observation
            unknown.append(observation)
        if failure is not None:
            raise failure  # it may know the submission
        return next((observation for observation in unknown if observation.forgotten), unknown[0])

    def stop(self, submission_id: str) -> None:
        for launcher in self._launchers:
            launcher.stop(submission_id)

    def calibrate(self) -> Calibration:
        return self._shared.calibrate()

    def dashboard_url(self, submission_id: str) -> str | None:
        return None  # callers ask the launcher of the attempt

    def queue_of(self, resources: ResourcesSpec) -> str:
        return self._of(resources).queue_of(resources)

    def forget_job(self, job_id: str) -> None:
        for launcher in self._launchers:
            launcher.forget_job(job_id)

    def submissions(self, instance: str) -> Sequence[Submission]:
        return [submission for launcher in self._launchers for submission in launcher.submissions(instance)]

    def on_change(self, wake: Callable[[], None]) -> None:
        for launcher in self._launchers:
            launcher.on_change(wake)

    def close(self) -> None:
        for launcher in self._launchers:
            launcher.close()

    def _of(self, resources: ResourcesSpec) -> Launcher:
        return self.by_kind()[resources.cluster or self._default]
