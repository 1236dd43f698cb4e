"""Access to a Kubernetes API server: typed requests, and a mirror of the objects that the service watches.

It knows nothing of jobs or launchers. Objects are plain dictionaries in the API's own field names.
"""

from service.control.kubernetes.api import KubernetesApi, Page
from service.control.kubernetes.connection import Connection
from service.control.kubernetes.errors import (
    Cause,
    Conflict,
    Forbidden,
    Gone,
    Invalid,
    KubernetesError,
    Misconfigured,
    NotFound,
    NotServed,
    Unavailable,
)
from service.control.kubernetes.mirror import Mirror
from service.control.kubernetes.resource import (
    CONFIG_MAPS,
    EVENTS,
    LOCAL_QUEUES,
    PERSISTENT_VOLUME_CLAIMS,
    PODS,
    RAY_CLUSTERS,
    RAY_JOBS,
    WORKLOADS,
    Object,
    Resource,
)
from service.control.kubernetes.watched import WATCHED, WatchedResource

__all__ = [
    "KubernetesApi",
    "Connection",
    "Page",
    "Mirror",
    "WatchedResource",
    "WATCHED",
    "Object",
    "Resource",
    "RAY_JOBS",
    "RAY_CLUSTERS",
    "PODS",
    "EVENTS",
    "CONFIG_MAPS",
    "PERSISTENT_VOLUME_CLAIMS",
    "WORKLOADS",
    "LOCAL_QUEUES",
    "KubernetesError",
    "Misconfigured",
    "Unavailable",
    "Forbidden",
    "NotFound",
    "NotServed",
    "Conflict",
    "Gone",
    "Invalid",
    "Cause",
]
