"""The node: starts an installation's pods, keeps them running, and ends them."""

import asyncio
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

from k8s.node import cgroups
from k8s.node.container import Image
from k8s.node.crun import Crun
from k8s.node.kubelet import NodeParts, PodRunner
from k8s.node.manifests import Installation
from k8s.node.network import Network, PodNetwork
from k8s.node.port_forward import forward
from k8s.node.secret_store import SecretStore
from k8s.node.volumes import Volumes

API_SERVICE, API_PORT = "control-plane", 8321


class Node:
    """Everything is refused, or prepared, when it is made; `run` starts the pods."""

    def __init__(self, installation: Installation, image: Image, folder: Path, listener: socket.socket) -> None:
        self._start, self._listener = time.monotonic(), listener
        self._installation, self._token = installation, folder / "secrets" / "api-token" / "token"
        cgroup = f"shardyard-node-{listener.getsockname()[1]}"
        self._cgroup = cgroup if cgroups.prepare(cgroup) else None
        logs = folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        secrets, network = SecretStore(folder / "secrets"), Network()
        volumes = Volumes(folder, secrets)
        self._networks = {pod.name: network.add_pod() for pod in installation.pods}
        hosts = folder / "hosts"
        hosts.write_text(_hosts(installation, self._networks))
        parts = NodeParts(image, Crun(folder / "crun", self._cgroup is not None), secrets, {"/etc/hosts": hosts}, logs,
                          self._cgroup, self._report)  # fmt: skip
        self._runners = [
            PodRunner(parts, pod, self._networks[pod.name], volumes.make(pod)) for pod in installation.pods
        ]

    async def run(self, stop: asyncio.Event) -> None:
        """Run the pods until `stop` is set."""
        (api,) = [service for service in self._installation.services if service.names[0] == API_SERVICE]
        pod = next(pod for pod in self._installation.pods if api.selects(pod))
        forwarding = asyncio.create_task(forward(self._listener, self._networks[pod.name].address, API_PORT))
        threading.Thread(target=self._report_ready, daemon=True).start()
        try:
            for runner in self._runners:
                runner.start()
            await stop.wait()
        finally:
            self._report("stopping")
            await asyncio.gather(*(asyncio.to_thread(runner.stop) for runner in self._runners))
            forwarding.cancel()
            with suppress(asyncio.CancelledError):
                await forwarding
            if self._cgroup is not None:
                cgroups.remove(self._cgroup)
            self._report("stopped")

    def _report_ready(self) -> None:
        for runner in self._runners:
            runner.ready.wait()
        self._report(
            f"all pods are ready; API http://127.0.0.1:{self._listener.getsockname()[1]}, token in {self._token}"
        )

    def _report(self, line: str) -> None:
        print(f"{time.monotonic() - self._start:7.1f} s  {line}", flush=True)


def _hosts(installation: Installation, networks: dict[str, PodNetwork]) -> str:
    """Text of /etc/hosts, which stands in for the cluster's DNS."""
    lines = ["127.0.0.1 localhost"]
    for service in installation.services:
        for address in [networks[pod.name].address for pod in installation.pods if service.selects(pod)][:1]:
            lines.append(" ".join([address, *service.names]))
    lines += [f"{network.address} {name}" for name, network in networks.items()]
    return "\n".join(lines) + "\n"
