"""All connections of this process: strangers, few and replaceable, and those that have shown who they are."""

import ipaddress
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from service.control.errors import Unavailable


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits to how many connections there may be, and how long one may take. `settings.py` explains each."""

    max_connections: int
    max_strangers: int
    max_strangers_per_address: int
    header_timeout_s: float
    body_timeout_s: float
    min_body_bytes_per_s: float
    write_timeout_s: float

    @property
    def look_interval_s(self) -> float:
        """Interval between looks for connections whose time is over."""
        return min(1.0, min(self.header_timeout_s, self.body_timeout_s, self.write_timeout_s) / 4)


class Replaceable(Protocol):
    """Connection as `Connections` needs to know it."""

    address: str

    @property
    def answering(self) -> bool:
        """Whether a request of it is being answered."""

    def give_way(self) -> None:
        """Closes it for another's sake."""


C = TypeVar("C", bound=Replaceable)


class Connections(Generic[C]):
    """A stranger is who has not authenticated yet. Where there is no room for one more, the oldest that this service
    owes no answer gives way: whoever only holds a connection open keeps nobody out.

    Those that have authenticated are counted apart, and not by address: hundreds of streams and workers may lie
    behind one.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._strangers: dict[C, None] = {}  # dicts, for they keep the order in which connections came
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

    def welcome(self, connection: C) -> bool:
        """Counts a new one as a stranger; False where there is no room, and nobody to give way."""
        beside = self._by_address.get(connection.address, {})
        if len(beside) >= self.limits.max_strangers_per_address and not self._make_room(beside):
            return False
        if len(self._strangers) >= self.limits.max_strangers and not self._make_room(self._strangers):
            return False
        self._strangers[connection] = None
        self._by_address.setdefault(connection.address, {})[connection] = None
        return True

    def admit(self, connection: C) -> None:
        """Counts one as authenticated from now on. Raises Unavailable when there are too many of them."""
        if connection in self._admitted_connections:
            return
        if len(self._admitted_connections) >= self.limits.max_connections:
            raise Unavailable(
                f"{len(self._admitted_connections):,} connections are open, which is all that this service holds; "
                "come back later, or have its operator raise SHARDYARD_MAX_CONNECTIONS",
                headers={"connection": "close", "retry-after": "5"},
            )
        if connection in self._strangers:  # it may have been closed while its token was looked at
            self._forget_stranger(connection)
            self._admitted_connections.add(connection)

    def forget(self, connection: C) -> None:
        """Remove a connection that has closed."""
        self._admitted_connections.discard(connection)
        if connection in self._strangers:
            self._forget_stranger(connection)

    def _make_room(self, among: dict[C, None]) -> bool:
        oldest = next((connection for connection in among if not connection.answering), None)
        if oldest is None:
            return False
        self._forget_stranger(oldest)
        oldest.give_way()
        return True

    def _forget_stranger(self, connection: C) -> None:
        del self._strangers[connection]
        beside = self._by_address[connection.address]
        del beside[connection]
        if not beside:
            del self._by_address[connection.address]


def address_of(host: str) -> str:
    """Part that counts as one address: of IPv6 the network, for whoever has one address there has 2**64 of them."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)
