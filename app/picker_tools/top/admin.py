"""One replica's admin API, as `picker top` uses it: the stream of events, the queue's pages, and changes."""

import http.client
import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from picker_fleet.errors import PickerError

_SILENCE_S = 5.0  # a snapshot comes each second
_CALL_S = 5.0
_MOST_LINE_BYTES = 4 << 20
# Events, and what each must have.
_WANTED = {"snapshot": "state", "decisions": "entries", "unavailable": "detail"}


class AdminFault(PickerError):
    """The API cannot be asked, or refuses; the message is its own where it gave one."""


class Admin:
    """The API at `url` (`http://host:port`, or `host:port`). `token` is for changes.

    Raises:
        AdminFault: `url` is none.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise AdminFault(f"{url!r} is no address of an admin API; http://127.0.0.1:8081 would be one")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self._host, self._port = parts.hostname, port
        self._path = parts.path.rstrip("/")
        self._secure = parts.scheme == "https"
        self._token = token

    def events(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The fleet each second until it ends, as ("snapshot", figures) and, while decisions are logged,
        ("decisions", {"entries", "skipped"}); or as ("unavailable", {"detail"}).

        Close the iterator to leave.

        Raises:
            AdminFault: it refuses, says nothing for 5 s, or what it says cannot be read.
        """
        connection = self._connect(_SILENCE_S)
        try:
            connection.request("GET", f"{self._path}/api/v1/events", headers={"accept": "text/event-stream"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise AdminFault(self._refusal(answer))
            yield from _events(answer)
        except (OSError, http.client.HTTPException, ValueError) as fault:
            raise AdminFault(f"{self.url}: {fault or type(fault).__name__}") from fault
        finally:
            connection.close()

    def queue(self, limit: int, cursor: str) -> dict[str, Any]:
        """A page of waiting requests in dispatch order; `cursor` is of the page before, or empty.

        Raises:
            AdminFault: it refuses, says nothing for 5 s, or what it says cannot be read.
        """
        asked = urlencode({"limit": limit, **({"cursor": cursor} if cursor else {})})
        page = self._call("GET", f"queue?{asked}")
        if not isinstance(page, dict) or not isinstance(page.get("requests"), list):
            raise AdminFault(f"{self.url}: a queue that says nothing")
        return page

    def change(self, path: str) -> None:
        """POST `path` (below /api/v1).

        Raises:
            AdminFault: it was not done; or, after a silence of 5 s, may not have been.
        """
        self._call("POST", path, {"authorization": f"Bearer {self._token}"} if self._token else {})

    def _call(self, method: str, path: str, headers: Mapping[str, str] = MappingProxyType({})) -> Any:
        connection = self._connect(_CALL_S)
        try:
            connection.request(method, f"{self._path}/api/v1/{path}", headers=dict(headers))
            answer = connection.getresponse()
            if answer.status != 200:
                raise AdminFault(self._refusal(answer))
            return json.loads(answer.read(_MOST_LINE_BYTES))
        except (OSError, http.client.HTTPException, ValueError) as fault:  # the last: no header, or no JSON
            raise AdminFault(f"{self.url}: {fault or type(fault).__name__}") from fault
        finally:
            connection.close()

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=timeout_s)

    def _refusal(self, answer: http.client.HTTPResponse) -> str:
        said = answer.read(_MOST_LINE_BYTES)
        try:
            detail = str(json.loads(said)["detail"])
        except (ValueError, KeyError, TypeError):
            detail = "no picker's admin API seems to be there"
        if answer.status == 401:
            detail += " (PICKER_ADMIN__TOKEN)"
        return f"{self.url}: {answer.status}, {detail}"


def part(text: str) -> str:
    """`text` as one part of a path."""
    return quote(text, safe="")


def _events(lines: http.client.HTTPResponse) -> Iterator[tuple[str, dict[str, Any]]]:
    event = ""
    while line := lines.readline(_MOST_LINE_BYTES):
        if not line.endswith(b"\n"):
            raise ValueError("an event is too long, or was cut off")
        name, _, value = line.rstrip(b"\r\n").partition(b":")
        value = value.removeprefix(b" ")
        if name == b"event":
            event = value.decode(errors="replace")
        elif name == b"data" and event in _WANTED:
            data = json.loads(value)
            if not isinstance(data, dict) or _WANTED[event] not in data:
                raise ValueError(f"an event {event} that says nothing")
            yield event, data
        elif not line.strip():
            event = ""
