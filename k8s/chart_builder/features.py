"""Features of the chart: a kustomize component each, with the value that switches it on.

What a feature changes is the difference between the objects rendered with its component and those rendered without it,
both with the components of `upon`, which it changes.
"""

import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

K8S = Path(__file__).parents[1]
NOT_IN_CHARTS = ("Namespace",)
"""Kinds left to whoever installs: `helm install --create-namespace`."""

_CLUSTER_SCOPED = ("ClusterQueue", "ResourceFlavor", "Topology", "WorkloadPriorityClass")
"""Kinds that kustomize does not know, and gives a namespace."""

Objects = dict[tuple[str, str], dict[str, Any]]
"""Objects by kind and name."""


@dataclass(frozen=True)
class Feature:
    """One component of `k8s/components`, switched on by a condition on the chart's values."""

    component: str
    condition: str
    """Go template expression."""
    upon: tuple[str, ...] = ()
    """Components that this one changes, rendered first."""


_RDMA = ("standing-cluster", "nvidia", "rdma")
FEATURES = (
    Feature("standing-cluster", ".Values.standingCluster.enabled"),
    Feature("own-clusters", ".Values.ownClusters.enabled"),
    Feature("warm-nodes", "and .Values.ownClusters.enabled .Values.ownClusters.warmNodes", ("own-clusters",)),
    Feature("nvidia", 'eq .Values.accelerator "nvidia"', ("standing-cluster",)),
    Feature("amd", 'eq .Values.accelerator "amd"', ("standing-cluster",)),
    Feature("rdma", 'has .Values.network (list "host-network" "sriov")', _RDMA[:2]),
    Feature("host-network", 'eq .Values.network "host-network"', _RDMA),
    Feature("sriov", 'eq .Values.network "sriov"', _RDMA),
    Feature("kueue", ".Values.kueue.enabled", ("own-clusters",)),
    Feature("kueue-topology", "and .Values.kueue.enabled .Values.kueue.topology", ("own-clusters", "kueue")),
    Feature("backup", ".Values.backup.enabled"),
    Feature("postgres", ".Values.postgres.enabled", ("backup",)),
    Feature("object-store", ".Values.objectStore.enabled", ("standing-cluster", "backup")),
    Feature(
        "object-store-secret",
        "and .Values.objectStore.enabled .Values.objectStore.secret",
        ("standing-cluster", "backup", "object-store"),
    ),
    Feature(
        "workload-identity",
        "and .Values.objectStore.enabled .Values.objectStore.workloadIdentity",
        ("standing-cluster", "backup", "object-store"),
    ),
    Feature("tls-ingress", ".Values.ingress.enabled"),
    Feature("tls-gateway", ".Values.gateway.enabled"),
    Feature("monitoring", ".Values.monitoring.enabled"),
)
"""In order: where two change the same field, the later one's value is used."""


def render(components: Sequence[str], kubectl: str = "kubectl") -> Objects:
    """Render the base with components. Raises CalledProcessError with kubectl's output."""
    with tempfile.TemporaryDirectory() as temporary_folder:
        folder = Path(temporary_folder).resolve()
        kustomization = {
            "resources": [os.path.relpath(K8S / "base", folder)],
            "components": [os.path.relpath(K8S / "components" / name, folder) for name in components],
            "namespace": "shardyard",
            "labels": [{"pairs": {"app.kubernetes.io/part-of": "shardyard"}}],
        }
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        text = subprocess.run(
            [kubectl, "kustomize", folder], check=True, capture_output=True, text=True, timeout=60
        ).stdout
    objects = [document for document in yaml.load_all(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)) if document]
    for item in objects:
        if item["kind"] in _CLUSTER_SCOPED:
            item["metadata"].pop("namespace", None)
    return {(item["kind"], item["metadata"]["name"]): item for item in objects if item["kind"] not in NOT_IN_CHARTS}
