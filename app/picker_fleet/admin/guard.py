"""Who may change the fleet over HTTP: whoever has the token, or, where there is none, this machine."""

import hmac
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import HTTPException, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from picker_fleet.units import is_loopback

_BEARER = HTTPBearer(auto_error=False, description="admin.token of the configuration")
_FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")


class Guard:
    """A dependency of routes that change something. `token` is `admin.token`, None if there is none."""

    def __init__(self, token: str | None) -> None:
        self._token = None if token is None else token.encode()

    async def __call__(
        self,
        request: Request,
        bearer: Annotated[HTTPAuthorizationCredentials | None, Security(_BEARER)] = None,
    ) -> None:
        """Pass, or raise HTTPException 401 (no or a wrong token) or 403 (not from this machine)."""
        if self._token is not None:
            # The server hands headers over as Latin-1, whatever they were.
            given = b"" if bearer is None else bearer.credentials.encode("latin-1", "replace")
            if not hmac.compare_digest(given, self._token):
                raise HTTPException(
                    401,
                    "the bearer token of this fleet is needed",
                    {"www-authenticate": 'Bearer realm="picker"'},
                )
        elif not _is_local(request):
            raise HTTPException(
                403, "without an admin.token in the configuration only this machine may make changes"
            )


def _is_local(request: Request) -> bool:
    """Whether a process of this machine asks for itself, and not for a proxy's client or a web page."""
    if request.client is None or not is_loopback(request.client.host):
        return False
    if any(name in request.headers for name in _FORWARDED):
        return False
    # A page from elsewhere can make a browser here send this; its name gives it away.
    host = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
    origin = request.headers.get("origin")
    return (host == "localhost" or is_loopback(host)) and (
        origin is None or urlsplit(origin).netloc == request.headers.get("host")
    )
