"""Network interface of a machine that gloo and NCCL listen on."""

import ipaddress
import os
import socket

import psutil

LOOPBACK = "127.0.0.1"


def listen_on(address: str) -> None:
    """Have process groups made from now on listen on the interface that has this address, unless the environment names
    one: by themselves they take the one that the machine's name stands for, or the first."""
    if (interface := interface_of(address)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # without the sign, all that begin with it


def interface_of(address: str) -> str | None:
    """The network interface that has an address, for any of loopback its own; None where no interface has it."""
    target = ipaddress.ip_address(address)
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            candidate = ipaddress.ip_address(entry.address.partition("%")[0])
            if candidate == target or (candidate.is_loopback and target.is_loopback):
                return str(name)
    return None
