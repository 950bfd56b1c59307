"""The client of one replica's admin API for `picker top`: reads the event stream and queue, makes changes."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2

from picker_fleet.admin import models
from picker_fleet.domain.errors import PickerError

Event = models.Snapshot | models.Decisions | models.Unavailable
_EVENTS: dict[bytes, type[Event]] = {
    b"snapshot": models.Snapshot,
    b"decisions": models.Decisions,
    b"unavailable": models.Unavailable,
}
_SILENCE_S = 4.0  # a stream without an event for this many seconds has failed: a snapshot comes every second


class AdminError(PickerError):
    """Raised if the API is unreachable or refused a call; the message includes the API's message, if any."""


class AdminClient:
    """A client of the admin API below `url` (`http://host:port`, or `host:port`) with the bearer `token`. For
    `https`, the file `ca` has the trusted authorities; by default the machine's authorities are trusted.

    Every method raises AdminError if the API is unreachable, is silent for 4 s, refuses the call, or sends an
    answer that cannot be parsed. A change that failed may have been made, unless the API refused it.
    """

    def __init__(self, url: str, token: str | None = None, ca: Path | None = None) -> None:
        self.url = url if "://" in url else f"http://{url}"
        headers = {"authorization": f"Bearer {token}"} if token else {}
        verify = ssl.create_default_context(cafile=ca) if ca is not None else True
        # Ignore the environment's proxies, since a proxy would see the token.
        self._http = httpx2.AsyncClient(timeout=_SILENCE_S, trust_env=False, headers=headers, verify=verify)

    async def close(self) -> None:
        await self._http.aclose()

    async def events(self) -> AsyncIterator[Event]:
        """Yields a snapshot each second, or the reason why there is none, and new decisions if logged."""
        rest = b""
        async with self._answer("GET", "events") as answer:
            # Do not use aiter_lines, which also splits lines at U+2028: a flow's name may contain U+2028.
            async for chunk in answer.aiter_bytes():
                *events, rest = (rest + chunk).split(b"\n\n")
                for event in events:
                    fields = dict(line.partition(b": ")[::2] for line in event.split(b"\n"))
                    if kind := _EVENTS.get(fields.get(b"event", b"")):
                        yield kind.model_validate_json(fields.get(b"data", b""))

    async def queue(self, limit: int) -> models.Queue:
        """The first `limit` requests in the queue."""
        async with self._answer("GET", "queue", params={"limit": limit}) as answer:
            return models.Queue.model_validate_json(await answer.aread())

    async def change(self, *path: str) -> None:
        """Send a POST to the path below /api/v1 with the parts `path`, which may contain any character."""
        async with self._answer("POST", *path):
            pass

    @asynccontextmanager
    async def _answer(self, method: str, *path: str, **how: Any) -> AsyncIterator[httpx2.Response]:
        """Send a request and yield its answer; the `with` block reads its body. A fault raises AdminError."""
        url = f"{self.url}/api/v1/{'/'.join(quote(part, safe='') for part in path)}"
        try:
            async with self._http.stream(method, url, **how) as answer:
                if answer.status_code == 200:
                    yield answer
                    return
                problem = models.Problem.model_validate_json(await answer.aread())
            hint = " (PICKER_ADMIN__TOKEN)" if problem.status == 401 else ""
            raise AdminError(f"{self.url}: {problem.status}, {problem.detail}{hint}")
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise AdminError(f"{self.url} does not answer: {str(error) or type(error).__name__}") from error
        except ValueError as error:  # the body is not JSON, or fits no model of the API
            raise AdminError(f"{self.url}: this is not a picker's admin API") from error
