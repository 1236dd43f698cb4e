"""Pod Security Standards, policies `baseline` and `restricted`, as Kubernetes publishes them.

https://kubernetes.io/docs/concepts/security/pod-security-standards/ (version 1.34)
"""

from collections.abc import Iterator
from typing import Any

Pod = dict[str, Any]

_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
_SELINUX_TYPES = {"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
_PROBES = ("livenessProbe", "readinessProbe", "startupProbe")


def violations(pod: Pod) -> list[str]:
    """Every control of `restricted` that a pod (its metadata and spec) violates."""
    return [*_of_pod(pod), *(text for container in _containers(pod["spec"]) for text in _of_container(pod, container))]


def _containers(spec: Pod) -> Iterator[Pod]:
    for kind in ("containers", "initContainers", "ephemeralContainers"):
        yield from spec.get(kind) or ()


def _of_pod(pod: Pod) -> Iterator[str]:
    spec, security = pod["spec"], pod["spec"].get("securityContext") or {}
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(field):
            yield f"host namespaces: {field}"
    for volume in spec.get("volumes") or ():
        if not set(volume) - {"name"} <= _VOLUMES:
            yield f"volume types: {volume}"
    for sysctl in security.get("sysctls") or ():
        yield f"sysctls: {sysctl}"
    for key, value in (pod.get("metadata", {}).get("annotations") or {}).items():
        if key.startswith("container.apparmor.security.beta.kubernetes.io/") and value == "unconfined":
            yield f"AppArmor: {key}"
    yield from _of_security("pod", security)


def _of_container(pod: Pod, container: Pod) -> Iterator[str]:
    name, security = container["name"], container.get("securityContext") or {}
    pod_security = pod["spec"].get("securityContext") or {}
    yield from _of_security(name, security)
    if security.get("privileged"):
        yield f"privileged containers: {name}"
    if security.get("allowPrivilegeEscalation") is not False:
        yield f"privilege escalation: {name}"
    if {**pod_security, **security}.get("runAsNonRoot") is not True:
        yield f"running as non-root: {name}"
    if ({**pod_security, **security}.get("seccompProfile") or {}).get("type") not in ("RuntimeDefault", "Localhost"):
        yield f"seccomp: {name}"
    capabilities = security.get("capabilities") or {}
    if "ALL" not in (capabilities.get("drop") or ()) or set(capabilities.get("add") or ()) - {"NET_BIND_SERVICE"}:
        yield f"capabilities: {name}"
    if security.get("procMount", "Default") != "Default":
        yield f"/proc mount type: {name}"
    for port in container.get("ports") or ():
        if port.get("hostPort"):
            yield f"host ports: {name}"
    lifecycle = container.get("lifecycle") or {}
    handlers = [container.get(kind) or {} for kind in _PROBES] + [lifecycle.get(k) or {} for k in lifecycle]
    for handler in handlers:
        for action in ("httpGet", "tcpSocket"):
            if (handler.get(action) or {}).get("host"):
                yield f"host probes: {name}"


def _of_security(name: str, security: Pod) -> Iterator[str]:
    if security.get("runAsUser") == 0:
        yield f"running as non-root user: {name}"
    if (security.get("windowsOptions") or {}).get("hostProcess"):
        yield f"HostProcess: {name}"
    selinux = security.get("seLinuxOptions") or {}
    if selinux.get("type", "") not in _SELINUX_TYPES or selinux.get("user") or selinux.get("role"):
        yield f"SELinux: {name}"
    if (security.get("appArmorProfile") or {}).get("type", "RuntimeDefault") not in ("RuntimeDefault", "Localhost"):
        yield f"AppArmor: {name}"
