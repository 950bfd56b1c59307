"""What keys do: a place on the screen and, once confirmed, a change."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from app.top import keys
from app.top.admin import AdminFault, part
from app.top.frame import Place
from app.top.keys import Key
from app.top.tables import VIEWS
from app.top.words import plain


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
        self.place = Place()
        self.leaving = False

    def press(self, key: Key, shot: Mapping[str, Any] | None) -> None:
        """`shot` is what the operator saw when pressing it."""
        if self._waiting is not None:
            self._answer(key)
        elif key == "q":
            self.leaving = True
        elif key in (keys.TAB, keys.BACK_TAB):
            step = 1 if key == keys.TAB else -1
            self.place = Place((self.place.view + step) % len(VIEWS))
        elif key in "1234" and len(key) == 1:
            self.place = Place(int(key) - 1)
        elif shot is None:
            self.place = replace(self.place, said="")
        elif key in (keys.UP, keys.DOWN):
            last = max(0, len(VIEWS[self.place.view].things(shot)) - 1)
            row = min(self.place.row, last) + (1 if key == keys.DOWN else -1)
            self.place = replace(self.place, row=max(0, min(last, row)), said="")
        elif key == "p":
            self._pause(shot["state"])
        elif key == "d" and VIEWS[self.place.view].name == "endpoints" and shot["endpoints"]:
            self._drain(shot["endpoints"][min(self.place.row, len(shot["endpoints"]) - 1)])
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
