"""By which names the admin API may be read. A web page whose own name is made to point here ("DNS rebinding")
has a browser read with that name as Host; so a name that is not this replica's is refused.

Changes have a guard of their own (guard.py).
"""

import socket
from collections.abc import Iterable
from ipaddress import ip_address
from urllib.parse import urlsplit

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from picker_fleet.admin.problems import Refused, answer
from picker_fleet.units import is_loopback

_SPARED = ("/healthz", "/readyz", "/metrics")  # whoever looks after replicas calls them by any address
_READS = ("GET", "HEAD", "OPTIONS")


class Hosts:
    """An ASGI application before `app`: reads with another Host are answered 421.

    Known are the loopback, this machine's name, the address that the call came to, and `names`, of which one
    that begins with `*.` stands for all below it.
    """

    def __init__(self, app: ASGIApp, names: Iterable[str]) -> None:
        self._app = app
        every = [socket.gethostname().lower(), "localhost", *names]
        self._names = frozenset(name for name in every if not name.startswith("*."))
        self._below = tuple(name[1:] for name in every if name.startswith("*."))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] in _READS and scope["path"] not in _SPARED:
            said = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
            if len(said) != 1 or not self._known(said[0], scope):
                given = repr(said[0][:80]) if len(said) == 1 else f"{len(said)} of them"
                fault = Refused(
                    421,
                    "unknown_host",
                    f"this replica does not go by the Host given ({given}); admin.hosts lists its names",
                )
                await answer(Request(scope), fault)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _known(self, said: str, scope: Scope) -> bool:
        try:
            host = urlsplit(f"//{said}").hostname or ""
        except ValueError:
            return False
        host = host.removesuffix(".")
        if host in self._names or (self._below and host.endswith(self._below)) or is_loopback(host):
            return True
        called = scope.get("server")
        return called is not None and _same_address(host, called[0])


def _same_address(host: str, called: str) -> bool:
    try:
        return ip_address(host) == ip_address(called)
    except ValueError:
        return False
