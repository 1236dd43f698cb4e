"""Overlays of the repository and others of the same components, rendered."""

import os
import subprocess
from pathlib import Path

import yaml

from tests.deploy.deployment import ROOT, Overlay

OVERLAYS = sorted(folder.name for folder in (ROOT / "k8s" / "overlays").iterdir())
COMBINATIONS = {
    "both-launchers": [
        "standing-cluster",
        "own-clusters",
        "nvidia",
        "kueue",
        "kueue-topology",
        "postgres",
        "tls-ingress",
    ],
    "gateway": ["own-clusters", "amd", "backup", "object-store", "workload-identity", "tls-gateway"],
    "standing-object-store": ["standing-cluster", "nvidia", "object-store", "object-store-secret", "tls-gateway"],
    "warm-nodes": ["own-clusters", "nvidia", "warm-nodes"],
    "standing-backup": ["standing-cluster", "backup", "one-node"],
    "standing-postgres": ["standing-cluster", "backup", "postgres", "monitoring"],
}
"""Further overlays by their components, as a site could write them."""


def render(kubectl: str, folder: Path) -> Overlay:
    """Objects of a kustomization, which must render without warnings."""
    run = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stderr) == (0, ""), f"{folder}: {run.stderr}"
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return Overlay(folder.name, tuple(yaml.load_all(run.stdout, Loader=loader)))


def write_overlay(folder: Path, components: list[str]) -> Path:
    """Kustomization of the base with these components; a KubeRay launcher gets the image and a node pool."""
    k8s = os.path.relpath((ROOT / "k8s").resolve(), folder.resolve())
    kuberay = ROOT / "k8s" / "overlays" / "kuberay"
    shared = yaml.safe_load((kuberay / "kustomization.yaml").read_text())
    kustomization = {
        "namespace": "shardyard",
        "labels": shared["labels"],
        "resources": [f"{k8s}/base"],
        "components": [f"{k8s}/components/{name}" for name in components],
        "images": [{"name": "shardyard", "newTag": "0.1.0"}],
    }
    if "own-clusters" in components:
        kustomization["replacements"] = shared["replacements"]
        kustomization["patches"] = [{"patch": (kuberay / "control-plane.yaml").read_text()}]
    folder.mkdir()
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return folder
