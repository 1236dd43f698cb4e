"""The pods' network: an address for each pod on a bridge, all in the network namespace of this process."""

import subprocess
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path

PODS = IPv4Network("10.244.0.0/24")
BRIDGE = "pods"


@dataclass(frozen=True)
class PodNetwork:
    address: str
    namespace: Path
    """Namespace that the pod's containers join, held by a process that does nothing else."""


class Network:
    def __init__(self) -> None:
        self._addresses = PODS.hosts()
        _ip("link", "set", "lo", "up")
        _ip("link", "add", "name", BRIDGE, "type", "bridge")
        _ip("address", "add", f"{next(self._addresses)}/{PODS.prefixlen}", "dev", BRIDGE)
        _ip("link", "set", BRIDGE, "up")

    def add_pod(self) -> PodNetwork:
        address = next(self._addresses)
        # Says that it is there once it is in its own namespace; ends with this process's PID namespace.
        holder = subprocess.Popen(["unshare", "--net", "sh", "-c", "echo; exec sleep infinity"], stdout=subprocess.PIPE)
        assert holder.stdout is not None
        holder.stdout.readline()
        namespace, end = Path(f"/proc/{holder.pid}/ns/net"), f"pod{int(address) & 0xFF}"
        _ip("link", "add", "name", end, "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid))
        _ip("link", "set", end, "master", BRIDGE, "up")
        inside = ["nsenter", f"--net={namespace}", "ip"]
        for command in (
            ["link", "set", "lo", "up"],
            ["address", "add", f"{address}/{PODS.prefixlen}", "dev", "eth0"],
            ["link", "set", "eth0", "up"],
        ):
            subprocess.run([*inside, *command], check=True)
        return PodNetwork(str(address), namespace)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
