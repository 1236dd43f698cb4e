"""Connections to permitted addresses only.

The check applies to the address that is then connected to, so that a name that resolves to another address a moment
later (DNS rebinding) gains nothing.
"""

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import httpcore

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
"""Addresses that a gateway translates to the IPv4 address in their last 32 bits (RFC 6052)."""
_PUBLIC_IPV6 = ipaddress.IPv6Network("2000::/3")
"""Range that IANA has assigned for the internet. `is_global` also accepts addresses outside it: site-local addresses, a
network's own translation prefixes (RFC 8215), and IPv4-compatible ones such as `::127.0.0.1`."""
REMEDY = "the operator can allow its network in SHARDYARD_WEBHOOK_NETWORKS"


class AddressRefused(Exception):
    """An address that webhooks may not use."""


class AddressRule:
    """Public addresses, and those of the operator's networks."""

    def __init__(self, networks: Sequence[str]) -> None:
        self._networks = [ipaddress.ip_network(network) for network in networks]

    def permits(self, address: Address) -> bool:
        """Whether connections to an address are permitted. An IPv4 address that it embeds decides."""
        embedded = _embedded(address)
        if embedded is not None:
            return self.permits(embedded)
        if any(address in network for network in self._networks):
            return True
        if address.version == 6 and address not in _PUBLIC_IPV6:
            return False
        return address.is_global and not address.is_multicast

    def refusal(self, host: str, addresses: Iterable[Address]) -> str:
        """Message that none of a host's addresses is permitted."""
        listing = ", ".join(map(str, addresses))
        name = host if listing == host else f"{host} ({listing})"
        return f"{name} is not a public address; {REMEDY}"


def _embedded(address: Address) -> ipaddress.IPv4Address | None:
    """IPv4 address that packets to an IPv6 address reach in the end."""
    if isinstance(address, ipaddress.IPv4Address):
        return None
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    teredo = address.teredo
    return address.ipv4_mapped or address.sixtofour or (teredo[1] if teredo is not None else None)


class CheckedNetwork(httpcore.AsyncNetworkBackend):
    """Network of httpcore that connects to permitted addresses only."""

    def __init__(self, rule: AddressRule) -> None:
        self._rule = rule
        self._network = httpcore.AnyIOBackend()
        self.is_connected = False

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Raises AddressRefused, httpcore.ConnectError."""
        addresses = await _resolve(host, port)
        permitted_addresses = [address for address in addresses if self._rule.permits(address)]
        if not permitted_addresses:
            raise AddressRefused(self._rule.refusal(host, addresses))
        last_error: Exception | None = None
        for address in permitted_addresses:
            try:
                stream = await self._network.connect_tcp(str(address), port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                last_error = error
            else:
                self.is_connected = True
                return stream
        assert last_error is not None
        raise last_error

    async def sleep(self, seconds: float) -> None:
        await self._network.sleep(seconds)


async def _resolve(host: str, port: int) -> list[Address]:
    """Addresses of a host. A look-up may hang, so it runs in a daemon thread of its own, which delays nothing, not even
    the end of the process. Raises httpcore.ConnectError."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[list[Address]] = loop.create_future()

    def look_up() -> None:
        try:
            entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            addresses = list(dict.fromkeys(ipaddress.ip_address(entry[4][0]) for entry in entries))
            reply = partial(_set_result, future, addresses)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            reply = partial(_set_exception, future, httpcore.ConnectError(f"cannot resolve {host}: {reason}"))
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(reply)

    threading.Thread(target=look_up, name="webhook-resolver", daemon=True).start()
    return await future


def _set_result(future: asyncio.Future[list[Address]], addresses: list[Address]) -> None:
    if not future.done():  # cancelled by its timeout
        future.set_result(addresses)


def _set_exception(future: asyncio.Future[list[Address]], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
