"""The last snapshot, kept up to date by a thread of its own, with what was before it."""

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from picker_tools.top.admin import Admin, AdminFault
from picker_tools.top.chart import WINDOW_S, Moment

_AGAIN_S = 1.0
_STALE_S = 3.0
_LEAVE_S = 0.2  # the thread is a daemon: one that hangs in a connection ends with the process
_MOST_DECISIONS = 200
_SETTLED = 2  # snapshots, after which a log of decisions would have been heard of


@dataclass(frozen=True, slots=True)
class Page:
    """What the queue's page behind `cursor` was when it was read; or why it could not be."""

    cursor: str = ""
    requests: tuple[dict[str, Any], ...] = ()
    total: int | None = None
    following: str | None = None  # the cursor of the next page
    fault: str = ""


@dataclass(frozen=True, slots=True)
class News:
    """What is known: `shot` is the last snapshot, `silent_s` since when, `fault` what is wrong now.

    `decisions` are the last ones, newest first; None while none were told, and if there is no log of them
    (`logs` is False). `skipped`: how many more there were. `moments` are of the last five minutes. `page` is
    the queue's page that is looked at, None before it was read.
    """

    shot: dict[str, Any] | None
    silent_s: float
    fault: str
    decisions: tuple[dict[str, Any], ...] | None = None
    skipped: int = 0
    logs: bool = True
    moments: tuple[Moment, ...] = ()
    page: Page | None = None

    @property
    def stale(self) -> bool:
        return self.silent_s > _STALE_S


class Feed:
    """`with Feed(admin) as feed`: reads while inside, and connects again for as long as that lasts."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self._leaving = threading.Event()
        self._changed = threading.Condition()
        self._shot: dict[str, Any] | None = None
        self._shots = 0
        self._heard = time.monotonic()
        self._fault = ""
        self._decisions: deque[dict[str, Any]] | None = None
        self._skipped = 0
        self._moments: deque[Moment] = deque()
        self._thread = threading.Thread(target=self._read, name="feed", daemon=True)

    def __enter__(self) -> "Feed":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.set()
        self._thread.join(_LEAVE_S)

    def news(self, page: Page | None = None) -> News:
        with self._changed:
            return News(
                self._shot,
                time.monotonic() - self._heard,
                self._fault,
                None if self._decisions is None else tuple(self._decisions),
                self._skipped,
                self._decisions is not None or self._shots < _SETTLED,
                tuple(self._moments),
                page,
            )

    def first(self, within_s: float, *, decisions: bool = False) -> News:
        """The news once there is a snapshot or a fault, or `within_s` are over; with `decisions`, once it is
        known besides whether there is a log of them.
        """

        def settled() -> bool:
            log = not decisions or self._decisions is not None or self._shots >= _SETTLED
            return bool(self._fault) or (self._shot is not None and log)

        with self._changed:
            self._changed.wait_for(settled, within_s)
        return self.news()

    def _read(self) -> None:
        while not self._leaving.is_set():
            try:
                for event, data in self._admin.events():
                    if event == "unavailable":
                        self._wrong(str(data["detail"]))
                    else:
                        self._tell(event, data)
                    if self._leaving.is_set():
                        return
                self._wrong("the replica ended the stream")
            except AdminFault as fault:
                self._wrong(str(fault))
            except (KeyError, TypeError, ValueError) as fault:
                self._wrong(f"{self._admin.url}: figures that cannot be read ({fault})")
            self._leaving.wait(_AGAIN_S)

    def _wrong(self, fault: str) -> None:
        with self._changed:
            self._fault = fault
            self._changed.notify_all()

    def _tell(self, event: str, data: dict[str, Any]) -> None:
        with self._changed:
            if event == "snapshot":
                self._shot, self._heard, self._fault = data, time.monotonic(), ""
                self._shots += 1
                self._remember(Moment.of(data))
            else:
                if self._decisions is None:
                    self._decisions = deque(maxlen=_MOST_DECISIONS)
                self._decisions.extendleft(data["entries"])
                self._skipped += int(data.get("skipped") or 0)
            self._changed.notify_all()

    def _remember(self, moment: Moment) -> None:
        if self._moments and moment.at <= self._moments[-1].at:
            return  # the clock was put back: the line goes on where it was
        self._moments.append(moment)
        while self._moments[0].at < moment.at - WINDOW_S:
            self._moments.popleft()
