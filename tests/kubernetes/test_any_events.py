"""Random sequences of cluster events, refusals, kills, take-overs and late launches, on two clusters of which one may
be silent: no job is launched twice, none is lost, no orphan stays, no control plane acts without the lease, and every
state is told in words."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import ClassVar

import httpx
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from service.control.errors import ServiceError
from service.control.kubernetes import PODS, RAY_CLUSTERS, RAY_JOBS, WORKLOADS
from service.control.launcher.choice import LauncherChoice
from service.control.launcher.kuberay.launcher import POSTPONED_S, KubeRayLauncher
from service.control.launcher.kuberay.names import SUBMISSION_ANNOTATION
from service.control.launcher.launcher import LauncherUnavailable, LaunchPostponed, Observation
from service.control.scheduling import orphans
from service.control.store.jobs import JobRow
from service.wire.attempt_folder import AttemptFolder
from service.wire.launch import FENCED_EXIT_CODE, Launch, Result
from service.wire.states import ENDED, State
from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.apiserver.faults import Denial
from tests.kubernetes.objects import Object
from tests.kubernetes.operator import Operator
from tests.kubernetes.planes import Plane
from tests.kubernetes.standing import StandingCluster
from tests.processes import await_that
from tests.service.controllers import DeadlyLauncher, SimulatedKill

MAX_JOBS, MAX_STANDING_JOBS = 3, 2
SUCCEEDED = Result(outcome="succeeded", step=5)
OVER = ENDED | {State.PAUSED}
RAY_FAILURE = "Job entrypoint command failed with exit code {}, last available logs (truncated to 20,000 chars):\nends"


@contextmanager
def unless_gone() -> Iterator[None]:
    """Context of a write to an object that may be deleted or created at the same time."""
    try:
        yield
    except httpx.HTTPStatusError as error:
        if error.response.status_code not in (404, 409):
            raise


class Cluster(RuleBasedStateMachine):
    """A control plane and a cluster, which a stand-in for KubeRay, Kueue and kubelets moves."""

    server: ClassVar[ApiServer]

    @initialize(uses_kueue=st.booleans())
    def start(self, uses_kueue: bool) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="events-")
        self.queue = "gpus" if uses_kueue else ""
        self.operator = Operator(self.server)
        self.standing = StandingCluster()
        self.launches: dict[str, Launch] = {}
        """Every launch on Kubernetes, by submission."""
        self.plane = Plane(self.server, Path(self.folder.name), self._both_clusters, queue=self.queue)
        self.job_ids: list[str] = []
        self.standing_ids: list[str] = []
        """Those of them on the standing cluster."""
        self.uids: dict[str, set[str]] = {}
        """Uids of the RayJobs of each submission; several would be several launches."""
        self.late_uids: set[str] = set()
        """Uids of RayJobs that a control plane without the lease made."""
        self.unleased_acts: list[str] = []
        """Acts of a control plane after another one has taken the lease from it."""

    def _both_clusters(self, own: KubeRayLauncher, call: int = 0, *, after: bool = False) -> LauncherChoice:
        """Launcher that is killed at this call of Kubernetes', or after it."""
        submit = own.submit

        def note_and_submit(launch: Launch) -> None:
            self.launches[launch.submission_id] = launch
            submit(launch)

        own.submit = note_and_submit  # type: ignore[method-assign]
        return LauncherChoice(self.standing, DeadlyLauncher(own, call, after) if call else own, default="own")

    # The control plane

    @precondition(lambda self: len(self.job_ids) - len(self.standing_ids) < MAX_JOBS)
    @rule()
    def post(self) -> None:
        self.job_ids.append(self.plane.post())

    @precondition(lambda self: len(self.standing_ids) < MAX_STANDING_JOBS)
    @rule()
    def post_to_the_standing_cluster(self) -> None:
        job_id = self.plane.post(resources={"cluster": "shared"})
        self.job_ids.append(job_id)
        self.standing_ids.append(job_id)

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.plane.services.controller.step()

    @rule(data=st.data(), request=st.sampled_from(["cancel", "pause", "resume"]))
    @precondition(lambda self: self.job_ids)
    def ask(self, data: st.DataObject, request: str) -> None:
        job_id = data.draw(st.sampled_from(self.job_ids))
        with suppress(ServiceError):  # it is in another state
            getattr(self.plane.services.requests, request)(job_id, "tester")

    @rule()
    def restart_control_plane(self) -> None:
        self.plane.restart()

    @rule(call=st.integers(1, 6), after=st.booleans(), steps=st.integers(1, 6))
    def kill_control_plane(self, call: int, after: bool, steps: int) -> None:
        """Also between the creation of a RayJob and its record in the store."""
        self.plane.stop()
        self.plane.start(partial(self._both_clusters, call=call, after=after))
        with suppress(SimulatedKill):
            for _ in range(steps):
                self.plane.services.controller.step()
        self.plane.restart()

    @rule(observation=st.integers(1, 3), steps=st.integers(1, 3))
    @precondition(lambda self: self.job_ids)
    def take_over_during_a_step(self, observation: int, steps: int) -> None:
        """After this observation of a step, another control plane takes the lease and acts, also on what the cluster
        does meanwhile; then the step goes on."""
        self.plane.stop()
        self.plane.start(partial(self._overtaken, observation=observation, steps=steps))
        self.plane.services.controller.step()
        rows, self._rows_at_takeover = self._rows_at_takeover, []
        if rows and rows != self._rows():
            self.unleased_acts.append("changed the store")
        self.plane.restart()

    def _overtaken(self, own: KubeRayLauncher, observation: int, steps: int) -> LauncherChoice:
        """Launcher whose control plane is overtaken after an observation, and which notes what is asked of it then."""
        observe, observations = own.observe, iter(range(1, 1000))
        self._rows_at_takeover: list[JobRow] = []

        def observe_and_lose_the_lease(submission_id: str) -> Observation:
            found = observe(submission_id)
            if next(observations) == observation:
                self._take_over(steps)
                self._rows_at_takeover = self._rows()
            return found

        def noting(act: str, call: Callable[..., None]) -> Callable[..., None]:
            def note_and_call(argument: object) -> None:
                if self._rows_at_takeover:
                    self.unleased_acts.append(f"{act} {argument}")
                call(argument)

            return note_and_call

        launchers = self._both_clusters(own)
        own.observe = observe_and_lose_the_lease  # type: ignore[method-assign]
        for act in ("submit", "stop", "forget_job"):
            setattr(own, act, noting(act, getattr(own, act)))
        return launchers

    def _take_over(self, steps: int) -> None:
        other = Plane(self.server, Path(self.folder.name), self._both_clusters, queue=self.queue)
        other.clock.offset_s = self.plane.clock.offset_s
        try:
            await_that(lambda: other.services.controller.step() or other.services.controller.acting)
            for _ in range(steps):
                self._work()
                other.services.controller.step()
        finally:
            other.stop()

    def _rows(self) -> list[JobRow]:
        return [self.plane.job(job_id) for job_id in self.job_ids]

    @rule(data=st.data())
    @precondition(lambda self: self.launches)
    def launch_late(self, data: st.DataObject) -> None:
        """By a control plane that has lost its lease, and whose request was on its way for long."""
        self._launch_late(data.draw(st.sampled_from(sorted(self.launches))))

    def _launch_late(self, submission_id: str) -> None:
        before = {ray_job["metadata"]["uid"] for ray_job in self.operator.ray_jobs().values()}
        with suppress(LauncherUnavailable, LaunchPostponed):
            KubeRayLauncher.submit(self.plane.launcher, self.launches[submission_id])
        uids = {ray_job["metadata"]["uid"] for ray_job in self.operator.ray_jobs().values()}
        if submission_id in self.uids:
            self.late_uids |= uids - before

    # The standing cluster

    @rule(is_reachable=st.booleans())
    def reach_the_standing_cluster(self, is_reachable: bool) -> None:
        self.standing.is_reachable = is_reachable

    @rule(data=st.data(), succeeds=st.booleans())
    def end_a_driver_of_the_standing_cluster(self, data: st.DataObject, succeeds: bool) -> None:
        if running := sorted(key for key, status in self.standing.statuses.items() if status == "running"):
            self._end_standing(data.draw(st.sampled_from(running)), succeeds)

    def _end_standing(self, submission_id: str, succeeds: bool) -> None:
        job_id = submission_id.rpartition("-a")[0]
        if succeeds and submission_id == f"{job_id}-a{self.plane.job(job_id).attempt}":
            self.plane.end(job_id, SUCCEEDED)
        self.standing.statuses[submission_id] = "succeeded" if succeeds else "failed"

    # The API server

    @rule(kind=st.sampled_from(["drop", "drop_response", "status", "break_watch", "expire_watch"]))
    def fail_requests(self, kind: str) -> None:
        self.server.fault(kind, user="system:serviceaccount:shardyard:shardyard", count=2, code=429, retry_after_s=0)

    @rule()
    def forget_history(self) -> None:
        self.server.compact()

    @rule(quota=st.booleans())
    def exceed_quota(self, quota: bool) -> None:
        denials = [Denial("rayjobs", "exceeded quota: jobs, used: 9, limited: 9")] if quota else []
        self.server.deny(*denials)
        self.plane.clock.offset_s += POSTPONED_S

    # The cluster

    @rule(data=st.data())
    def move_a_ray_job(self, data: st.DataObject) -> None:
        if not (ray_jobs := self.operator.ray_jobs()):
            return
        name = data.draw(st.sampled_from(sorted(ray_jobs)))
        with unless_gone():
            self._move(name, ray_jobs[name], lambda: self._move_running(data, name, ray_jobs[name]))

    def _move(self, name: str, ray_job: Object, move_running: Callable[[], None]) -> None:
        """What KubeRay or Kueue does next with a RayJob."""
        is_suspended, deployment = (
            ray_job["spec"].get("suspend"),
            (ray_job.get("status") or {}).get("jobDeploymentStatus"),
        )
        if ray_job["metadata"].get("deletionTimestamp"):
            return
        if is_suspended and not deployment:
            self.operator.queue(name, "insufficient unused quota")
        elif is_suspended and deployment in ("Initializing", "Running"):
            self.operator.set_job(name, "Suspending")
        elif deployment == "Suspending":
            self.operator.finish_suspension(name)
        elif is_suspended and deployment == "Suspended" and f"rayjob-{name}" in self.server.objects(WORKLOADS):
            self.operator.admit(name)
        elif deployment in (None, "Suspended") and not is_suspended:
            self.operator.start_cluster(name)
        elif deployment == "Initializing":
            self._begin_driver(name, ray_job)
        elif deployment == "Running":
            move_running()

    def _begin_driver(self, name: str, ray_job: Object) -> None:
        launch = self.launches[ray_job["metadata"]["annotations"][SUBMISSION_ANNOTATION]]
        self.operator.run(name)
        if not AttemptFolder(launch.storage, launch.attempt).claim_driver():  # as the driver itself does first
            self.operator.end(name, "FAILED", RAY_FAILURE.format(FENCED_EXIT_CODE), "AppFailed")

    def _move_running(self, data: st.DataObject, name: str, ray_job: Object) -> None:
        event = data.draw(st.sampled_from(["succeed", "fail", "oom", "lose a pod", "evict", "delete"]))
        job_id = ray_job["metadata"]["labels"]["shardyard.dev/job"]
        attempt = int(ray_job["metadata"]["labels"]["shardyard.dev/attempt"])
        is_current = self.plane.job(job_id).attempt == attempt
        if event == "succeed" and is_current:
            self.plane.end(job_id, SUCCEEDED)
            self.operator.end(name)
        elif event in ("fail", "oom"):
            self.operator.end(name, "FAILED", RAY_FAILURE.format(137 if event == "oom" else 1), "AppFailed")
        elif event == "lose a pod" and f"{name}-worker-0" in self.operator.pods():
            self.server.admin("DELETE", PODS, f"{name}-worker-0")
            self.operator.create_pods(name)
        elif event == "evict" and self.queue and f"rayjob-{name}" in self.server.objects(WORKLOADS):
            self.operator.evict(name, "Preempted", "preempted by another workload")
        elif event == "delete":
            self.server.admin("DELETE", RAY_JOBS, name)

    # What always holds

    @invariant()
    def nothing_is_launched_twice(self) -> None:
        active: dict[str, int] = {}
        for ray_job in self.operator.ray_jobs().values():
            metadata = ray_job["metadata"]
            submission = metadata["annotations"][SUBMISSION_ANNOTATION]
            uids = self.uids.setdefault(submission, set())
            uids |= {metadata["uid"]} - self.late_uids
            assert len(uids) <= 1, f"{submission} was launched twice"
            status = ray_job.get("status") or {}
            if status.get("jobStatus") == "RUNNING" and not metadata.get("deletionTimestamp"):
                job_id = metadata["labels"]["shardyard.dev/job"]
                active[job_id] = active.get(job_id, 0) + (status.get("jobDeploymentStatus") == "Running")
        assert all(count <= 1 for count in active.values()), active

    @invariant()
    def nothing_is_done_without_the_lease(self) -> None:
        assert self.unleased_acts == []

    @invariant()
    def every_state_has_words(self) -> None:
        for job_id in self.job_ids:
            job = self.plane.job(job_id)
            assert job.reason.strip(), job.state
            assert "\n" not in job.reason

    def teardown(self) -> None:
        """Let the cluster work: every job comes to its end."""
        if not hasattr(self, "plane"):
            return
        try:
            self.server.heal()
            self.server.deny()
            self.plane.clock.offset_s += POSTPONED_S
            self.standing.is_reachable = False
            self.plane.restart()  # a control plane that has heard nothing of either cluster
            self.job_ids.append(self.plane.post())
            for job_id in self.job_ids:
                if job_id not in self.standing_ids:
                    self.plane.await_job(job_id, self._is_over)
            self.standing.is_reachable = True
            for job_id in self.standing_ids:
                self.plane.await_job(job_id, self._is_over)
            self._end_orphans()
        finally:
            self.plane.stop()
            for resource in (RAY_JOBS, RAY_CLUSTERS, PODS, WORKLOADS):
                for name in self.server.objects(resource):
                    with unless_gone():
                        self.server.admin("DELETE", resource, name)
            self.folder.cleanup()

    def _end_orphans(self) -> None:
        """Launch every attempt again that is over, also of a job that was deleted: none stays, though nobody ends it
        on the cluster."""
        if not self.launches:
            return
        deleted = next(iter(self.launches.values())).job_id
        self.plane.services.deletions.ask(deleted, "tester")
        await_that(lambda: self._step() or self.plane.services.deletions.ask(deleted, "tester")[1] == "deleted")
        for submission_id in self.launches:
            self._launch_late(submission_id)
        instance = self.launches[submission_id].instance

        def live() -> list[str]:
            submissions = self.plane.launcher.submissions(instance)
            return [submission.submission_id for submission in submissions if not submission.has_ended]

        await_that(lambda: self._step() or not live(), lambda: str(live()), timeout_s=60.0)
        assert deleted not in {launch.job_id for launch in map(self._launch_of, self.operator.ray_jobs().values())}

    def _launch_of(self, ray_job: Object) -> Launch:
        return self.launches[ray_job["metadata"]["annotations"][SUBMISSION_ANNOTATION]]

    def _step(self) -> None:
        """A step of the control plane, and of KubeRay for RayJobs that are being suspended."""
        self.plane.services.controller.step()
        for name, ray_job in self.operator.ray_jobs().items():
            if ray_job["spec"].get("suspend") and (ray_job.get("status") or {}).get("jobDeploymentStatus"):
                with unless_gone():
                    self._move(name, ray_job, lambda: None)

    def _is_over(self, job: JobRow) -> bool:
        """Whether the job has ended; if not, the cluster works."""
        if State(job.state) in OVER:
            return True
        self._work()
        return False

    def _work(self) -> None:
        """One move of every RayJob towards its success."""
        for name, ray_job in self.operator.ray_jobs().items():
            with unless_gone():
                self._move(name, ray_job, partial(self._succeed, name, ray_job))
        if self.standing.is_reachable:
            for submission_id, status in list(self.standing.statuses.items()):
                if status == "running":
                    self._end_standing(submission_id, succeeds=True)

    def _succeed(self, name: str, ray_job: Object) -> None:
        labels = ray_job["metadata"]["labels"]
        if self.plane.job(labels["shardyard.dev/job"]).attempt == int(labels["shardyard.dev/attempt"]):
            self.plane.end(labels["shardyard.dev/job"], SUCCEEDED)
        self.operator.end(name)


@pytest.mark.slow
def test_any_sequence_of_events(shared_server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphans, "INTERVAL_S", 0.0)
    Cluster.server = shared_server
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Cluster,
        settings=settings(
            max_examples=12, stateful_step_count=25, deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )  # fmt: skip
