"""All connections of this process: few, replaceable unauthenticated ones, and authenticated ones."""

import ipaddress
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from service.control.errors import Unavailable


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits on the number and times of connections, explained in `settings.py`."""

    max_connections: int
    max_strangers: int
    max_strangers_per_address: int
    header_timeout_s: float
    body_timeout_s: float
    min_body_bytes_per_s: float
    write_timeout_s: float

    @property
    def look_interval_s(self) -> float:
        """Interval of timeout checks."""
        return min(1.0, min(self.header_timeout_s, self.body_timeout_s, self.write_timeout_s) / 4)


class Replaceable(Protocol):
    """A connection as `Connections` sees it."""

    address: str

    @property
    def answering(self) -> bool:
        """Whether one of its requests is being answered."""

    def close_for_another(self) -> None:
        """Close the connection in favour of another."""


C = TypeVar("C", bound=Replaceable)


class Connections(Generic[C]):
    """Counts connections. If there are too many strangers (not authenticated yet), the oldest without a pending
    response is closed, so that idle connections do not lock out new ones.

    Authenticated connections are not limited per address: hundreds of streams and workers may share one.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._strangers: dict[C, None] = {}  # dicts, which keep the order of arrival
        self._by_address: dict[str, dict[C, None]] = {}
        self._admitted_connections: set[C] = set()

    @property
    def num_strangers(self) -> int:
        return len(self._strangers)

    @property
    def num_admitted(self) -> int:
        return len(self._admitted_connections)

    def list_connections(self) -> list[C]:
        return [*self._strangers, *self._admitted_connections]

    def add(self, connection: C) -> bool:
        """Count a new stranger; False if there is no room and none to close."""
        siblings = self._by_address.get(connection.address, {})
        if len(siblings) >= self.limits.max_strangers_per_address and not self._make_room(siblings):
            return False
        if len(self._strangers) >= self.limits.max_strangers and not self._make_room(self._strangers):
            return False
        self._strangers[connection] = None
        self._by_address.setdefault(connection.address, {})[connection] = None
        return True

    def admit(self, connection: C) -> None:
        """Count a connection as authenticated. Raises Unavailable when there are too many."""
        if connection in self._admitted_connections:
            return
        if len(self._admitted_connections) >= self.limits.max_connections:
            raise Unavailable(
                f"{len(self._admitted_connections):,} connections are open, the maximum; try again "
                "later, or ask the operator to raise SHARDYARD_MAX_CONNECTIONS",
                headers={"connection": "close", "retry-after": "5"},
            )
        if connection in self._strangers:  # it may have been closed during authentication
            self._forget_stranger(connection)
            self._admitted_connections.add(connection)

    def forget(self, connection: C) -> None:
        """Remove a closed connection."""
        self._admitted_connections.discard(connection)
        if connection in self._strangers:
            self._forget_stranger(connection)

    def _make_room(self, connections: dict[C, None]) -> bool:
        oldest = next((connection for connection in connections if not connection.answering), None)
        if oldest is None:
            return False
        self._forget_stranger(oldest)
        oldest.close_for_another()
        return True

    def _forget_stranger(self, connection: C) -> None:
        del self._strangers[connection]
        siblings = self._by_address[connection.address]
        del siblings[connection]
        if not siblings:
            del self._by_address[connection.address]


def address_of(host: str) -> str:
    """Key of an address for counting: for IPv6 the /64 network, which one host may own."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)
