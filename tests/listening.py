"""Addresses on which processes listen."""

import ipaddress
from collections.abc import Iterable

import psutil

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def listening_addresses(processes: Iterable[psutil.Process]) -> list[Address]:
    """Address of each TCP socket on which these processes accept connections."""
    addresses = []
    for process in processes:
        try:
            sockets = process.net_connections("tcp")
        except psutil.NoSuchProcess:
            continue
        addresses += [
            _address(connection.laddr.ip) for connection in sockets if connection.status == psutil.CONN_LISTEN
        ]
    return addresses


def _address(text: str) -> Address:
    address = ipaddress.ip_address(text)
    return getattr(address, "ipv4_mapped", None) or address
