"""Endpoints from DNS: every A and AAAA record of one name, on one port, looked up at an interval.

A and AAAA records are looked up separately, and each type keeps its own last good answer: many name servers
drop AAAA queries, which must not affect the A records. An answer without addresses counts only once the next
lookup confirms it.
"""

import asyncio
import logging
import socket
from ipaddress import ip_address
from typing import Literal

import dns.asyncresolver
import dns.exception
import dns.resolver

from picker_fleet.domain.request import Endpoint
from picker_fleet.domain.units import endpoint_address
from picker_fleet.endpoints.discovery import Report

_log = logging.getLogger(__name__)

Family = Literal["A", "AAAA"]
_FAMILIES: tuple[Family, ...] = ("A", "AAAA")


class DnsSource:
    """Reports the addresses of `name`, an IP address or host name (the search list applies), on `port`.

    `resolver` replaces the system's DNS configuration. A lookup times out after `lookup_s`.
    """

    def __init__(
        self,
        name: str,
        port: int,
        *,
        interval_s: float = 5.0,
        lookup_s: float = 3.0,
        resolver: dns.asyncresolver.Resolver | None = None,
    ) -> None:
        self._name = name
        self._port = port
        self._interval_s = interval_s
        self._lookup_s = lookup_s
        self._resolver = resolver
        self._known: dict[Family, tuple[str, ...]] = {}
        self._failing: set[Family] = set()  # address families whose last lookup failed
        self._empty: set[Family] = set()  # address families whose last answer had no address

    async def watch(self, report: Report) -> None:
        """Implements Source.watch; reports nothing until a lookup succeeds."""
        reported: tuple[Endpoint, ...] | None = None
        while True:
            async with asyncio.TaskGroup() as group:
                for family in _FAMILIES:
                    group.create_task(self._refresh(family))
            # At the start, do not report an empty list while only one address family has answered.
            begun = reported is not None or len(self._known) == len(_FAMILIES)
            if begun or any(self._known.values()):
                hosts = sorted({host for family in _FAMILIES for host in self._known.get(family, ())})
                found = tuple(Endpoint(address=_address(host, self._port)) for host in hosts)
                if found != reported:
                    reported = found
                    report(found)
            await asyncio.sleep(self._interval_s)

    async def _refresh(self, family: Family) -> None:
        try:
            async with asyncio.timeout(self._lookup_s):
                found = await self._look_up(family)
        except (dns.exception.DNSException, OSError) as fault:  # OSError includes TimeoutError
            text = " ".join(str(fault).split())[:200] or type(fault).__name__
            if family not in self._failing:
                _log.warning(
                    "DNS lookup of %s %s failed: %s; the last good list stays in use",
                    self._name,
                    family,
                    text,
                )
            self._failing.add(family)
            return
        self._failing.discard(family)
        known = self._known.get(family)
        if found:
            self._empty.discard(family)
        elif family not in self._empty:
            self._empty.add(family)
            if known:
                _log.warning(
                    "DNS lookup of %s %s has no address; the last good list stays in use unless the next "
                    "lookup has none either",
                    self._name,
                    family,
                )
            return
        elif known:
            _log.warning("DNS lookup of %s %s has no address again: its list is empty", self._name, family)
        self._known[family] = found

    async def _look_up(self, family: Family) -> tuple[str, ...]:
        literal = _literal(self._name)
        if literal is not None:
            return (self._name,) if literal == family else ()
        if self._name == "localhost" or self._name.endswith(".localhost"):
            return await self._from_system(family)
        if self._resolver is None:
            self._resolver = dns.asyncresolver.Resolver()
        try:
            answer = await self._resolver.resolve(self._name, family, search=True, lifetime=self._lookup_s)
        except dns.resolver.NoAnswer:
            return ()  # the name exists, but has no address of this family
        return tuple(record.address for record in answer)

    async def _from_system(self, family: Family) -> tuple[str, ...]:
        """Look up `localhost` names through the system: the hosts file has them, not DNS."""
        wanted = socket.AF_INET if family == "A" else socket.AF_INET6
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self._name, self._port, family=wanted, type=socket.SOCK_STREAM)
        except socket.gaierror as fault:
            if fault.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", None), -9):
                return ()
            raise
        return tuple(str(entry[4][0]) for entry in found)


def _literal(name: str) -> Family | None:
    try:
        return "A" if ip_address(name).version == 4 else "AAAA"
    except ValueError:
        return None


def _address(host: str, port: int) -> str:
    return endpoint_address(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
