"""Pods of a RayCluster, as KubeRay 1.7 makes them of its templates: Ray's command and variables, probes, shared memory,
and an init container that waits for the head."""

import copy
import math
from collections.abc import Iterator
from typing import Any

from k8s.node.quantity import parse_quantity

Manifest = dict[str, Any]

SHELL = ["/bin/bash", "-lc", "--"]
GCS_PORT = 6379
DASHBOARD_PORT = 8265
AGENT_PORT = 52365
METRICS_PORT = 8080
TOKEN_KEY = "auth_token"
"""Key of Ray's token in the Secret that a cluster names."""
INIT_LIMITS = {"cpu": "200m", "memory": "256Mi"}


def head_service(cluster: Manifest) -> str:
    return f"{cluster['metadata']['name']}-head-svc"


def head_labels(cluster: Manifest) -> dict[str, str]:
    """Labels that the head's Service selects."""
    return {"ray.io/cluster": cluster["metadata"]["name"], "ray.io/node-type": "head"}


def pods(cluster: Manifest, head: str, num_workers: int | None) -> Iterator[tuple[str, dict[str, str], Manifest]]:
    """Name, labels and spec of the head's pod and of the workers', which find it under the name `head`."""
    name, spec = cluster["metadata"]["name"], cluster["spec"]
    group = spec["headGroupSpec"]
    labels = {**group["template"]["metadata"]["labels"], **head_labels(cluster), "ray.io/group": "headgroup"}
    yield f"{name}-head", labels, _head(cluster, labels)
    for group in spec["workerGroupSpecs"]:
        labels = {
            **group["template"]["metadata"]["labels"],
            "ray.io/cluster": name, "ray.io/node-type": "worker", "ray.io/group": group["groupName"],
        }  # fmt: skip
        for index in range(group["replicas"] if num_workers is None else num_workers):
            yield f"{name}-{group['groupName']}-{index}", labels, _worker(cluster, group, labels, head)


def _head(cluster: Manifest, labels: dict[str, str]) -> Manifest:
    group = cluster["spec"]["headGroupSpec"]
    pod = copy.deepcopy(group["template"]["spec"])
    container = pod["containers"][0]
    command = _ray_start(container, {"head": "true", **group["rayStartParams"]})
    _prepare(cluster, labels, pod, command, f"127.0.0.1:{GCS_PORT}")
    probes = [_health(5, AGENT_PORT, "api/local_raylet_healthz"), _health(5, DASHBOARD_PORT, "api/gcs_healthz")]
    container["readinessProbe"] = _probe(probes, timeout_s=5)
    return pod


def _worker(cluster: Manifest, group: Manifest, labels: dict[str, str], head: str) -> Manifest:
    address = f"{head}:{GCS_PORT}"
    pod = copy.deepcopy(group["template"]["spec"])
    container = pod["containers"][0]
    command = _ray_start(container, {"address": address, **group["rayStartParams"]})
    wait = {
        **copy.deepcopy(container),
        "name": "wait-gcs-ready",
        "command": SHELL,
        "args": [f"until ray health-check --address {address}; do sleep 5; done"],
        "resources": {"limits": INIT_LIMITS, "requests": INIT_LIMITS},
    }
    _prepare(cluster, labels, pod, command, address)
    container["env"] += [_variable("FQ_RAY_IP", head), _variable("RAY_IP", head.partition(".")[0])]
    container["readinessProbe"] = _probe([_health(2, AGENT_PORT, "api/local_raylet_healthz")], timeout_s=2)
    wait["env"] = [*wait["env"], *_token(cluster), _variable("FQ_RAY_IP", head)]
    pod["initContainers"] = [*pod.get("initContainers", []), wait]
    return pod


def _ray_start(container: Manifest, parameters: dict[str, str]) -> str:
    """Command of Ray's container: the parameters of the manifest, and those that KubeRay adds."""
    limits = container["resources"]["limits"]
    parameters = {
        "block": "true",
        "dashboard-agent-listen-port": str(AGENT_PORT),
        "memory": str(int(parse_quantity(limits["memory"]))),
        "metrics-export-port": str(METRICS_PORT),
        "num-cpus": str(math.ceil(parse_quantity(limits["cpu"]))),
        **parameters,
    }
    flags = [f"--{name}" if value == "true" else f"--{name}={value}" for name, value in sorted(parameters.items())]
    return " ".join(["ray", "start", *flags])


def _prepare(cluster: Manifest, labels: dict[str, str], pod: Manifest, command: str, address: str) -> None:
    """Give a pod's Ray container its command, variables and shared memory."""
    container = pod["containers"][0]
    container["command"], container["args"] = SHELL, [f"ulimit -n 65536; {command}"]
    container["env"] = [
        *container.get("env", []),
        *_token(cluster),
        _variable("RAY_CLUSTER_NAME", labels["ray.io/cluster"]),
        _variable("RAY_NODE_TYPE_NAME", labels["ray.io/group"]),
        _variable("KUBERAY_GEN_RAY_START_CMD", command),
        _variable("RAY_PORT", str(GCS_PORT)),
        _variable("RAY_ADDRESS", address),
        _variable("RAY_USAGE_STATS_KUBERAY_IN_USE", "1"),
        _variable("RAY_DASHBOARD_ENABLE_K8S_DISK_USAGE", "1"),
    ]
    if all(mount["mountPath"] != "/dev/shm" for mount in container["volumeMounts"]):
        memory = container["resources"]["limits"]["memory"]
        pod["volumes"].append({"name": "shared-mem", "emptyDir": {"medium": "Memory", "sizeLimit": memory}})
        container["volumeMounts"].append({"mountPath": "/dev/shm", "name": "shared-mem"})


def _token(cluster: Manifest) -> list[Manifest]:
    auth = cluster["spec"]["authOptions"]
    secret = {"name": auth["secretName"], "key": TOKEN_KEY}
    return [_variable("RAY_AUTH_MODE", auth["mode"]),
            {"name": "RAY_AUTH_TOKEN", "valueFrom": {"secretKeyRef": secret}}]  # fmt: skip


def _variable(name: str, value: str) -> Manifest:
    return {"name": name, "value": value}


def _health(timeout_s: int, port: int, path: str) -> str:
    return f"wget --tries 1 -T {timeout_s} -q -O- http://localhost:{port}/{path} | grep success"


def _probe(commands: list[str], timeout_s: int) -> Manifest:
    exec_ = {"command": ["bash", "-c", " && ".join(commands)]}
    return {"exec": exec_, "initialDelaySeconds": 10, "periodSeconds": 5, "timeoutSeconds": timeout_s}
