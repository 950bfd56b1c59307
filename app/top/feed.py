"""The last snapshot, kept up to date by a thread of its own."""

import threading
import time
from dataclasses import dataclass
from typing import Any

from app.top.admin import Admin, AdminFault

_AGAIN_S = 1.0
_STALE_S = 3.0
_LEAVE_S = 0.2  # the thread is a daemon: one that hangs in a connection ends with the process


@dataclass(frozen=True, slots=True)
class News:
    """What is known: `shot` is the last snapshot, `silent_s` since when, `fault` what is wrong now."""

    shot: dict[str, Any] | None
    silent_s: float
    fault: str

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
        self._heard = time.monotonic()
        self._fault = ""
        self._thread = threading.Thread(target=self._read, name="feed", daemon=True)

    def __enter__(self) -> "Feed":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.set()
        self._thread.join(_LEAVE_S)

    def news(self) -> News:
        with self._changed:
            return News(self._shot, time.monotonic() - self._heard, self._fault)

    def first(self, within_s: float) -> News:
        """The news once there is a snapshot or a fault, or `within_s` are over."""
        with self._changed:
            self._changed.wait_for(lambda: self._shot is not None or self._fault, within_s)
        return self.news()

    def _read(self) -> None:
        while not self._leaving.is_set():
            try:
                for event, data in self._admin.events():
                    if event == "snapshot":
                        self._tell(data, "")
                    else:
                        self._tell(None, str(data["detail"]))
                    if self._leaving.is_set():
                        return
                self._tell(None, "the replica ended the stream")
            except AdminFault as fault:
                self._tell(None, str(fault))
            self._leaving.wait(_AGAIN_S)

    def _tell(self, shot: dict[str, Any] | None, fault: str) -> None:
        with self._changed:
            if shot is not None:
                self._shot, self._heard = shot, time.monotonic()
            self._fault = fault
            self._changed.notify_all()
