"""Manifests as a cluster gets them, and the image and compose file as their files describe them."""

import os
import shutil
import subprocess

import pytest
import yaml

from tests.deploy.deployment import ROOT, Image, Manifest, Overlay

OVERLAYS = ("local", "gpu")


@pytest.fixture(scope="session")
def kubectl() -> str:
    path = shutil.which("kubectl")
    if path is None:
        absent = "kubectl, which renders the manifests, is not installed"
        if os.environ.get("CI") == "true":
            pytest.fail(f"{absent}; CI must not pass over it")
        pytest.skip(absent)
    return path


@pytest.fixture(scope="session", params=OVERLAYS)
def overlay(request: pytest.FixtureRequest, kubectl: str) -> Overlay:
    folder = ROOT / "k8s" / "overlays" / request.param
    run = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert run.stderr == "", "kustomize warns"
    return Overlay(request.param, tuple(yaml.safe_load_all(run.stdout)))


@pytest.fixture(scope="session")
def image() -> Image:
    return Image.parse((ROOT / "docker" / "Dockerfile").read_text())


@pytest.fixture(scope="session")
def compose() -> Manifest:
    return yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
