"""The page of the queue that is looked at, read again and again by a thread of its own."""

import threading

from picker_tools.top.admin import Admin, AdminFault
from picker_tools.top.feed import Page

_EVERY_S = 2.0
_LEAVE_S = 0.2  # the thread is a daemon: one that hangs in a connection ends with the process


class Pages:
    """`with Pages(admin) as pages`: reads while inside, and only while a page is wanted."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self._changed = threading.Condition()
        self._wanted: tuple[str, int] | None = None
        self._stale = False
        self._leaving = False
        self._page: Page | None = None
        self._thread = threading.Thread(target=self._read, name="pages", daemon=True)

    def __enter__(self) -> "Pages":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._leaving = True
            self._changed.notify_all()
        self._thread.join(_LEAVE_S)

    def look(self, cursor: str, limit: int) -> Page | None:
        """The page of `limit` requests behind `cursor`, kept up to date from now on; None until then."""
        with self._changed:
            if self._wanted != (cursor, limit):
                self._wanted = (cursor, limit)
                self._again()
            return self._page if self._page is not None and self._page.cursor == cursor else None

    def away(self) -> None:
        """No page is looked at."""
        with self._changed:
            self._wanted = self._page = None

    def again(self) -> None:
        """Something was changed: what is known of the queue is of before."""
        with self._changed:
            self._again()

    def _again(self) -> None:
        self._stale = True
        self._changed.notify_all()

    def _read(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._leaving or self._stale, _EVERY_S)
                if self._leaving:
                    return
                self._stale, wanted = False, self._wanted
            if wanted is None:
                continue
            page = read(self._admin, *wanted)
            with self._changed:
                if self._wanted == wanted:
                    self._page = page


def read(admin: Admin, cursor: str, limit: int) -> Page:
    """One page, now; with a fault if the API gives none."""
    try:
        said = admin.queue(limit, cursor)
    except AdminFault as fault:
        return Page(cursor, fault=str(fault))
    return Page(cursor, tuple(said["requests"]), said.get("total"), said.get("cursor"))
