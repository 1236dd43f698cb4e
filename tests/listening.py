"""Where processes listen."""

import ipaddress
from collections.abc import Iterable

import psutil

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def listening_addresses(processes: Iterable[psutil.Process]) -> list[Address]:
    """The address of each TCP socket on which these processes take connections."""
    found = []
    for process in processes:
        try:
            sockets = process.net_connections("tcp")
        except psutil.NoSuchProcess:
            continue
        found += [_address(each.laddr.ip) for each in sockets if each.status == psutil.CONN_LISTEN]
    return found


def _address(text: str) -> Address:
    address = ipaddress.ip_address(text)
    return getattr(address, "ipv4_mapped", None) or address
