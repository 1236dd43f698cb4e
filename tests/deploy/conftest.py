"""Manifests as a cluster gets them, and the image and compose file as their files describe them."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from tests.deploy.deployment import ROOT, Image, Manifest, Overlay, render

OVERLAYS = sorted(folder.name for folder in (ROOT / "k8s" / "overlays").iterdir())
COMBINATIONS = {
    "both-launchers": ["standing-cluster", "own-clusters", "nvidia", "kueue", "postgres", "tls-ingress"],
    "gateway": ["own-clusters", "amd", "object-store", "workload-identity", "tls-gateway"],
    "standing-object-store": ["standing-cluster", "nvidia", "object-store", "object-store-secret", "tls-gateway"],
    "standing-postgres": ["standing-cluster", "postgres"],
}
"""Further overlays by their components, as a site could write them."""


@pytest.fixture(scope="session")
def kubectl() -> str:
    path = shutil.which("kubectl")
    if path is None:
        absent = "kubectl, which renders the manifests, is not installed"
        if os.environ.get("CI") == "true":
            pytest.fail(f"{absent}; CI must not pass over it")
        pytest.skip(absent)
    return path


@pytest.fixture(scope="session")
def overlays(kubectl: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Overlay]:
    """Every overlay and combination, rendered side by side."""
    folder = tmp_path_factory.mktemp("combinations")
    folders = [ROOT / "k8s" / "overlays" / name for name in OVERLAYS]
    folders += [write_overlay(folder / name, components) for name, components in COMBINATIONS.items()]
    with ThreadPoolExecutor(max_workers=2) as pool:
        return {overlay.name: overlay for overlay in pool.map(lambda folder: render(kubectl, folder), folders)}


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


@pytest.fixture(scope="session", params=[*OVERLAYS, *COMBINATIONS])
def overlay(request: pytest.FixtureRequest, overlays: dict[str, Overlay]) -> Overlay:
    return overlays[request.param]


@pytest.fixture(scope="session")
def image() -> Image:
    return Image.parse((ROOT / "docker" / "Dockerfile").read_text())


@pytest.fixture(scope="session")
def compose() -> Manifest:
    return yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
