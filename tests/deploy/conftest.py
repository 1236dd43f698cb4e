"""Manifests as a cluster gets them, and the image and compose file as their files describe them."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from service.settings import Settings
from tests.deploy import crd
from tests.deploy.deployment import ROOT, Image, Manifest, Overlay, settings_of_environments
from tests.deploy.overlays import COMBINATIONS, OVERLAYS, render, write_overlay

KUBERAY_CRDS = ROOT.parent / "shared" / "kuberay-crds"
OUR_SCHEMAS = Path(__file__).parent / "schemas"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # a megabyte: 1 s instead of 10


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


@pytest.fixture(scope="session", params=[*OVERLAYS, *COMBINATIONS])
def overlay(request: pytest.FixtureRequest, overlays: dict[str, Overlay]) -> Overlay:
    return overlays[request.param]


@pytest.fixture(scope="session")
def image() -> Image:
    return Image.parse((ROOT / "docker" / "Dockerfile").read_text())


@pytest.fixture(scope="session")
def compose() -> Manifest:
    return yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())


def setting_names() -> set[str]:
    """Environment variables that the settings are read from."""
    names = set()
    for name, field in Settings.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            names |= {f"SHARDYARD_{name.upper()}_{part.upper()}" for part in field.annotation.model_fields}
        else:
            names.add(f"SHARDYARD_{name.upper()}")
    return names


@pytest.fixture(scope="session")
def settings_by_overlay(overlays: dict[str, Overlay], image: Image) -> dict[str, dict[str, Any]]:
    """Settings of each overlay's control plane."""
    environments = []
    for overlay in overlays.values():
        environment = {**settings_of(image), **overlay.pod("control-plane").environment}
        assert set(environment) <= setting_names(), overlay.name
        secret_values = {
            "SHARDYARD_TOKEN": "0123456789abcdef",
            "SHARDYARD_DATABASE_URL": "postgresql+psycopg://shardyard@db/shardyard",
            "SHARDYARD_KUBERAY_NAMESPACE": overlay.namespace,
        }
        environments.append(
            {name: secret_values[name] if value is None else value for name, value in environment.items()}
        )
    return dict(zip(overlays, settings_of_environments(environments), strict=True))


def settings_of(image: Image) -> dict[str, str]:
    return {name: value for name, value in image.env.items() if name.startswith("SHARDYARD_")}


@pytest.fixture(scope="session")
def our_schemas() -> dict[crd.Kind, crd.Schema]:
    """Schemas of other projects' kinds with the fields that the manifests use; each file names its source."""
    documents = [d for file in sorted(OUR_SCHEMAS.glob("*.yaml")) for d in yaml.load_all(file.read_text(), LOADER)]
    return {(document["apiVersion"], document["kind"]): document["schema"] for document in documents}


@pytest.fixture(scope="session")
def kuberay_schemas() -> dict[crd.Kind, crd.Schema]:
    if not KUBERAY_CRDS.exists():
        pytest.skip(f"KubeRay's resource definitions are not at {KUBERAY_CRDS}")
    files = {"RayCluster": "ray.io_rayclusters.yaml", "RayJob": "ray.io_rayjobs.yaml"}
    definitions = {kind: yaml.load((KUBERAY_CRDS / file).read_text(), LOADER) for kind, file in files.items()}
    return {("ray.io/v1", kind): crd.version(definition, "v1") for kind, definition in definitions.items()}
