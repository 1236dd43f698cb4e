"""Drivers as RayJobs on Kubernetes, each with a Ray cluster of its own, through KubeRay."""

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import quote

import structlog

from moe.plan import Calibration
from moe.spec import ResourcesSpec, SpecError
from service.control.kubernetes.api import KubernetesApi
from service.control.kubernetes.errors import Conflict, Invalid, KubernetesError, NotFound
from service.control.kubernetes.mirror import Mirror
from service.control.kubernetes.pending_requests import WAIT_S, PendingRequests
from service.control.kubernetes.resource import PODS, RAY_CLUSTERS, RAY_JOBS, WORKLOADS, Object, Resource
from service.control.kubernetes.watched import WATCHED, WATCHED_KUEUE
from service.control.launcher.kuberay.facts import (
    AttemptFacts,
    EventFacts,
    PodFacts,
    RayClusterFacts,
    RayJobFacts,
    WorkloadFacts,
)
from service.control.launcher.kuberay.names import (
    INSTANCE_LABEL,
    JOB_LABEL,
    PART_OF,
    SUBMISSION_ANNOTATION,
    label_value,
    ray_job_name,
)
from service.control.launcher.kuberay.outcome import observe
from service.control.launcher.kuberay.pods import check_jobs_template
from service.control.launcher.kuberay.pools import cluster_facts
from service.control.launcher.kuberay.ray_job import build_ray_job
from service.control.launcher.kuberay.warm_nodes import WarmNodes
from service.control.launcher.launcher import (
    CalibrationUnsupported,
    ClusterFacts,
    ClusterKind,
    Launcher,
    LauncherUnavailable,
    LaunchPostponed,
    LaunchRefusal,
    Observation,
    Submission,
)
from service.control.launcher.offers import check_own
from service.kuberay_settings import KubeRaySettings
from service.wire.attempt_folder import AttemptFolder
from service.wire.launch import Launch

STALE_S = 10.0
"""Time for which a broken watch is tolerated: until then, the last known objects count."""
LOOK_INTERVAL_S = 5.0
"""Age at which an observation is repeated although no object changed: some messages depend on the time."""
RUNNING_LOOK_INTERVAL_S = 60.0
"""As `LOOK_INTERVAL_S`, for running submissions, whose messages seldom do: parsing the pods of 1,000 submissions takes
half a second."""
POSTPONED_S = 10.0
"""Interval of submissions that a quota refuses."""
log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class _CachedObservation:
    """An observation, valid until one of its objects changes, or until a time."""

    observation: Observation
    until_s: float


class KubeRayLauncher(Launcher):
    """One RayJob per attempt; its name, made from the submission id, makes submitting idempotent.

    Observations come from a mirror of watched objects: no request is made for them. Restarts need no memory, since
    all objects are found by name and labels. A call waits only briefly for an API server that hangs; its request
    continues, and a repeated call gets the response.
    """

    def __init__(
        self,
        api: KubernetesApi,
        settings: KubeRaySettings,
        *,
        cache: str = "",
        clock: Callable[[], float] = time.time,
        wait_s: float = WAIT_S,
    ) -> None:
        """Starts to watch. `cache`: folder for prepared corpora; `clock`: returns Unix time; `wait_s`: longest wait of
        a call for the API server."""
        self._api, self._settings, self._cache, self._clock = api, settings, cache, clock
        self._lock = threading.Lock()
        self._wake: Callable[[], None] = lambda: None
        self._requests = PendingRequests(lambda: self._wake(), wait_s)
        self._observations: dict[str, _CachedObservation] = {}
        """Observations by the value of the submission label."""
        self._changed: set[str] = set()
        """Labels of objects that changed since they were last looked at."""
        self._seen: set[str] = set()
        """Submissions whose RayJob was observed: a missing one was deleted."""
        self._submitted: dict[str, Object] = {}
        """RayJobs that were created and are not in the mirror yet."""
        self._postponed: dict[str, tuple[float, str]] = {}
        """(time of the next try, reason) of submissions that a quota refused."""
        uses_kueue = bool(settings.queue or settings.queues)
        watched = (*WATCHED, WATCHED_KUEUE) if uses_kueue else WATCHED
        self._resources = tuple(entry.resource for entry in watched)
        self._mirror = Mirror(api, watched, on_change=self._note_change, clock=clock)
        self._mirror.start()
        self._warm_nodes = WarmNodes(api, settings, cache) if settings.warm_nodes else None

    def on_change(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def check(self, resources: ResourcesSpec) -> None:
        check_own(resources, self._settings)
        check_jobs_template(resources.pod_template, self._settings, self._cache)

    def cluster(self) -> ClusterFacts:
        self._require_sync()
        return cluster_facts(self._settings.job_pools)

    def by_kind(self) -> Mapping[ClusterKind, Launcher]:
        return {"own": self}

    def submit(self, launch: Launch) -> None:
        self._require_sync()
        submission_id = launch.submission_id
        if self._ray_job(submission_id) is not None:
            return
        retry_at_s, reason = self._postponed.get(submission_id, (0.0, ""))
        if self._clock() < retry_at_s:
            raise LaunchPostponed(reason)
        path = AttemptFolder(launch.storage, launch.attempt).write_launch(launch)
        try:
            manifest = build_ray_job(launch, path, self._settings)
        except SpecError as error:  # the operator's rules have changed since the POST
            raise LaunchRefusal(str(error)) from error
        with _translated():
            created = self._requests.response(
                "create", manifest["metadata"]["name"], lambda: self._create(submission_id, manifest)
            )
        with self._lock:
            self._postponed.pop(submission_id, None)
            self._submitted[submission_id] = created
            self._seen.add(submission_id)

    def _create(self, submission_id: str, manifest: Object) -> Object:
        """Create the RayJob, or adopt the submission's own. An existing one is never changed: Kueue or a stop may have
        set its fields."""
        name = manifest["metadata"]["name"]
        try:
            return self._api.create(RAY_JOBS, manifest)
        except Conflict as error:
            try:
                ray_job = self._api.get(RAY_JOBS, name)
            except NotFound:  # deleted at this moment
                raise LauncherUnavailable(f"RayJob {name} was not created: {error}", is_of_one_request=True) from error
            if not _belongs_to(ray_job, submission_id):
                raise LaunchRefusal(
                    f"RayJob {name} exists in namespace {self._api.namespace}, and is not of submission "
                    f"{submission_id}; delete it, then resume the job"
                ) from error
            return ray_job
        except Invalid as error:
            if error.rule != "quota":
                refusal = "an admission webhook denies it" if error.rule == "webhook" else "the API server refuses it"
                raise LaunchRefusal(f"{refusal}: {error}") from error
            reason = f"the namespace's quota is exceeded: {error}"
            with self._lock:
                self._postponed[submission_id] = (self._clock() + POSTPONED_S, reason)
            raise LaunchPostponed(reason) from error

    def observe(self, submission_id: str) -> Observation:
        self._require_sync()
        label, now_s = label_value(submission_id), self._clock()
        with self._lock:
            cached = self._observations.get(label)
            self._changed.discard(label)
        if cached is not None and now_s < cached.until_s:
            return cached.observation
        observation = observe(self._facts(submission_id, label))
        with self._lock:
            if not observation.has_ended and observation.status != "unknown" and label not in self._changed:
                interval_s = RUNNING_LOOK_INTERVAL_S if observation.status == "running" else LOOK_INTERVAL_S
                # Random, so that observations that began together are not all repeated in one step.
                self._observations[label] = _CachedObservation(
                    observation, now_s + interval_s * random.uniform(0.5, 1.0)
                )
        return observation

    def stop(self, submission_id: str) -> None:
        self._require_sync()
        ray_job = self._ray_job(submission_id)
        with self._lock:
            self._observations.pop(label_value(submission_id), None)
            self._postponed.pop(submission_id, None)
        if ray_job is None:
            if self._requests.is_pending("create", name := ray_job_name(submission_id)):
                raise LauncherUnavailable(
                    f"the API server has not answered the request to create {name} yet", is_of_one_request=True
                )
            self._seen.discard(submission_id)
            return
        if ray_job["metadata"].get("deletionTimestamp"):
            return
        facts = RayJobFacts.parse(ray_job)
        observation = observe(AttemptFacts(now_s=self._clock(), ray_job=facts))
        if facts.queue or observation.status != "running":
            # Kueue owns `suspend` of a queued RayJob, and would start an evicted one again; so might anyone start one
            # whose driver has not run.
            self._delete(ray_job)
        elif not facts.is_suspended:
            log.info("suspending a RayJob", ray_job=facts.name)
            with _translated(), _ignoring_absence():
                patch = {"spec": {"suspend": True}}
                self._requests.response("patch", facts.name, lambda: self._api.patch(RAY_JOBS, facts.name, patch))

    def forget_job(self, job_id: str) -> None:
        self._require_sync()
        for ray_job in self._mirror.all(RAY_JOBS):
            is_of_job = _labels_of(ray_job).get(JOB_LABEL) == label_value(job_id)
            if is_of_job and not ray_job["metadata"].get("deletionTimestamp"):
                self._delete(ray_job)

    def submissions(self, instance: str) -> Sequence[Submission]:
        self._require_sync()
        return [
            Submission(submission_id, has_ended=observe(AttemptFacts(self._clock(), RayJobFacts.parse(job))).has_ended)
            for job in self._mirror.all(RAY_JOBS)
            if _labels_of(job).get(INSTANCE_LABEL) == instance
            and not job["metadata"].get("deletionTimestamp")
            and (submission_id := _submission_of(job))
        ]

    def calibrate(self) -> Calibration:
        raise CalibrationUnsupported(
            "Ray clusters that come and go with their jobs are not measured: their plans use published figures of the "
            "pools' accelerators. To measure such nodes, keep some warm (SHARDYARD_KUBERAY_WARM_NODES) or name a "
            "standing cluster on them (SHARDYARD_RAY_DASHBOARD_URL), and calibrate again; or have a job measure its "
            "own best plans with parallel.auto (='measured')"
        )

    def dashboard_url(self, submission_id: str) -> str | None:
        ray_job = self._ray_job(submission_id)
        address = RayJobFacts.parse(ray_job).dashboard_url if ray_job is not None else ""
        return f"http://{address}/#/jobs/{quote(submission_id, safe='')}" if address else None

    def queue_of(self, resources: ResourcesSpec) -> str:
        return resources.queue or self._settings.queue

    def close(self) -> None:
        if self._warm_nodes is not None:
            self._warm_nodes.close()
        self._mirror.close()
        self._api.close()

    def _facts(self, submission_id: str, label: str) -> AttemptFacts:
        ray_job = self._ray_job(submission_id)
        with self._lock:
            if ray_job is not None:
                self._seen.add(submission_id)
            was_seen = submission_id in self._seen
        pods = self._mirror.objects(PODS, label)
        uid = _uid(ray_job)
        clusters = self._mirror.owned(RAY_CLUSTERS, uid) if uid else self._mirror.objects(RAY_CLUSTERS, label)
        workloads = self._mirror.owned(WORKLOADS, uid) if uid and WORKLOADS in self._resources else ()
        cluster = max(clusters, key=_creation, default=None)
        events = [
            EventFacts.parse(event)
            for uid in (uid, *map(_uid, clusters), *map(_uid, pods))
            if uid
            for event in self._mirror.events(uid)
        ]
        workload = max(workloads, key=_creation, default=None)
        return AttemptFacts(
            now_s=self._clock(),
            ray_job=None if ray_job is None else RayJobFacts.parse(ray_job),
            ray_cluster=None if cluster is None else RayClusterFacts.parse(cluster),
            pods=tuple(map(PodFacts.parse, pods)),
            events=events,
            workload=None if workload is None else WorkloadFacts.parse(workload),
            was_seen=was_seen,
        )

    def _ray_job(self, submission_id: str) -> Object | None:
        """The submission's RayJob, also before the mirror has it."""
        ray_job = self._mirror.get(RAY_JOBS, ray_job_name(submission_id))
        with self._lock:
            created = self._submitted.get(submission_id)
        if ray_job is None and created is not None:
            name = created["metadata"]["name"]
            with _translated(), _ignoring_absence():
                return self._requests.response("get", name, lambda: self._api.get(RAY_JOBS, name))
        with self._lock:
            self._submitted.pop(submission_id, None)
        return ray_job if _belongs_to(ray_job, submission_id) else None

    def _delete(self, ray_job: Object) -> None:
        name = ray_job["metadata"]["name"]
        log.info("deleting a RayJob", ray_job=name)

        def delete() -> bool:
            return self._api.delete(RAY_JOBS, name, propagation="Foreground", uid=_uid(ray_job))

        with _translated():
            self._requests.response("delete", name, delete)

    def _note_change(self, resource: Resource, label: str) -> None:
        """Called on the watches' threads."""
        if label:
            with self._lock:
                self._observations.pop(label, None)
                self._changed.add(label)
        self._wake()

    def _require_sync(self) -> None:
        """Raises LauncherUnavailable if the mirror was never complete, or has been out of date for `STALE_S`."""
        since_s = self._mirror.out_of_sync_since
        if self._mirror.has_listed and (since_s is None or self._clock() - since_s < STALE_S):
            return
        error = self._mirror.error
        raise LauncherUnavailable(f"cannot watch Kubernetes: {error or 'its objects are being listed'}")


@contextmanager
def _translated() -> Iterator[None]:
    """Context that turns errors of a request into those of launchers. Whether the cluster can be reached is judged by
    its watches."""
    try:
        yield
    except KubernetesError as error:
        raise LauncherUnavailable(str(error), is_of_one_request=True) from error


@contextmanager
def _ignoring_absence() -> Iterator[None]:
    try:
        yield
    except NotFound:
        log.info("an object was deleted meanwhile")


def _submission_of(ray_job: Object) -> str:
    return str((ray_job["metadata"].get("annotations") or {}).get(SUBMISSION_ANNOTATION, ""))


def _labels_of(ray_job: Object) -> Mapping[str, str]:
    return ray_job["metadata"].get("labels") or {}


def _belongs_to(ray_job: Object | None, submission_id: str) -> bool:
    """Whether this is the submission's RayJob, and of this service."""
    return (
        ray_job is not None
        and PART_OF.items() <= _labels_of(ray_job).items()
        and _submission_of(ray_job) == submission_id
    )


def _uid(value: Object | None) -> str:
    return str((value or {}).get("metadata", {}).get("uid") or "")


def _creation(value: Object) -> str:
    """Creation time, which sorts as text."""
    return str(value["metadata"].get("creationTimestamp") or "")
