"""Configuration of a container for crun, as the runtime specification has it, from a pod's manifest."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k8s.node import seccomp
from k8s.node.manifests import NodeError, Pod
from k8s.node.network import PodNetwork
from k8s.node.quantity import parse_quantity
from k8s.node.secret_store import SecretStore

Manifest = dict[str, Any]

CPU_PERIOD_US = 100_000
MASKED = ["/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/sched_debug", "/proc/scsi",
          "/proc/timer_list", "/proc/timer_stats", "/sys/firmware"]  # fmt: skip
READ_ONLY = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"]
CAPABILITY_SETS = ("bounding", "effective", "inheritable", "permitted", "ambient")


@dataclass(frozen=True)
class Image:
    root: Path
    environment: tuple[str, ...]
    working_folder: str


def bind(source: Path, target: str, *options: str) -> Manifest:
    return {"destination": target, "source": str(source), "type": "bind", "options": ["rbind", "nosuid", *options]}


def configuration(
    pod: Pod,
    container: Manifest,
    image: Image,
    network: PodNetwork,
    *,
    volumes: dict[str, Path],
    files: dict[str, Path],
    secrets: SecretStore,
    cgroup: str | None,
) -> Manifest:
    """Configuration of one container; `files` are bound read-only, and without a cgroup it has no limits."""
    pod_security, security = pod.spec["securityContext"], container["securityContext"]
    capabilities = security["capabilities"].get("add", [])
    if security["capabilities"].get("drop") != ["ALL"] or pod_security["seccompProfile"] != {"type": "RuntimeDefault"}:
        raise NodeError(f"pod {pod.name} keeps capabilities or has another seccomp profile than RuntimeDefault; this "
                        "node runs pods that Pod Security `restricted` admits")  # fmt: skip
    mounts = [
        bind(volumes[mount["name"]], mount["mountPath"], "ro" if mount.get("readOnly") else "rw")
        for mount in container["volumeMounts"]
    ]
    return {
        "ociVersion": "1.0.2",
        "hostname": pod.name,
        "root": {"path": str(image.root), "readonly": security["readOnlyRootFilesystem"]},
        "process": {
            "user": {"uid": pod_security["runAsUser"], "gid": pod_security["runAsGroup"],
                     "additionalGids": [pod_security["fsGroup"]]},
            "args": [*container["command"], *container.get("args", [])],
            "env": [*image.environment, f"HOSTNAME={pod.name}", *_environment(pod, container, secrets)],
            "cwd": image.working_folder,
            "noNewPrivileges": not security["allowPrivilegeEscalation"],
            "capabilities": {name: [f"CAP_{capability}" for capability in capabilities] for name in CAPABILITY_SETS},
        },
        # The more specific mount last: /dev/shm of a volume hides the usual one.
        "mounts": [*_system_mounts(), *sorted(mounts, key=lambda mount: mount["destination"]),
                   *(bind(path, target, "ro") for target, path in files.items())],
        "linux": {
            "namespaces": [*({"type": kind} for kind in ("pid", "mount", "ipc", "uts", "cgroup")),
                           {"type": "network", "path": str(network.namespace)}],
            "seccomp": seccomp.runtime_default(),
            "maskedPaths": MASKED,
            "readonlyPaths": READ_ONLY,
            **({} if cgroup is None else {"cgroupsPath": cgroup, "resources": _limits(container)}),
        },
    }  # fmt: skip


def _environment(pod: Pod, container: Manifest, secrets: SecretStore) -> list[str]:
    if container.get("envFrom"):
        raise NodeError(f"pod {pod.name} has envFrom; this node knows values and secretKeyRef only")
    pairs = []
    for variable in container["env"]:
        match variable:
            case {"name": name, "value": value}:
                pairs.append(f"{name}={value}")
            case {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}:
                pairs.append(f"{name}={secrets.value(secret, key)}")
            case {"name": name}:
                raise NodeError(f"variable {name} of pod {pod.name} has neither a value nor a secretKeyRef; this node "
                                "knows no other source")  # fmt: skip
    return pairs


def _system_mounts() -> list[Manifest]:
    return [
        {"destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid", "noexec", "nodev"]},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs",
         "options": ["nosuid", "strictatime", "mode=755", "size=65536k"]},
        {"destination": "/dev/pts", "type": "devpts", "source": "devpts",
         "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"]},
        {"destination": "/dev/shm", "type": "tmpfs", "source": "shm",
         "options": ["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"]},
        {"destination": "/dev/mqueue", "type": "mqueue", "source": "mqueue", "options": ["nosuid", "noexec", "nodev"]},
        {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "noexec", "nodev", "ro"]},
        {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup",
         "options": ["nosuid", "noexec", "nodev", "relatime", "ro"]},
    ]  # fmt: skip


def _limits(container: Manifest) -> Manifest:
    limits, request = dict(container["resources"]["limits"]), parse_quantity(container["resources"]["requests"]["cpu"])
    cpu, memory = parse_quantity(limits.pop("cpu")), parse_quantity(limits.pop("memory"))
    if limits:
        raise NodeError(f"container {container['name']} needs {', '.join(limits)}; this node has CPUs and memory only")
    return {
        "cpu": {"quota": int(cpu * CPU_PERIOD_US), "period": CPU_PERIOD_US, "shares": int(request * 1024)},
        "memory": {"limit": int(memory)},
    }
