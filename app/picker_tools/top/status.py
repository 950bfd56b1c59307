"""What `picker top` knows of the fleet, kept up to date by two threads.

One reads the stream of snapshots, the other the page of the queue that is shown.
"""

import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from picker_tools.top.client import AdminClient, AdminError

WINDOW_S = 300.0  # of stock samples that are kept
_RECONNECT_S = 1.0
_REFRESH_S = 2.0
_CLOSE_S = 0.2  # the threads are daemons: one that hangs in a connection ends with the process
_STALE_S = 3.0
_MAX_DECISIONS = 200
_LOG_KNOWN_AFTER = 2  # snapshots; a decision log would have sent its first decisions by then


@dataclass(frozen=True, slots=True)
class StockSample:
    """One snapshot's stock and bounds, in its unit. `at` is in seconds since the epoch."""

    at: float
    stock: float
    queued: float
    lower: float
    watermark: float
    upper: float

    @classmethod
    def of(cls, snapshot: Mapping[str, Any]) -> "StockSample":
        state = snapshot["state"]
        bounds = (float(state["bounds"].get(key) or 0) for key in ("lower", "watermark", "upper"))
        return cls(float(snapshot["at"]), float(state["stock"]), float(state["queued"]), *bounds)


@dataclass(frozen=True, slots=True)
class QueuePage:
    """The page of the queue that starts at `cursor`, or the error that reading it gave."""

    cursor: str = ""
    requests: tuple[dict[str, Any], ...] = ()
    total: int | None = None
    next_cursor: str | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class FleetStatus:
    """The last snapshot, its age, and the present error ('' if there is none).

    `decisions` are the latest, newest first; None before the first and without a decision log (`has_log` is
    False). `skipped` is how many more there were. `history` covers the last five minutes. `page` is the page
    of the queue that is shown, None before it was read.
    """

    snapshot: dict[str, Any] | None
    age_s: float
    error: str
    decisions: tuple[dict[str, Any], ...] | None = None
    skipped: int = 0
    has_log: bool = True
    history: tuple[StockSample, ...] = ()
    page: QueuePage | None = None

    @property
    def is_stale(self) -> bool:
        return self.age_s > _STALE_S


class _Reader:
    """Reads in a thread, inside its `with` block."""

    def __init__(self, admin: AdminClient) -> None:
        self._admin = admin
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._read, name=type(self).__name__, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(_CLOSE_S)

    def _read(self) -> None:
        """Until `_closing`."""
        raise NotImplementedError


class SnapshotReader(_Reader):
    """Reads the stream of events, and reconnects when it breaks."""

    def __init__(self, admin: AdminClient) -> None:
        super().__init__(admin)
        self._snapshot: dict[str, Any] | None = None
        self._count = 0
        self._received_s = time.monotonic()
        self._error = ""
        self._decisions: deque[dict[str, Any]] | None = None
        self._skipped = 0
        self._history: deque[StockSample] = deque()

    def status(self, page: QueuePage | None = None) -> FleetStatus:
        with self._changed:
            return FleetStatus(
                self._snapshot,
                time.monotonic() - self._received_s,
                self._error,
                None if self._decisions is None else tuple(self._decisions),
                self._skipped,
                self._decisions is not None or self._count < _LOG_KNOWN_AFTER,
                tuple(self._history),
                page,
            )

    def wait_first(self, within_s: float, *, decisions: bool = False) -> FleetStatus:
        """The status once there is a snapshot or an error, or after `within_s`.

        With `decisions`, also wait until it is known whether there is a decision log.
        """

        def settled() -> bool:
            log = not decisions or self._decisions is not None or self._count >= _LOG_KNOWN_AFTER
            return bool(self._error) or (self._snapshot is not None and log)

        with self._changed:
            self._changed.wait_for(settled, within_s)
        return self.status()

    def _read(self) -> None:
        while not self._closing:
            try:
                for event, data in self._admin.events():
                    if event == "unavailable":
                        self._set_error(str(data["detail"]))
                    else:
                        self._apply(event, data)
                    if self._closing:
                        return
                self._set_error("the replica ended the stream")
            except AdminError as error:
                self._set_error(str(error))
            except (KeyError, TypeError, ValueError) as error:
                self._set_error(f"{self._admin.url}: unreadable figures ({error})")
            with self._changed:
                self._changed.wait_for(lambda: self._closing, _RECONNECT_S)

    def _set_error(self, error: str) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _apply(self, event: str, data: dict[str, Any]) -> None:
        with self._changed:
            if event == "snapshot":
                self._snapshot, self._received_s, self._error = data, time.monotonic(), ""
                self._count += 1
                self._add_sample(StockSample.of(data))
            else:
                if self._decisions is None:
                    self._decisions = deque(maxlen=_MAX_DECISIONS)
                self._decisions.extendleft(data["entries"])
                self._skipped += int(data.get("skipped") or 0)
            self._changed.notify_all()

    def _add_sample(self, sample: StockSample) -> None:
        if self._history and sample.at <= self._history[-1].at:
            return  # the replica's clock stepped back
        self._history.append(sample)
        while self._history[0].at < sample.at - WINDOW_S:
            self._history.popleft()


class QueueReader(_Reader):
    """Reads the wanted page of the queue every 2 s."""

    def __init__(self, admin: AdminClient) -> None:
        super().__init__(admin)
        self._wanted: tuple[str, int] | None = None
        self._stale = False
        self._page: QueuePage | None = None

    def show(self, cursor: str, limit: int) -> QueuePage | None:
        """The page of `limit` requests from `cursor`, read from now on; None until it was read."""
        with self._changed:
            if self._wanted != (cursor, limit):
                self._wanted = (cursor, limit)
                self._request_read()
            return self._page if self._page is not None and self._page.cursor == cursor else None

    def hide(self) -> None:
        """Stop reading pages."""
        with self._changed:
            self._wanted = self._page = None

    def refresh(self) -> None:
        """Read the page now: the queue was changed."""
        with self._changed:
            self._request_read()

    def _request_read(self) -> None:
        self._stale = True
        self._changed.notify_all()

    def _read(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._stale, _REFRESH_S)
                if self._closing:
                    return
                self._stale, wanted = False, self._wanted
            if wanted is None:
                continue
            page = read(self._admin, *wanted)
            with self._changed:
                if self._wanted == wanted:
                    self._page = page


def read(admin: AdminClient, cursor: str, limit: int) -> QueuePage:
    """Read one page now; an error of the API is in `QueuePage.error`."""
    try:
        answer = admin.queue(limit, cursor)
    except AdminError as error:
        return QueuePage(cursor, error=str(error))
    return QueuePage(cursor, tuple(answer["requests"]), answer.get("total"), answer.get("cursor"))
