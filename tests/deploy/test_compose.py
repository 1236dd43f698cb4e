"""The compose file: only the API is published, tokens are required, and the services find each other."""

import re

import pytest

from service.settings import Settings
from tests.deploy.deployment import ROOT, Image, Manifest, settings_in

VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::(?P<kind>[-?])(?P<word>[^}]*))?\}")


def interpolate(text: str, variables: dict[str, str]) -> str:
    """Fill in variables as compose does. Raises LookupError for a required one that is missing."""

    def value(match: re.Match[str]) -> str:
        name, kind, word = match["name"], match["kind"], match["word"]
        if name in variables:
            return variables[name]
        if kind != "-":
            raise LookupError(name)
        return word

    return VARIABLE.sub(value, text)


def test_control_plane_settings_are_accepted(compose: Manifest, image: Image) -> None:
    environment = {
        **{name: value for name, value in image.env.items() if name.startswith("SHARDYARD_")},
        **compose["services"]["control-plane"]["environment"],
    }
    assert set(environment) <= {f"SHARDYARD_{name.upper()}" for name in Settings.model_fields}
    variables = {"SHARDYARD_TOKEN": "0123456789abcdef", "SHARDYARD_PUBLIC_NAME": "train.example.org"}
    settings = settings_in({name: interpolate(value, variables) for name, value in environment.items()})
    expected = {
        "host": "0.0.0.0", "allowed_hosts": ["control-plane", "train.example.org"],
        "events_url": "http://control-plane:8321", "ray_dashboard_url": "http://ray-head:8265", "allowed_code": [],
        "planning_memory_bytes": Settings.model_fields["planning_memory_bytes"].default,
    }  # fmt: skip
    assert {name: settings[name] for name in expected} == expected
    with pytest.raises(LookupError, match="SHARDYARD_TOKEN"):
        interpolate(environment["SHARDYARD_TOKEN"], {})


def test_only_the_api_is_published(compose: Manifest) -> None:
    ports_by_service = {name: service["ports"] for name, service in compose["services"].items() if "ports" in service}
    (port,) = ports_by_service.pop("control-plane")
    assert ports_by_service == {}
    assert interpolate(port, {}) == f"127.0.0.1:8321:{Settings.model_fields['port'].default}"
    assert not any(service.get("network_mode") == "host" for service in compose["services"].values())


def test_services_are_one_image_without_privileges(compose: Manifest) -> None:
    services = compose["services"].values()
    assert len({service["image"] for service in services}) == 1
    for service in services:
        assert (ROOT / "docker" / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert not service.get("privileged")
        assert "user" not in service, "the image's own user, which is not root"


def test_both_sides_read_one_ray_token_from_a_file(compose: Manifest, image: Image) -> None:
    assert image.env["RAY_AUTH_MODE"] == "token"
    control_plane, head = compose["services"]["control-plane"], compose["services"]["ray-head"]
    assert control_plane["secrets"] == head["secrets"] == ["ray_token"]
    path = "/run/secrets/ray_token"  # where compose puts a secret of that name
    assert control_plane["environment"]["SHARDYARD_RAY_TOKEN_PATH"] == path
    assert head["environment"]["RAY_AUTH_TOKEN_PATH"] == path
    token_file = interpolate(compose["secrets"]["ray_token"]["file"], {})
    patterns = (ROOT / "docker" / ".gitignore").read_text().split()
    assert f"{token_file.split('/')[0]}/" in patterns


def test_what_is_written_is_kept_and_shared(compose: Manifest, image: Image) -> None:
    control_plane, head = compose["services"]["control-plane"], compose["services"]["ray-head"]
    assert "storage:/storage" in control_plane["volumes"]
    assert "storage:/storage" in head["volumes"]
    assert image.env["SHARDYARD_CACHE_DIR"].startswith("/storage/")
    assert "state:/var/lib/shardyard" in control_plane["volumes"]
    assert image.env["SHARDYARD_STATE_DIR"].startswith("/var/lib/shardyard")
    assert set(compose["volumes"]) == {"state", "storage"}


def test_health_is_asked_of_both(compose: Manifest, image: Image) -> None:
    head = compose["services"]["ray-head"]
    assert "http://127.0.0.1:8265/api/gcs_healthz" in head["healthcheck"]["test"]
    assert head["command"][:2] == ["ray", "start"]
    assert {"--head", "--block"} <= set(head["command"]), "in the foreground"
    assert compose["services"]["control-plane"]["depends_on"] == {"ray-head": {"condition": "service_healthy"}}
    # The image's own check is lost in OCI's format.
    assert "http://127.0.0.1:8321/healthz" in compose["services"]["control-plane"]["healthcheck"]["test"]
    assert "/healthz" in image.last("HEALTHCHECK")


def test_the_default_build_is_for_cpus(compose: Manifest) -> None:
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    (index,) = re.findall(r'^ARG TORCH_INDEX="(\S+)"', dockerfile, flags=re.MULTILINE)
    assert index.endswith("/whl/cpu")
    for service in compose["services"].values():
        assert interpolate(service["build"]["args"]["TORCH_INDEX"], {}) == index
