"""Objects of an overlay, and the pods that they declare."""

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from k8s.node import kuberay

Manifest = dict[str, Any]

OVERLAYS = Path(__file__).parents[1] / "overlays"
CLUSTER_DOMAIN = "cluster.local"


class NodeError(Exception):
    """Something that this node cannot run, with the remedy."""


@dataclass(frozen=True)
class Pod:
    name: str
    labels: dict[str, str]
    spec: Manifest

    @property
    def container(self) -> Manifest:
        (container,) = self.spec["containers"]
        return container


@dataclass(frozen=True)
class Service:
    """Names under which the pods with some labels are found."""

    names: tuple[str, ...]
    selector: dict[str, str]

    def selects(self, pod: Pod) -> bool:
        return self.selector.items() <= pod.labels.items()


@dataclass(frozen=True)
class Installation:
    """What an overlay installs, apart from what only an API server needs."""

    pods: tuple[Pod, ...]
    services: tuple[Service, ...]

    @classmethod
    def from_objects(cls, objects: list[Manifest], num_workers: int | None = None) -> "Installation":
        """Pods and services of the objects; `num_workers` replaces the replicas of each worker group."""
        namespace = next(m["metadata"]["name"] for m in objects if m["kind"] == "Namespace")
        clusters = [manifest for manifest in objects if manifest["kind"] == "RayCluster"]
        if not clusters:
            raise NodeError("the overlay has no RayCluster, and a cluster for each job needs an API server; use an "
                            "overlay with the component standing-cluster, such as local")  # fmt: skip
        pods = [*_deployed(objects)]
        services = [
            Service(_names(m["metadata"]["name"], namespace), m["spec"]["selector"])
            for m in objects if m["kind"] == "Service"
        ]  # fmt: skip
        for cluster in clusters:
            head_service = _names(kuberay.head_service(cluster), namespace)
            services.append(Service(head_service, kuberay.head_labels(cluster)))
            pods += [Pod(*pod) for pod in kuberay.pods(cluster, head_service[-1], num_workers)]
        return cls(tuple(pods), tuple(services))


def render(overlay: str) -> list[Manifest]:
    """Objects of an overlay: a name in k8s/overlays, or a folder."""
    folder = OVERLAYS / overlay if (OVERLAYS / overlay).is_dir() else Path(overlay)
    if not (folder / "kustomization.yaml").is_file():
        names = ", ".join(sorted(path.name for path in OVERLAYS.iterdir()))
        raise NodeError(f"overlay (={overlay}) is neither a folder with a kustomization.yaml nor one of {names}")
    run = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True)
    if run.returncode != 0:
        raise NodeError(f"kubectl cannot render {folder}: {run.stderr.strip()}")
    return list(yaml.safe_load_all(run.stdout))


def _deployed(objects: list[Manifest]) -> Iterator[Pod]:
    for manifest in objects:
        if manifest["kind"] == "Deployment":
            template = manifest["spec"]["template"]
            for index in range(manifest["spec"]["replicas"]):
                yield Pod(f"{manifest['metadata']['name']}-{index}", template["metadata"]["labels"], template["spec"])


def _names(service: str, namespace: str) -> tuple[str, ...]:
    """Names of a Service in the cluster's DNS, the longest last."""
    return (
        service,
        f"{service}.{namespace}",
        f"{service}.{namespace}.svc",
        f"{service}.{namespace}.svc.{CLUSTER_DOMAIN}",
    )
