"""The manifests as a cluster would get them, the image and the compose file as their files describe them."""

import os
import shutil
import subprocess

import pytest
import yaml

from tests.deploy.deployment import ROOT, Image, Manifest, Rendered

OVERLAYS = ("local", "gpu")


@pytest.fixture(scope="session")
def kubectl() -> str:
    found = shutil.which("kubectl")
    if found is None:
        absent = "kubectl, which renders the manifests, is not installed"
        if os.environ.get("CI") == "true":
            pytest.fail(f"{absent}; CI must not pass over it")
        pytest.skip(absent)
    return found


@pytest.fixture(scope="session", params=OVERLAYS)
def rendered(request: pytest.FixtureRequest, kubectl: str) -> Rendered:
    folder = ROOT / "k8s" / "overlays" / request.param
    run = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert run.stderr == "", "kustomize warns"
    return Rendered(request.param, tuple(yaml.safe_load_all(run.stdout)))


@pytest.fixture(scope="session")
def image() -> Image:
    return Image.parse((ROOT / "docker" / "Dockerfile").read_text())


@pytest.fixture(scope="session")
def compose() -> Manifest:
    return yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
