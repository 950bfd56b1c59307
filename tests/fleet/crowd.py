"""HTTP for tests: clients that are cheap to create, and a transport for many parallel requests."""

from typing import Any

# httpx imports these modules in its first request; on a busy machine this stops a test's clients for 2 s.
import anyio._backends._asyncio  # noqa: F401
import httpcore  # noqa: F401
import httpx

_EACH = 4


def http_client(url: str = "", **options: Any) -> httpx.AsyncClient:
    """A client of the server at `url` that ignores the machine's proxy settings. `verify=False` avoids
    loading all certificate authorities (27 ms of CPU)."""
    settings = {"trust_env": False, "verify": False, "timeout": 60.0, **options}
    return httpx.AsyncClient(base_url=url, **settings)


class Crowd(httpx.AsyncBaseTransport):
    """Spreads requests over connection pools with at most `_EACH` requests each.

    An httpx pool scans all its requests and connections whenever a request begins or ends: 300 parallel
    requests take ten times as long as 300 sequential ones.
    """

    def __init__(self) -> None:
        self._asking: dict[httpx.AsyncHTTPTransport, int] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        pool = next((pool for pool, asking in self._asking.items() if asking < _EACH), None)
        if pool is None:
            limits = httpx.Limits(max_connections=None)
            pool = httpx.AsyncHTTPTransport(trust_env=False, verify=False, limits=limits)
            self._asking[pool] = 0
        self._asking[pool] += 1
        try:
            return await pool.handle_async_request(request)
        finally:
            self._asking[pool] -= 1

    async def aclose(self) -> None:
        for pool in self._asking:
            await pool.aclose()
