"""Users' modules: the settings that docs/design/deployment.md gives for them are accepted, with compose and
Kubernetes."""

import os
import re
from pathlib import Path

from tests.deploy.deployment import ROOT, Manifest, settings_in
from tests.deploy.overlays import render
from tests.deploy.test_compose import interpolate

TEXT = (ROOT / "docs" / "design" / "deployment.md").read_text().split("### Users' modules")[1]
EXAMPLE = ["recommender.model:build", "recommender.data:batch"]


def test_compose_takes_an_image_and_what_of_its_code_is_allowed(compose: Manifest) -> None:
    variables = dict(re.findall(r"^export (SHARDYARD_\w+)='?(.*?)'?$", TEXT, re.MULTILINE))
    services = compose["services"]
    environment = services["control-plane"]["environment"]
    allowed_code = interpolate(environment["SHARDYARD_ALLOWED_CODE"], variables)
    assert settings_in({"SHARDYARD_ALLOWED_CODE": allowed_code})["allowed_code"] == EXAMPLE
    assert {interpolate(service["image"], variables) for service in services.values()} == {"shardyard-recommender:1"}
    assert {interpolate(service["image"], {}) for service in services.values()} == {"shardyard:0.1.0"}


def test_an_overlay_allows_code_and_gives_its_planning_room(kubectl: str, tmp_path: Path) -> None:
    (patches,) = re.findall(r"^```yaml\n(patches:.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    local = os.path.relpath((ROOT / "k8s" / "overlays" / "local").resolve(), tmp_path.resolve())
    (tmp_path / "kustomization.yaml").write_text(f"resources: [{local}]\n{patches}")
    pod = render(kubectl, tmp_path).pod("control-plane")
    container, environment = pod.container, pod.environment
    settings = settings_in({name: value or "0123456789abcdef" for name, value in environment.items()})
    assert settings["allowed_code"] == EXAMPLE
    assert container["resources"]["limits"]["memory"] == "4Gi"
    assert settings["planning_memory_bytes"] < 4 * 2**30
    assert settings["events_url"] == "http://control-plane:8321", "the rest is as it was"


def test_the_image_has_the_example_where_python_looks() -> None:
    (dockerfile,) = re.findall(r"^```dockerfile\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    source, target = re.findall(r"^COPY (\S+) (\S+)$", dockerfile, re.MULTILINE)[0]
    assert (ROOT / "examples" / source / "model.py").is_file()
    assert re.findall(r"PYTHONPATH=(\S+)", dockerfile) == [os.path.dirname(target)]
