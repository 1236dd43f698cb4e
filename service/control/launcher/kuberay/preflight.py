"""Checks of the Kubernetes cluster before jobs are launched on it."""

from collections.abc import Iterator

from service.control.kubernetes.api import KubernetesApi
from service.control.kubernetes.errors import Forbidden, KubernetesError, NotFound, Unavailable
from service.control.kubernetes.resource import LOCAL_QUEUES, PERSISTENT_VOLUME_CLAIMS
from service.control.kubernetes.watched import WATCHED, WATCHED_KUEUE
from service.kuberay_settings import KubeRaySettings

_SHARED_MODE = "ReadWriteMany"


def find_problems(api: KubernetesApi, settings: KubeRaySettings) -> list[str]:
    """Faults of the cluster that every job would meet, each with its object and its remedy. Raises Unavailable if the
    API server does not answer."""
    return [*_unwatchable(api, settings), *_missing_queues(api, settings), *_bad_claim(api, settings)]


def _unwatchable(api: KubernetesApi, settings: KubeRaySettings) -> Iterator[str]:
    watched = (*WATCHED, WATCHED_KUEUE) if settings.queue or settings.queues else WATCHED
    for entry in watched:
        try:
            api.list_page(entry.resource, limit=1)
        except Unavailable:
            raise
        except Forbidden as error:
            yield f"{error}; grant the verbs of the Role 'control-plane' (k8s/components/own-clusters/role.yaml)"
        except KubernetesError as error:
            yield str(error)


def _missing_queues(api: KubernetesApi, settings: KubeRaySettings) -> Iterator[str]:
    for queue in dict.fromkeys(filter(None, (settings.queue, *settings.queues))):
        try:
            api.get(LOCAL_QUEUES, queue)
        except Unavailable:
            raise
        except NotFound:
            yield (
                f"kuberay.queue (={queue!r}) names no LocalQueue of namespace {api.namespace}; create it, or correct "
                "SHARDYARD_KUBERAY_QUEUE and SHARDYARD_KUBERAY_QUEUES"
            )
        except KubernetesError as error:
            yield str(error)


def _bad_claim(api: KubernetesApi, settings: KubeRaySettings) -> Iterator[str]:
    name = settings.storage_claim
    if not name:
        return
    place = f"kuberay.storage_claim (={name!r})"
    try:
        claim = api.get(PERSISTENT_VOLUME_CLAIMS, name)
    except Unavailable:
        raise
    except NotFound:
        yield (
            f"{place} names no PersistentVolumeClaim of namespace {api.namespace}; create it, or set "
            "SHARDYARD_KUBERAY_STORAGE_CLAIM, empty with an object store"
        )
        return
    except KubernetesError as error:
        yield str(error)
        return
    modes = (claim.get("spec") or {}).get("accessModes") or []
    if _SHARED_MODE not in modes:
        yield (
            f"{place}: spec.accessModes (={', '.join(modes) or 'none'}) must contain {_SHARED_MODE}, since pods of "
            "several nodes write to it; use a storage class that has it, or an object store"
        )
