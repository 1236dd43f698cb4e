"""Pods of an overlay on the stand-in for a node: how they are made of the manifests, and what it refuses."""

import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from k8s.node import cgroups
from k8s.node.container import Image, configuration
from k8s.node.manifests import Installation, NodeError
from k8s.node.network import PodNetwork
from k8s.node.quantity import parse_quantity
from k8s.node.seccomp import PROFILE
from k8s.node.secret_store import SecretStore
from tests.deploy.deployment import ROOT, Overlay

SCRIPT = ROOT / "docker" / "run_unprivileged.sh"
IMAGE = Image(Path("/root-of-image"), ("PATH=/opt/shardyard/bin",), "/var/lib/shardyard")
NETWORK = PodNetwork("10.244.0.2", Path("/proc/1/ns/net"))


@pytest.fixture
def local(overlays: dict[str, Overlay]) -> Installation:
    return Installation.from_objects(list(overlays["local"].objects), num_workers=1)


def test_ray_starts_as_kuberay_starts_it(local: Installation) -> None:
    pods = {pod.name: pod for pod in local.pods}
    assert list(pods) == ["control-plane-0", "ray-head", "ray-workers-0"]
    commands = {name: shlex.split(pods[name].container["args"][0].partition("; ")[2]) for name in list(pods)[1:]}
    assert commands["ray-head"][:2] == commands["ray-workers-0"][:2] == ["ray", "start"]
    assert {"--head", "--block", "--num-cpus=0", f"--memory={4 * 2**30}"} <= set(commands["ray-head"])
    address = "ray-head-svc.shardyard.svc.cluster.local:6379"
    assert {f"--address={address}", "--block", "--num-cpus=1"} <= set(commands["ray-workers-0"])
    (wait,) = pods["ray-workers-0"].spec["initContainers"]
    assert address in wait["args"][0]
    (head_service,) = [service for service in local.services if service.names[0] == "ray-head-svc"]
    assert [pod.name for pod in local.pods if head_service.selects(pod)] == ["ray-head"]


@pytest.mark.skipif(
    not PROFILE.exists(),
    reason="the seccomp profile of containers is not installed (Debian: golang-github-containers-common)",
)
def test_containers_are_confined_as_the_manifests_say(local: Installation, tmp_path: Path) -> None:
    secrets = SecretStore(tmp_path)
    for pod in local.pods:
        volumes = {volume["name"]: tmp_path / volume["name"] for volume in pod.spec["volumes"]}
        config = configuration(
            pod, pod.container, IMAGE, NETWORK, volumes=volumes, files={}, secrets=secrets, cgroup="g"
        )  # fmt: skip
        process, memory = config["process"], parse_quantity(pod.container["resources"]["limits"]["memory"])
        assert (process["user"]["uid"], process["noNewPrivileges"], config["root"]["readonly"]) == (1000, True, True)
        assert not any(process["capabilities"].values())
        assert config["linux"]["resources"]["memory"]["limit"] == memory
        assert config["linux"]["seccomp"]["defaultAction"] == "SCMP_ACT_ERRNO"
        mounted = {mount["destination"]: mount for mount in config["mounts"]}
        for mount in pod.container["volumeMounts"]:
            assert mounted[mount["mountPath"]]["source"] == str(volumes[mount["name"]])
        tokens = [
            variable for variable in process["env"] if variable.startswith(("SHARDYARD_TOKEN=", "RAY_AUTH_TOKEN="))
        ]
        (token,) = tokens
        assert len(token.partition("=")[2]) == 64


def test_secrets_are_drawn_once_and_private(tmp_path: Path) -> None:
    token = SecretStore(tmp_path).value("api-token", "token")
    assert SecretStore(tmp_path).value("api-token", "token") == token
    assert stat.S_IMODE((tmp_path / "api-token" / "token").stat().st_mode) == 0o600
    with pytest.raises(NodeError, match="database"):
        SecretStore(tmp_path).value("database", "url")


@pytest.mark.parametrize(("text", "value"), [("200m", 0.2), ("2", 2), ("3Gi", 3 * 2**30), ("256Mi", 2**28), (1, 1)])
def test_quantities(text: str | int, value: float) -> None:
    assert float(parse_quantity(text)) == value


def test_what_needs_an_api_server_is_refused(overlays: dict[str, Overlay]) -> None:
    with pytest.raises(NodeError, match="standing-cluster"):
        Installation.from_objects(list(overlays["kuberay"].objects))


def test_a_missing_program_is_named(tmp_path: Path) -> None:
    (tmp_path / "dirname").symlink_to("/usr/bin/dirname")
    run = subprocess.run(
        ["/bin/bash", SCRIPT, "shardyard:0.1.0"], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PATH": str(tmp_path), "PYTHON": sys.executable},
    )  # fmt: skip
    assert run.returncode == 2
    assert "buildah is not installed" in run.stderr


@pytest.mark.parametrize("is_mixed", [True, False])
def test_control_groups_of_both_versions_need_root(is_mixed: bool, tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    if is_mixed:
        (tmp_path / "unified").mkdir()
        (tmp_path / "unified" / "cgroup.procs").touch()
        with pytest.raises(NodeError, match=r"as root, or boot .*unified_cgroup_hierarchy=1"):
            cgroups.check_rootless(tmp_path)
    else:
        cgroups.check_rootless(tmp_path)
