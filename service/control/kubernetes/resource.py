"""Resources of the Kubernetes API that the service uses."""

from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

Object = dict[str, Any]
"""An object of the API in its own field names."""


@dataclass(frozen=True)
class Resource:
    """A resource that an API server serves, such as `rayjobs.ray.io`."""

    group: str
    """API group; empty for the core group."""
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def name(self) -> str:
        """Plural with its group, as RBAC and error messages of the API server write it."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def path(self, namespace: str, name: str = "", subresource: str = "") -> str:
        """URL path of the collection, or of one object or its subresource."""
        parts = ["apis", self.group, self.version] if self.group else ["api", self.version]
        if self.namespaced:
            parts += ["namespaces", namespace]
        parts += [self.plural, *([name] if name else []), *([subresource] if subresource else [])]
        return "/" + "/".join(quote(part, safe="") for part in parts)


RAY_JOBS = Resource("ray.io", "v1", "rayjobs", "RayJob")
RAY_CLUSTERS = Resource("ray.io", "v1", "rayclusters", "RayCluster")
PODS = Resource("", "v1", "pods", "Pod")
EVENTS = Resource("", "v1", "events", "Event")
CONFIG_MAPS = Resource("", "v1", "configmaps", "ConfigMap")
PERSISTENT_VOLUME_CLAIMS = Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
# Kueue 0.20 no longer serves v1beta1.
WORKLOADS = Resource("kueue.x-k8s.io", "v1beta2", "workloads", "Workload")
LOCAL_QUEUES = Resource("kueue.x-k8s.io", "v1beta2", "localqueues", "LocalQueue")
SELF_SUBJECT_ACCESS_REVIEWS = Resource(
    "authorization.k8s.io", "v1", "selfsubjectaccessreviews", "SelfSubjectAccessReview", namespaced=False
)
