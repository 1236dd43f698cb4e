"""Warm nodes: a standing RayCluster that waits idle for jobs with `resources.cluster: shared`."""

import threading
from typing import Any

import structlog

from service.control.kubernetes.api import KubernetesApi
from service.control.kubernetes.errors import Conflict, KubernetesError, Unavailable
from service.control.kubernetes.resource import RAY_CLUSTERS
from service.control.launcher.kuberay.names import PART_OF
from service.control.launcher.kuberay.pods import PodMaker
from service.control.launcher.kuberay.pools import whole_nodes
from service.control.launcher.kuberay.ray_job import API_VERSION, cluster_spec
from service.kuberay_settings import KubeRaySettings

RETRY_S = 5.0
"""Interval of attempts while the API server is away."""
REFUSED_RETRY_S = 60.0
"""Interval of attempts while it refuses."""
log = structlog.get_logger(__name__)


def build_shared_cluster(settings: KubeRaySettings, cache: str) -> dict[str, Any]:
    """RayCluster of the warm nodes, each of which is one pod. Raises SpecError for an operator's pod template that
    breaks a rule."""
    maker = PodMaker(settings, labels=PART_OF, submission_id="", cache=cache)
    spec = cluster_spec(settings, maker, whole_nodes(settings.warm_node_pool, settings.warm_nodes))
    namespace = {"namespace": settings.namespace} if settings.namespace else {}
    return {
        "apiVersion": API_VERSION,
        "kind": "RayCluster",
        "metadata": {"name": settings.shared_cluster, "labels": dict(PART_OF), **namespace},
        # Its dashboard is the control plane's, too: both read the token from one Secret.
        "spec": {**spec, "authOptions": {"mode": "token", "secretName": settings.shared_token_secret}},
    }


def cost_of_warm_nodes(settings: KubeRaySettings) -> str:
    """Cost of the warm nodes while they wait, in words."""
    pool, nodes = settings.warm_node_pool, settings.warm_nodes
    pods = f"{nodes} node{'s' if nodes != 1 else ''} of pool {pool.name}"
    if pool.node_price_per_hour is None:
        capacity = (
            f"{nodes * pool.gpus_per_node} GPUs" if pool.gpus_per_node else f"{nodes * pool.cpus_per_node:g} CPUs"
        )
        return f"{pods} wait idle for jobs with resources.cluster shared: {capacity} that no other job gets"
    price = nodes * pool.node_price_per_hour
    return (
        f"{pods} wait idle for jobs with resources.cluster shared, at {price:,.2f} an hour ({price * 730:,.0f} a month)"
    )


class WarmNodes:
    """Applies the RayCluster of the warm nodes once, as soon as the API server takes it."""

    def __init__(self, api: KubernetesApi, settings: KubeRaySettings, cache: str) -> None:
        self._api, self._manifest = api, build_shared_cluster(settings, cache)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._apply, name="warm-nodes", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop trying. The RayCluster stays."""
        self._closed.set()
        self._thread.join()

    def _apply(self) -> None:
        name = self._manifest["metadata"]["name"]
        while not self._closed.is_set():
            try:
                self._api.apply(RAY_CLUSTERS, self._manifest)
            except Unavailable as error:
                log.info("the warm nodes' cluster waits for the API server", ray_cluster=name, reason=str(error))
                self._closed.wait(RETRY_S)
            except Conflict as error:
                log.error("another manager owns the warm nodes' cluster; delete it, or set warm_nodes to 0",
                          ray_cluster=name, reason=str(error))  # fmt: skip
                self._closed.wait(REFUSED_RETRY_S)
            except KubernetesError as error:
                log.error("the warm nodes' cluster is refused", ray_cluster=name, reason=str(error))
                self._closed.wait(REFUSED_RETRY_S)
            else:
                log.info("the warm nodes' cluster is applied", ray_cluster=name)
                return
