"""What keys do: a place on the screen and, once confirmed, a change."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from picker_tools.top import keys
from picker_tools.top.admin import AdminFault, part
from picker_tools.top.feed import News
from picker_tools.top.frame import Place
from picker_tools.top.keys import Key
from picker_tools.top.views import VIEWS
from picker_tools.top.words import plain

_NUMBERS = tuple(str(at + 1) for at in range(len(VIEWS)))
_LEAP = 10  # rows
_STEPS = {keys.UP: -1, keys.DOWN: 1, keys.PAGE_UP: -_LEAP, keys.PAGE_DOWN: _LEAP}


@dataclass(frozen=True, slots=True)
class Change:
    """A POST that waits to be confirmed, and what is said when it is done."""

    path: str
    done: str


class Operator:
    """Follows keys; `change` makes a change (a path below /api/v1) or raises AdminFault."""

    def __init__(self, change: Callable[[str], None]) -> None:
        self._change = change
        self._waiting: Change | None = None
        self._pages = [""]  # the cursors of the queue's pages up to the one that is looked at
        self.place = Place()
        self.leaving = False

    def press(self, key: Key, news: News) -> None:
        """`news` is what the operator saw when pressing it."""
        if self._waiting is not None:
            self._answer(key)
        elif key == "q":
            self.leaving = True
        elif key in (keys.TAB, keys.BACK_TAB):
            step = 1 if key == keys.TAB else -1
            self._go((self.place.view + step) % len(VIEWS))
        elif key in _NUMBERS:
            self._go(_NUMBERS.index(key))
        elif news.shot is None:
            self.place = replace(self.place, said="")
        elif key in _STEPS:
            self._move(_STEPS[key], key, news)
        elif key == "p":
            self._pause(news.shot["state"])
        else:
            self._choose(key, news)

    def _go(self, view: int) -> None:
        self._pages = [""]
        self.place = Place(view)

    def _move(self, step: int, key: Key, news: News) -> None:
        """Up or down by rows; through the queue by its pages."""
        paged = VIEWS[self.place.view].name == "queue" and key in (keys.PAGE_DOWN, keys.PAGE_UP)
        if paged and step > 0 and news.page and news.page.following:
            self._turn([*self._pages, news.page.following])
        elif paged and step < 0 and len(self._pages) > 1:
            self._turn(self._pages[:-1])
        elif not paged:
            last = max(0, len(self.place.things(news)) - 1)
            row = min(self.place.row, last) + step
            self.place = replace(self.place, row=max(0, min(last, row)), said="")

    def _turn(self, pages: list[str]) -> None:
        self._pages = pages
        self.place = replace(self.place, row=0, cursor=pages[-1], said="")

    def _choose(self, key: Key, news: News) -> None:
        """What a view's own keys do with its chosen row."""
        view, things = VIEWS[self.place.view].name, self.place.things(news)
        chosen = things[min(self.place.row, len(things) - 1)] if things else None
        if key == "d" and view == "endpoints" and chosen:
            self._drain(chosen)
        elif key == "e" and view == "queue" and chosen:
            self._evict(chosen)
        elif key == " " and view == "log":
            held = news.decisions if self.place.held is None else None
            self.place = replace(self.place, held=held, said="")
        else:
            self.place = replace(self.place, said="")

    def _pause(self, state: Mapping[str, Any]) -> None:
        if state["paused"]:
            self._ask("Resume dispatch?", Change("resume", "the fleet dispatches again"))
        else:
            self._ask(
                "Pause dispatch for the whole fleet?", Change("pause", "the fleet has stopped dispatching")
            )

    def _drain(self, endpoint: Mapping[str, Any]) -> None:
        address = endpoint["address"]
        path = f"endpoints/{part(address)}"
        if endpoint["status"] == "drained":
            self._ask(
                f"Give {address} requests again?", Change(f"{path}/undrain", f"{address} takes requests")
            )
        else:
            self._ask(
                f"Send nothing new to {address}?", Change(f"{path}/drain", f"{address} gets nothing new")
            )

    def _evict(self, request: Mapping[str, Any]) -> None:
        name = request["id"]
        question = f"Evict {name} of {request['flow']}?"
        self._ask(question, Change(f"requests/{part(name)}/evict", f"{name} has left the queue"))

    def _ask(self, question: str, change: Change) -> None:
        self._waiting = change
        self.place = replace(self.place, question=plain(question), said="")

    def _answer(self, key: Key) -> None:
        change, self._waiting = self._waiting, None
        said = "nothing was changed"
        if key in ("y", "Y") and change is not None:
            try:
                self._change(change.path)
                said = change.done
            except AdminFault as fault:
                said = str(fault)
        self.place = replace(self.place, question="", said=plain(said))
