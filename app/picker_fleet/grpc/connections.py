"""The open connections of a port: a limit for all, and a lower one for each address."""

import itertools
import logging
from collections import Counter, OrderedDict
from typing import Generic, Protocol, TypeVar

_log = logging.getLogger(__name__)


class Addressed(Protocol):
    """A connection with the address of its peer, '' if it is unknown."""

    address: str

    def abort(self) -> None: ...


class ByAddress(Counter[str]):
    """How many connections each address has."""

    def remove(self, address: str) -> None:
        """Count one connection of `address` less. Forget an address without connections."""
        self[address] -= 1
        if not self[address]:
            del self[address]


Connection = TypeVar("Connection", bound=Addressed)


class Connections(Generic[Connection]):
    """The connections of `port`, at most `limit`; `all` has each of them.

    At the limit, a new connection replaces an idle one: the oldest that was never busy, or else the one that
    has been idle for longest. The last quarter of the limit is kept for other addresses than the one that has
    all others, since requests without end keep connections busy.
    """

    def __init__(self, port: str, limit: int) -> None:
        self._port, self._limit = port, limit
        self.all: set[Connection] = set()
        self._by_address = ByAddress()
        self._unused: OrderedDict[Connection, None] = OrderedDict()
        self._idle: OrderedDict[Connection, None] = OrderedDict()

    @property
    def full(self) -> str:
        """The reason why new connections are refused; '' while they are accepted."""
        if len(self.all) < self._limit or self._unused or self._idle:
            return ""
        return f"all {self._limit} connections of the {self._port} are taken"

    def add(self, connection: Connection) -> bool:
        """Add a new connection; at a limit, abort an idle one first. Returns False if none is idle."""
        address, share = connection.address, self._limit - self._limit // 4
        has_share = address != "" and self._by_address[address] >= share
        if has_share or len(self.all) >= self._limit:
            taken = share if has_share else self._limit
            _log.warning(
                "all %d connections of the %s are taken: idle ones are closed",
                taken,
                self._port,
                extra={"peer": address},
            )
            idle = itertools.chain(self._unused, self._idle)
            spare = next((each for each in idle if not has_share or each.address == address), None)
            if spare is None:
                return False
            self.remove(spare)
            spare.abort()
        self.all.add(connection)
        self._by_address[address] += 1
        self._unused[connection] = None
        return True

    def remove(self, connection: Connection) -> None:
        """Remove a connection, if it is there, since it has ended."""
        if connection in self.all:
            self.all.remove(connection)
            self._by_address.remove(connection.address)
            self.busy(connection)

    def busy(self, connection: Connection) -> None:
        """Keep a connection, since it has a request."""
        self._unused.pop(connection, None)
        self._idle.pop(connection, None)

    def idle(self, connection: Connection) -> None:
        """Let a new connection replace this one, since it has no request any more."""
        if connection in self.all:
            self._idle[connection] = None
