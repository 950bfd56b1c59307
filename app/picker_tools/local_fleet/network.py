"""Finds and checks ports on the loopback, and calls parts of a fleet by HTTP GET or Redis PING in time."""

import asyncio
import contextlib
import errno
import http.client
import json
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from picker_fleet.domain.errors import StartupError
from picker_fleet.domain.redis_address import Address

LOOPBACK = "127.0.0.1"
ADMIN_TOKEN = "PICKER_ADMIN__TOKEN"  # environment variable with the admin API's token


def free_port() -> int:
    """A port on the loopback that is free now. Another process may take the port, so callers retry."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def ensure_free(wanted: Mapping[int, str]) -> None:
    """Check that each port in `wanted` is free; `wanted` maps a port to its purpose and option.

    A fleet's parts do not check ports: an Envoy, for example, would share a port with another Envoy.

    Raises:
        StartupError: ports are in use or not allowed; the message has a line for each such port.
    """
    faults = []
    for port, purpose in wanted.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOOPBACK, port))
            except OSError as fault:
                in_use = fault.errno == errno.EADDRINUSE
                why = "is in use" if in_use else f"cannot be used: {fault.strerror}"
                faults.append(f"port {port} {why}; it is wanted for {purpose}")
    if faults:
        raise StartupError("\n".join(faults))


Answer = TypeVar("Answer")

_CALL_S = 1.0


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    body: bytes

    def json(self) -> Any:
        """The body parsed as JSON; None if the body is not JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None


async def get(url: str, token: str = "") -> Reply | None:
    """The reply to GET `url` (http://host:port/path), with the bearer `token` unless it is empty; None if no
    reply arrives within a second."""
    return await asyncio.to_thread(_get, url, token)


def _get(url: str, token: str) -> Reply | None:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_CALL_S)
    try:
        connection.request("GET", f"{parts.path or '/'}?{parts.query}".rstrip("?"), headers=headers)
        response = connection.getresponse()
        return Reply(response.status, response.read())
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


async def redis_answers(host: str, port: int) -> bool:
    """Whether the Redis at `host:port` answers PING: it has loaded its data and needs no password."""
    try:
        async with asyncio.timeout(_CALL_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(b"PING\r\n")
                return await reader.readline() == b"+PONG\r\n"
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False


async def can_connect(url: str) -> bool:
    """Whether any node in the Redis URL `url` accepts connections. Raises ValueError for an invalid URL."""
    address = Address.parse(url)
    if address.kind == "socket":
        return await _accepts(asyncio.open_unix_connection(address.path))
    for host, port in address.nodes:
        if await _accepts(asyncio.open_connection(host, port)):
            return True
    return False


async def _accepts(connecting: Awaitable[tuple[Any, asyncio.StreamWriter]]) -> bool:
    try:
        async with asyncio.timeout(2 * _CALL_S):
            _, writer = await connecting
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


async def until(
    ask: Callable[[], Awaitable[Answer | None]], *, within_s: float, pause_s: float = 0.05
) -> Answer | None:
    """Call `ask` until it returns a true value, and return it; None after `within_s` seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while True:
                if answer := await ask():
                    return answer
                await asyncio.sleep(pause_s)
    return None
