"""One pod's life: its init containers, then its container, which is started again whenever it ends."""

import http.client
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from k8s.node.container import Image, configuration
from k8s.node.crun import Crun
from k8s.node.manifests import Pod
from k8s.node.network import PodNetwork
from k8s.node.secret_store import SecretStore

Manifest = dict[str, Any]

FIRST_BACKOFF_S, MAX_BACKOFF_S = 1.0, 60.0
QUICK_END_S = 60.0
"""A container that ends sooner is started again after a longer back-off."""


@dataclass(frozen=True)
class NodeParts:
    """What all pods of this node share."""

    image: Image
    crun: Crun
    secrets: SecretStore
    files: dict[str, Path]
    logs: Path
    cgroup: str | None
    report: Callable[[str], None]


class PodRunner:
    """Runs one pod in a thread, from `start` to `stop`."""

    def __init__(self, node: NodeParts, pod: Pod, network: PodNetwork, volumes: dict[str, Path]) -> None:
        self._node, self._pod, self._network, self._volumes = node, pod, network, volumes
        # Everything that a manifest may not have is refused here, before anything has started.
        self._configurations = {c["name"]: self._configure(c) for c in [*self._init_containers(), pod.container]}
        self._stopping = threading.Event()
        self.ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name=pod.name)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the pod as the kubelet does: SIGTERM, and SIGKILL after the grace period."""
        self._stopping.set()
        grace_s = self._pod.spec.get("terminationGracePeriodSeconds", 30)
        for signal, timeout_s in (("TERM", grace_s), ("KILL", None)):
            for name in self._configurations:
                self._node.crun.signal(self._id(name), signal)
            self._thread.join(timeout_s)
            if not self._thread.is_alive():
                return

    def _init_containers(self) -> list[Manifest]:
        return self._pod.spec.get("initContainers", [])

    def _configure(self, container: Manifest) -> Manifest:
        cgroup = None if self._node.cgroup is None else f"{self._node.cgroup}/{self._pod.name}/{container['name']}"
        return configuration(
            self._pod, container, self._node.image, self._network,
            volumes=self._volumes, files=self._node.files, secrets=self._node.secrets, cgroup=cgroup,
        )  # fmt: skip

    def _id(self, container: str) -> str:
        return f"{self._pod.name}.{container}"

    def _run(self) -> None:
        with (self._node.logs / f"{self._pod.name}.log").open("ab") as log:
            for container in self._init_containers():
                self._run_container(container, log, once=True)
            self._run_container(self._pod.container, log, once=False)

    def _run_container(self, container: Manifest, log: IO[bytes], once: bool) -> None:
        """Run a container until the pod is stopped or, if `once`, until it has succeeded."""
        name, backoff_s = container["name"], FIRST_BACKOFF_S
        while not self._stopping.is_set():
            start = time.monotonic()
            process = self._node.crun.start(self._id(name), self._configurations[name], log)
            self._node.report(f"{self._pod.name}: container {name} started")
            code = self._await_end(process, name, container.get("readinessProbe"))
            self.ready.clear()
            if self._stopping.is_set() or (once and code == 0):
                return
            self._node.report(f"{self._pod.name}: container {name} ended with exit code {code}")
            backoff_s = FIRST_BACKOFF_S if time.monotonic() - start > QUICK_END_S else min(2 * backoff_s, MAX_BACKOFF_S)
            self._stopping.wait(backoff_s)

    def _await_end(self, process: subprocess.Popen[bytes], name: str, probe: Manifest | None) -> int:
        """Exit code of a container, whose pod is ready once its probe has succeeded."""
        start = time.monotonic()
        if probe is not None:
            next_probe = start + probe.get("initialDelaySeconds", 0)
            while not self.ready.is_set() and not _has_ended(process, next_probe - time.monotonic()):
                next_probe = time.monotonic() + probe["periodSeconds"]
                if self._succeeds(probe, name):
                    self.ready.set()
                    self._node.report(f"{self._pod.name}: ready after {time.monotonic() - start:.1f} s")
        return process.wait()

    def _succeeds(self, probe: Manifest, container: str) -> bool:
        if "exec" in probe:
            return self._node.crun.succeeds(self._id(container), probe["exec"]["command"], probe["timeoutSeconds"])
        ports = {port["name"]: port["containerPort"] for port in self._pod.container["ports"]}
        port = ports[probe["httpGet"]["port"]]
        connection = http.client.HTTPConnection(self._network.address, port, timeout=probe["timeoutSeconds"])
        try:
            connection.request("GET", probe["httpGet"]["path"])
            return connection.getresponse().status < 400
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def _has_ended(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    try:
        process.wait(max(timeout_s, 0))
    except subprocess.TimeoutExpired:
        return False
    return True
