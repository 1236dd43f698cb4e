"""Checks of a Kubernetes cluster before jobs are launched on it: facts that are fetched, and pure rules on them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from moe.spec import SpecError
from service.control.kubernetes.api import KubernetesApi
from service.control.kubernetes.errors import Forbidden, Invalid, KubernetesError, NotFound, Unavailable
from service.control.kubernetes.resource import (
    EVENTS,
    LOCAL_QUEUES,
    PERSISTENT_VOLUME_CLAIMS,
    PODS,
    RAY_CLUSTERS,
    RAY_JOBS,
    SELF_SUBJECT_ACCESS_REVIEWS,
    WORKLOADS,
    Object,
    Resource,
)
from service.control.launcher.kuberay.pods import pod_mounts
from service.control.launcher.kuberay.ray_job import sample_ray_job
from service.kuberay_settings import KubeRaySettings

KUBERAY_VERSION = "1.7"
"""Oldest release of the operator whose definitions have every field of our RayJobs."""
_VERBS: dict[Resource, tuple[str, ...]] = {
    RAY_JOBS: ("get", "list", "watch", "create", "patch", "delete"),
    RAY_CLUSTERS: ("list", "watch"),
    PODS: ("list", "watch"),
    EVENTS: ("list", "watch"),
}
_KUEUE_VERBS: dict[Resource, tuple[str, ...]] = {WORKLOADS: ("list", "watch")}
_WARM_VERBS: dict[Resource, tuple[str, ...]] = {RAY_CLUSTERS: ("list", "watch", "create", "patch")}
_ROLE = "grant it in the Role of the control plane (k8s/components/own-clusters, kueue)"

Answer = Object | KubernetesError
"""An object, or why it was not returned."""


@dataclass(frozen=True)
class ClusterAnswers:
    """Answers of an API server to the questions of the checks."""

    namespace: str
    denied: tuple[tuple[str, Resource], ...] = ()
    """Verbs that the credentials lack."""
    not_served: Mapping[Resource, str] = field(default_factory=dict)
    """Resources without a definition, with the server's words."""
    queues: Mapping[str, Answer] = field(default_factory=dict)
    claim: Answer | None = None
    """The claim of jobs' storage; None without one."""
    dry_run: Answer | None = None
    """A RayJob as ours that the server checked and did not store; None if the server does not serve them."""


@dataclass(frozen=True)
class PreflightReport:
    """Faults that every job would meet, and notes about facts that could not be checked. All name the object and the
    remedy."""

    faults: tuple[str, ...]
    notes: tuple[str, ...]


def check_cluster(api: KubernetesApi, settings: KubeRaySettings, cache: str) -> PreflightReport:
    """Check the cluster of an API server. `cache`: folder for prepared corpora. Raises Unavailable if it does not
    answer."""
    try:
        sample = sample_ray_job(settings, cache)
    except SpecError as error:  # the operator's own pod template
        return PreflightReport((str(error),), ())
    return report_on(fetch_answers(api, settings, sample), settings)


def check_storage(locations: Sequence[str], settings: KubeRaySettings) -> tuple[str, ...]:
    """Faults of storage roots that pods cannot see. `locations`: the roots as URLs, or as paths without links."""
    mounts = pod_mounts(settings)
    return tuple(
        f"storage_roots (={location!r}) is a folder that pods do not mount ({_mounts_in_words(mounts)}); "
        f"{_storage_remedy(mounts)}"
        for location in locations
        if "://" not in location and not any(PurePosixPath(location).is_relative_to(mount) for mount in mounts)
    )


def _mounts_in_words(mounts: Sequence[str]) -> str:
    return f"they mount {', '.join(mounts)}" if mounts else "kuberay.storage_claim is empty"


def _storage_remedy(mounts: Sequence[str]) -> str:
    if mounts:
        return f"set SHARDYARD_STORAGE_ROOTS to a folder under {mounts[0]}, or to the URL of an object store"
    return "name the claim in SHARDYARD_KUBERAY_STORAGE_CLAIM, or set SHARDYARD_STORAGE_ROOTS to an object store's URL"


def fetch_answers(api: KubernetesApi, settings: KubeRaySettings, sample: Object) -> ClusterAnswers:
    """Ask the API server. `sample`: a RayJob to check without storing it. Raises Unavailable."""
    denied = [
        (verb, resource)
        for resource, verbs in _verbs(settings).items()
        for verb in verbs
        if not _has_right(api, verb, resource)
    ]
    not_served = {}
    for resource in (RAY_JOBS, RAY_CLUSTERS, *([WORKLOADS] if _queues(settings) else [])):
        if ("list", resource) not in denied and isinstance(answer := _list(api, resource), NotFound):
            not_served[resource] = str(answer)
    can_create = RAY_JOBS not in not_served and ("create", RAY_JOBS) not in denied
    return ClusterAnswers(
        namespace=api.namespace,
        denied=tuple(denied),
        not_served=not_served,
        queues={}
        if WORKLOADS in not_served
        else {queue: _get(api, LOCAL_QUEUES, queue) for queue in _queues(settings)},
        claim=_get(api, PERSISTENT_VOLUME_CLAIMS, settings.storage_claim) if settings.storage_claim else None,
        dry_run=_dry_run(api, sample) if can_create else None,
    )


def report_on(answers: ClusterAnswers, settings: KubeRaySettings) -> PreflightReport:
    """Apply the rules to the answers."""
    faults = [
        *_missing_rights(answers),
        *answers.not_served.values(),
        *_refused_sample(answers.dry_run),
        *_queue_faults(answers),
        *_claim_faults(answers, settings),
    ]
    return PreflightReport(tuple(faults), tuple(_notes(answers)))


def _missing_rights(answers: ClusterAnswers) -> Iterator[str]:
    verbs: dict[Resource, list[str]] = {}
    for verb, resource in answers.denied:
        verbs.setdefault(resource, []).append(verb)
    for resource, names in verbs.items():
        yield f"the credentials may not {', '.join(names)} {resource.name} in namespace {answers.namespace}; {_ROLE}"


def _refused_sample(dry_run: Answer | None) -> Iterator[str]:
    if not isinstance(dry_run, Invalid):
        if isinstance(dry_run, KubernetesError) and not isinstance(dry_run, Unavailable):
            yield f"a RayJob as this service makes them is refused: {dry_run}"
        return
    if dry_run.rule == "schema":
        fields = "; ".join(f"{cause.field}: {cause.message}" for cause in dry_run.causes) or str(dry_run)
        yield (
            f"the definition of rayjobs.ray.io refuses RayJobs as this service makes them ({fields}); install KubeRay "
            f"{KUBERAY_VERSION} or later with its definitions"
        )
    elif dry_run.rule != "quota":  # a quota that is used up now may not be later
        yield f"a RayJob as this service makes them is refused: {dry_run}; change that policy, or the pod template"


def _queue_faults(answers: ClusterAnswers) -> Iterator[str]:
    for name, answer in answers.queues.items():
        if isinstance(answer, NotFound):
            yield (
                f"kuberay.queue (={name!r}) names no LocalQueue of namespace {answers.namespace}; create it, or "
                "correct SHARDYARD_KUBERAY_QUEUE and SHARDYARD_KUBERAY_QUEUES"
            )
        elif isinstance(answer, KubernetesError) and not isinstance(answer, Forbidden):
            yield f"kuberay.queue (={name!r}) cannot be read: {answer}"


def _claim_faults(answers: ClusterAnswers, settings: KubeRaySettings) -> Iterator[str]:
    claim, setting = answers.claim, f"kuberay.storage_claim (={settings.storage_claim!r})"
    if isinstance(claim, NotFound):
        yield (
            f"{setting} names no PersistentVolumeClaim of namespace {answers.namespace}; create it, or set "
            "SHARDYARD_KUBERAY_STORAGE_CLAIM, empty with an object store"
        )
    elif isinstance(claim, KubernetesError):
        if not isinstance(claim, Forbidden):
            yield f"{setting} cannot be read: {claim}"
    elif claim is not None:
        modes = (claim.get("spec") or {}).get("accessModes") or []
        num_nodes = sum(pool.nodes for pool in settings.pools)
        if "ReadWriteMany" not in modes and not (num_nodes == 1 and "ReadWriteOnce" in modes):
            yield (
                f"{setting}: spec.accessModes (={', '.join(modes) or 'none'}) must contain ReadWriteMany, since pods "
                "of several nodes write to it; use a storage class that has it, or an object store"
            )


def _notes(answers: ClusterAnswers) -> Iterator[str]:
    for name, answer in answers.queues.items():
        if isinstance(answer, Forbidden):
            yield f"whether the LocalQueue {name} exists is not known; grant get on localqueues.kueue.x-k8s.io"
        elif not isinstance(answer, KubernetesError):
            yield from _idle_queue(name, answer)
    if isinstance(answers.claim, Forbidden):
        yield "the claim's access modes are not known; grant get on persistentvolumeclaims"


def _idle_queue(name: str, queue: Object) -> Iterator[str]:
    policy = (queue.get("spec") or {}).get("stopPolicy") or "None"
    if policy != "None":
        yield f"LocalQueue {name} admits nothing: spec.stopPolicy is {policy}"
    for condition in (queue.get("status") or {}).get("conditions") or ():
        if condition.get("type") == "Active" and condition.get("status") == "False":
            yield f"LocalQueue {name} admits nothing: {condition.get('message') or condition.get('reason')}"


def _verbs(settings: KubeRaySettings) -> dict[Resource, tuple[str, ...]]:
    kueue = _KUEUE_VERBS if _queues(settings) else {}
    return {**_VERBS, **kueue, **(_WARM_VERBS if settings.warm_nodes else {})}


def _queues(settings: KubeRaySettings) -> list[str]:
    return list(dict.fromkeys(filter(None, (settings.queue, *settings.queues))))


def _has_right(api: KubernetesApi, verb: str, resource: Resource) -> bool:
    """Whether the credentials have the verb. A server that does not say has it refused later, in its words."""
    attributes = {"namespace": api.namespace, "verb": verb, "group": resource.group, "resource": resource.plural}
    review = {"metadata": {}, "spec": {"resourceAttributes": attributes}}
    try:
        answer = api.create(SELF_SUBJECT_ACCESS_REVIEWS, review)
    except Unavailable:
        raise
    except KubernetesError:
        return True
    return bool((answer.get("status") or {}).get("allowed"))


def _list(api: KubernetesApi, resource: Resource) -> KubernetesError | None:
    try:
        api.list_page(resource, limit=1)
    except Unavailable:
        raise
    except KubernetesError as error:
        return error
    return None


def _get(api: KubernetesApi, resource: Resource, name: str) -> Answer:
    try:
        return api.get(resource, name)
    except Unavailable:
        raise
    except KubernetesError as error:
        return error


def _dry_run(api: KubernetesApi, sample: Object) -> Answer:
    try:
        return api.create(RAY_JOBS, sample, dry_run=True)
    except Unavailable:
        raise
    except KubernetesError as error:
        return error
