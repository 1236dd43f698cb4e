"""Two control planes on PostgreSQL, and the API behind TLS."""

import json
from typing import Any

import pytest
import typer.main

from service.cli.main import app
from tests.deploy.deployment import Overlay, PodTemplate
from tests.deploy.policies import selects

CLI: Any = typer.main.get_command(app)
ON_POSTGRES = ["production", "both-launchers", "standing-postgres"]
WITH_BACKUPS = ["production", "gateway", "standing-backup", "standing-postgres"]
BEHIND_TLS = ["production", "both-launchers", "gateway", "standing-object-store"]


@pytest.mark.parametrize("name", ON_POSTGRES)
def test_one_of_two_is_always_there(overlays: dict[str, Overlay], name: str) -> None:
    overlay = overlays[name]
    spec = overlay.find("Deployment", "control-plane")["spec"]
    assert spec["replicas"] == 2
    assert spec["strategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    labels = spec["template"]["metadata"]["labels"]
    budget = overlay.find("PodDisruptionBudget", "control-plane")["spec"]
    assert selects(budget["selector"], labels)
    assert budget["minAvailable"] == spec["replicas"] - 1, "a node with one of them can be drained"
    constraints = spec["template"]["spec"]["topologySpreadConstraints"]
    assert [c["topologyKey"] for c in constraints] == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]
    assert all(selects(constraint["labelSelector"], labels) for constraint in constraints)


@pytest.mark.parametrize("name", ON_POSTGRES)
def test_tables_are_migrated_before_a_control_plane_starts(overlays: dict[str, Overlay], name: str) -> None:
    pod = overlays[name].pod("control-plane")
    (migrate,) = pod.spec["initContainers"]
    command = migrate["command"][migrate["command"].index("shardyard") + 1]
    assert command in CLI.commands
    urls = [[e for e in container["env"] if e["name"] == "SHARDYARD_DATABASE_URL"] for container in pod.containers]
    secret = {"secretKeyRef": {"name": "database", "key": "url"}}
    assert urls == [[{"name": "SHARDYARD_DATABASE_URL", "valueFrom": secret}]] * 2


@pytest.mark.parametrize("name", ON_POSTGRES)
def test_no_volume_ties_a_control_plane_to_a_node(overlays: dict[str, Overlay], name: str) -> None:
    overlay = overlays[name]
    claims = {claim["metadata"]["name"]: claim["spec"] for claim in overlay.objects_of("PersistentVolumeClaim")}
    for volume in overlay.pod("control-plane").spec["volumes"]:
        if claim := volume.get("persistentVolumeClaim"):
            assert claims[claim["claimName"]]["accessModes"] == ["ReadWriteMany"]


@pytest.mark.parametrize("name", WITH_BACKUPS)
def test_backups_and_their_restore_use_the_control_planes_database(overlays: dict[str, Overlay], name: str) -> None:
    overlay = overlays[name]
    control_plane = overlay.pod("control-plane")
    pods = {pod.owner: pod for pod in overlay.pods_of("backup")}
    places = set()
    for action, pod in pods.items():
        arguments = pod.container["command"][pod.container["command"].index("shardyard") + 1 :]
        assert arguments[0] == action
        with CLI.commands[action].make_context(action, arguments[1:]):
            pass  # its arguments are those of the command
        places.add(arguments[1])
        assert database_of(pod) == database_of(control_plane)
        for mount in pod.container["volumeMounts"]:
            assert mount["name"] in {volume["name"] for volume in pod.spec["volumes"]}
    (place,) = places
    if "://" in place:
        assert place.partition("://")[0] in (control_plane.environment["SHARDYARD_STORAGE_ROOTS"] or "")
    else:
        assert pods["backup"].claim_of(place) == pods["restore"].claim_of(place) is not None
    assert overlay.find("CronJob", "restore")["spec"]["suspend"] is True, "it is started by hand"
    assert overlay.find("CronJob", "backup")["spec"]["concurrencyPolicy"] == "Forbid"


def database_of(pod: PodTemplate) -> Any:
    """Secret of the database's URL, or the claim of SQLite's file."""
    urls = [e["valueFrom"] for e in pod.container.get("env", []) if e["name"] == "SHARDYARD_DATABASE_URL"]
    return urls or pod.claim_of("/var/lib/shardyard/state")


@pytest.mark.parametrize("name", BEHIND_TLS)
def test_the_public_name_is_one(overlays: dict[str, Overlay], name: str) -> None:
    overlay = overlays[name]
    names, certificates = set(), set()
    for ingress in overlay.objects_of("Ingress"):
        names |= {rule["host"] for rule in ingress["spec"]["rules"]}
        for tls in ingress["spec"]["tls"]:
            names |= set(tls["hosts"])
            certificates.add(tls["secretName"])
        (path,) = ingress["spec"]["rules"][0]["http"]["paths"]
        assert path["backend"]["service"] == {"name": "control-plane", "port": {"name": "api"}}
    for gateway in overlay.objects_of("Gateway"):
        (listener,) = gateway["spec"]["listeners"]
        assert (listener["protocol"], listener["port"], listener["tls"]["mode"]) == ("HTTPS", 443, "Terminate")
        names.add(listener["hostname"])
        certificates |= {ref["name"] for ref in listener["tls"]["certificateRefs"]}
        route = overlay.find("HTTPRoute", "api")["spec"]
        names |= set(route["hostnames"])
        assert route["parentRefs"] == [{"name": gateway["metadata"]["name"], "sectionName": listener["name"]}]
        (backend,) = route["rules"][0]["backendRefs"]
        (port,) = overlay.find("Service", "control-plane")["spec"]["ports"]
        assert backend == {"name": "control-plane", "port": port["port"]}
    (public,) = names
    assert certificates == {"api-tls"}
    hosts = json.loads(overlay.pod("control-plane").environment["SHARDYARD_ALLOWED_HOSTS"] or "")
    assert public in hosts
    assert f"control-plane.{overlay.namespace}.svc" in hosts, "the base's names are still there"
