"""Manifests as a cluster gets them, and the image and compose file as their files describe them."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml

from tests.deploy.deployment import ROOT, Image, Manifest, Overlay, render

OVERLAYS = sorted(folder.name for folder in (ROOT / "k8s" / "overlays").iterdir())


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
def overlays(kubectl: str) -> dict[str, Overlay]:
    """Every overlay, rendered side by side."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        rendered = pool.map(lambda name: render(kubectl, ROOT / "k8s" / "overlays" / name), OVERLAYS)
        return dict(zip(OVERLAYS, rendered, strict=True))


@pytest.fixture(scope="session", params=OVERLAYS)
def overlay(request: pytest.FixtureRequest, overlays: dict[str, Overlay]) -> Overlay:
    return overlays[request.param]


@pytest.fixture(scope="session")
def image() -> Image:
    return Image.parse((ROOT / "docker" / "Dockerfile").read_text())


@pytest.fixture(scope="session")
def compose() -> Manifest:
    return yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
