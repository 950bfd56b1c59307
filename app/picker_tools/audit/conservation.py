"""G6: every request begins once and ends once, and the counts are what the entries add up to."""

from picker_tools.audit.entry import ENDS, Entry
from picker_tools.audit.finding import Finding
from picker_tools.audit.life import FROM, RUNNING, Place, Step
from picker_tools.audit.replay import Replay, same


class Conservation:
    """Checked at every entry. Stock and queue length follow from the one before; what is wrong is told once,
    and the log's own number is gone on with.
    """

    TITLE = "each request begins and ends once, counts add up"

    def __init__(self, finding: Finding, replay: Replay) -> None:
        self._finding = finding
        self._replay = replay
        self._left_over = 0.0

    def see(self, step: Step) -> None:
        self._finding.checked += 1
        if step.entry.request:
            self._judge_event(step)
        self._judge_counts(step)
        self._judge_rest(step)

    def close(self) -> None:
        """What is open at the end of a log may still run."""

    def _judge_event(self, step: Step) -> None:
        entry = step.entry
        life = self._replay.lives.get(entry.request)
        if life is None:
            # An end of nobody may be that of a request from before the log, for as long as there is one.
            known = self._replay.complete or not self._replay.has_strangers
            may_be_held = not self._replay.complete and Place.HELD in FROM[entry.event]
            if Place.NOWHERE in FROM[entry.event] or not known or may_be_held:
                return
            what = "ends without having begun, or twice" if entry.event in ENDS else "has not begun"
            self._finding.blame(f"request {entry.request} {what}: {entry.event}", entry)
        elif life.place not in FROM[entry.event]:
            what = (
                "begins twice"
                if FROM[entry.event] == {Place.NOWHERE}
                else f"{entry.event} while {life.place.value}"
            )
            self._finding.blame(f"request {entry.request} {what}", life.begun, entry)
        elif step.gives_back and life.endpoint and entry.endpoint != life.endpoint:
            what = f"was counted on {life.endpoint} and is given back to {entry.endpoint!r}"
            self._finding.blame(f"request {entry.request} {what}", life.granted or life.begun, entry)

    def _judge_counts(self, step: Step) -> None:
        entry, replay = step.entry, self._replay
        stock, queued = replay.stock_after(step), replay.queued_after(step)
        if stock is not None and not same(stock, entry.stock):
            self._finding.blame(
                f"stock is {entry.stock:.17g} where {stock:.17g} follows", *self._around(entry)
            )
        if queued is not None and queued != entry.queued:
            self._finding.blame(f"{entry.queued} are queued where {queued} follow", *self._around(entry))

    def _judge_rest(self, step: Step) -> None:
        """Nobody runs exactly when the stock is 0, and nobody waits when the queue is empty."""
        entry, replay = step.entry, self._replay
        if replay.has_strangers:
            return
        running = replay.running + step.takes - step.gives_back
        waiting = replay.waiting + step.enters_queue - step.leaves_queue
        if running == 0:
            if entry.stock not in (0, self._left_over):
                what = f"nothing runs, and the stock is {entry.stock:.17g}"
                self._finding.blame(what, *self._around(entry))
            self._left_over = entry.stock
        elif entry.stock == 0:
            self._find_lost(entry, RUNNING)
        if entry.queued == 0 and waiting > 0:
            self._find_lost(entry, frozenset({Place.QUEUED}))

    def _find_lost(self, entry: Entry, places: frozenset[Place]) -> None:
        for request, life in list(self._replay.lives.items()):
            costs_nothing = life.place in RUNNING and not life.taken
            if request != entry.request and life.place in places and not costs_nothing:
                what = f"was {life.place.value} and is lost: its count is 0, and it has not ended"
                self._finding.blame(f"request {request} {what}", life.granted or life.begun, entry)
                self._replay.lose(request)

    def _around(self, entry: Entry) -> list[Entry]:
        return [self._replay.last, entry] if self._replay.last else [entry]
