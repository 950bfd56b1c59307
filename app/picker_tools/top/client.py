"""One replica's admin API, as `picker top` uses it: the stream of events, the queue's pages, and changes."""

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from picker_fleet.errors import PickerError

_TIMEOUT_S = 5.0  # a snapshot comes every second
_MAX_LINE_BYTES = 4 << 20
# The key that each event's data must have.
_REQUIRED_KEY = {"snapshot": "state", "decisions": "entries", "unavailable": "detail"}


class AdminError(PickerError):
    """The API cannot be reached, or refuses; the message is the API's own where it gave one."""


class AdminClient:
    """The API at `url` (`http://host:port`, or `host:port`). `token` is for changes.

    Raises:
        AdminError: `url` is not one.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise AdminError(f"{url!r} is not the address of an admin API such as http://127.0.0.1:8081")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self._host, self._port = parts.hostname, port
        self._path = parts.path.rstrip("/")
        self._secure = parts.scheme == "https"
        self._token = token

    def events(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Events: each second ("snapshot", figures) or ("unavailable", {"detail"}); while decisions are
        logged also ("decisions", {"entries", "skipped"}).

        Close the iterator to leave.

        Raises:
            AdminError: it refuses, is silent for 5 s, or sends what cannot be parsed.
        """
        with self._asked("GET", "events", {"accept": "text/event-stream"}) as answer:
            yield from _events(answer)

    def queue(self, limit: int, cursor: str) -> dict[str, Any]:
        """A page of waiting requests in dispatch order; `cursor` is that of the page before, or empty.

        Raises:
            AdminError: it refuses, is silent for 5 s, or sends what cannot be parsed.
        """
        asked = urlencode({"limit": limit, **({"cursor": cursor} if cursor else {})})
        with self._asked("GET", f"queue?{asked}") as answer:
            page = json.loads(answer.read(_MAX_LINE_BYTES))
        if not isinstance(page, dict) or not isinstance(page.get("requests"), list):
            raise AdminError(f"{self.url}: a queue without requests")
        return page

    def change(self, path: str) -> None:
        """POST `path` (below /api/v1).

        Raises:
            AdminError: it was refused; after a silence of 5 s it may have been done.
        """
        headers = {"authorization": f"Bearer {self._token}"} if self._token else {}
        with self._asked("POST", path, headers) as answer:
            json.loads(answer.read(_MAX_LINE_BYTES))  # or it is no admin API

    @contextmanager
    def _asked(
        self, method: str, path: str, headers: Mapping[str, str] = MappingProxyType({})
    ) -> Iterator[http.client.HTTPResponse]:
        """The answer, whose body the block reads. What fails there is an AdminError, too."""
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=_TIMEOUT_S)
        try:
            connection.request(method, f"{self._path}/api/v1/{path}", headers=dict(headers))
            answer = connection.getresponse()
            if answer.status != 200:
                raise AdminError(self._refusal(answer))
            yield answer
        except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: no header, or no JSON
            raise AdminError(f"{self.url}: {error or type(error).__name__}") from error
        finally:
            connection.close()

    def _refusal(self, answer: http.client.HTTPResponse) -> str:
        body = answer.read(_MAX_LINE_BYTES)
        try:
            detail = str(json.loads(body)["detail"])
        except (ValueError, KeyError, TypeError):
            detail = "this is not a picker's admin API"
        if answer.status == 401:
            detail += " (PICKER_ADMIN__TOKEN)"
        return f"{self.url}: {answer.status}, {detail}"


def path_part(text: str) -> str:
    """`text` as one part of a path."""
    return quote(text, safe="")


def _events(lines: http.client.HTTPResponse) -> Iterator[tuple[str, dict[str, Any]]]:
    event = ""
    while line := lines.readline(_MAX_LINE_BYTES):
        if not line.endswith(b"\n"):
            raise ValueError("an event is too long, or was cut off")
        name, _, value = line.rstrip(b"\r\n").partition(b":")
        value = value.removeprefix(b" ")
        if name == b"event":
            event = value.decode(errors="replace")
        elif name == b"data" and event in _REQUIRED_KEY:
            data = json.loads(value)
            if not isinstance(data, dict) or _REQUIRED_KEY[event] not in data:
                raise ValueError(f"an event {event} without its data")
            yield event, data
        elif not line.strip():
            event = ""
