"""G2: each turn goes to the least start tag, tags move by what was served, and the gap of service is bounded.

The tags are rebuilt by the rules of docs/fairness.md and compared with those of the log; the bound itself is
checked on what was dispatched (audit/service.py).
"""

from picker_tools.audit.entry import GUARD, Entry
from picker_tools.audit.finding import Finding
from picker_tools.audit.lanes import BANDS, Lane
from picker_tools.audit.life import RUNNING, Life, Place, Step
from picker_tools.audit.newcomers import Newcomers
from picker_tools.audit.replay import Replay, same
from picker_tools.audit.rules import Rules
from picker_tools.audit.service import Service
from picker_tools.audit.turns import Turns
from picker_tools.audit.vtime import VirtualTimes


class Fairness:
    """Lanes whose tag is not known (the log was joined on the way, or the order was changed) are taken as the
    log has them when they are next seen. A change of settings begins a new interval for every lane.
    """

    TITLE = "turns by least tag, service within the bound of fair queueing"

    def __init__(self, finding: Finding, replay: Replay) -> None:
        self._finding = finding
        self._replay = replay
        self._rules: Rules | None = None
        self._missed = False  # something happened that could not be judged
        self._new_tag: float | None = None  # of a lane never seen
        self._times: VirtualTimes | None = None
        self._newcomers = Newcomers(None)
        self._turns = Turns(replay.lanes)
        self._served: dict[tuple[int, str], Service] = {}
        self._last: dict[tuple[int, str], Entry] = {}  # what showed a lane's tag last

    def see(self, step: Step) -> None:
        entry, replay = step.entry, self._replay
        if self._times is None:
            self._new_tag = 0.0 if replay.complete else None
            self._times = VirtualTimes(self._finding, replay.lanes, self._new_tag)
            self._newcomers = Newcomers(self._new_tag)
        if entry.event == "tuned":
            return
        if entry.event == "rebased" and entry.tag is not None:
            self._rebase(entry.band, entry.tag, self._times)
        if not replay.settled or replay.rules is None:
            self._missed = True
            self._served.clear()
            self._times.follow(entry)
            return
        if self._missed:
            self._missed = False
            self._forget_tags()
        if replay.rules != self._rules:
            self._rules = replay.rules
            self._begin_anew(entry, replay.rules)
        self._judge(step, self._times.judge(entry), replay.rules)

    def close(self) -> None:
        """Look at every lane that is still backlogged."""
        if self._replay.last is None:
            return
        for band, name in list(self._served):
            self._look(self._replay.lanes.at(band, name), self._replay.last)

    def _judge(self, step: Step, v: float, rules: Rules) -> None:
        entry, life = step.entry, step.life
        if entry.event == "parked":
            lane = self._lane(entry.band, entry.flow)
            self._look(lane, entry)
            self._expect(lane, lane.tag, entry)
            self._end(lane)
        elif entry.event == "unparked":
            lane = self._lane(entry.band, entry.flow)
            self._expect(lane, None if lane.tag is None else max(v, lane.tag), entry)
            self._begin(lane, entry, v)
        elif entry.event == "corrected":
            self._correct(entry, life, v, rules)
        elif life is None:
            return
        elif step.enters_queue:
            self._enter(entry, v, rules)
        elif step.leaves_queue:
            lane = self._lane(entry.band, life.lane)
            if step.now is Place.GRANTED:
                self._serve(lane, entry, v, rules)
            else:
                self._look(lane, entry)
            if lane.waiting == 1:
                self._end(lane)

    def _serve(self, lane: Lane, entry: Entry, v: float, rules: Rules) -> None:
        share = rules.share(entry)
        lane.largest = max(lane.largest, share)
        if entry.note and not same(_number(entry.note), share):
            self._finding.blame(
                f"lane {lane.name!r} charged {entry.note} where its share is {share:g}", entry
            )
        if lane.parked:
            self._finding.blame(f"parked lane {lane.name!r} served", *self._evidence(lane, entry))
        if entry.tag is None:
            self._finding.blame("a grant that shows no tag", entry)
            return
        self._look(lane, entry, v)
        self._expect(lane, lane.tag, entry)
        first = None if entry.by == GUARD else self._turns.ahead_of(lane, entry.tag)
        if first is not None:
            what = (
                f"lane {lane.name!r} served at tag {entry.tag:g} while {first.name!r} waits at {first.tag:g}"
            )
            self._finding.blame(what, *self._evidence(first, entry))
        self._set_tag(lane, entry.tag + share, entry)
        service = self._served.get((lane.band, lane.name))
        if service is None:
            self._begin(lane, entry, entry.v)
        else:
            self._tell(lane, service.serve(share, entry.tag + share, entry.v, lane.largest), entry)

    def _enter(self, entry: Entry, v: float, rules: Rules) -> None:
        lane, share = self._lane(entry.band, rules.lane(entry.flow)), rules.share(entry)
        lane.largest = max(lane.largest, share)
        start = lane.tag
        if not lane.waiting and lane.tag is not None and lane.tag <= v:
            uncharged = share if entry.event == "requeued" else 0.0
            shown = None if entry.tag is None else entry.tag + uncharged
            start = self._newcomers.start(lane.band, v, share, shown)
        if entry.event == "requeued":  # back in its place, uncharged
            self._adjust(lane, None if start is None else start - share, -share, entry, v)
            if not lane.waiting:
                self._begin(lane, entry, v)
        elif not lane.waiting:
            if entry.tag is None:
                self._finding.blame(f"lane {lane.name!r} becomes backlogged and shows no tag", entry)
            self._expect(lane, start, entry)
            self._begin(lane, entry, v)
        elif entry.tag is not None:
            what = f"lane {lane.name!r} starts anew though {lane.waiting} wait in it"
            self._finding.blame(what, *self._evidence(lane, entry))

    def _correct(self, entry: Entry, life: Life | None, v: float, rules: Rules) -> None:
        lane, change = self._lane(entry.band, rules.lane(entry.flow)), _number(entry.note)
        after = None if lane.tag is None else lane.tag + change
        if not lane.waiting and lane.tag is not None and lane.tag <= v:
            # Its finish tag may have been forgotten; then it is the request's own charge that is corrected.
            charged = life.granted.tag if life and life.granted else None
            own = None if charged is None else min(charged + rules.share(entry), v) + change
            if entry.tag is not None and (own is None or same(entry.tag, own)):
                after = own
        self._adjust(lane, after, change, entry, v)

    def _adjust(self, lane: Lane, after: float | None, change: float, entry: Entry, v: float) -> None:
        """The lane's charge changes by `change`, and its tag becomes `after` (None: unknown)."""
        self._look(lane, entry, v)
        self._expect(lane, after, entry)
        service = self._served.get((lane.band, lane.name))
        if service is not None and lane.tag is not None:
            self._tell(lane, service.correct(change, lane.tag, v, lane.largest), entry)

    def _expect(self, lane: Lane, tag: float | None, entry: Entry) -> None:
        """The entry must show `tag` (None: unknown); what it shows is gone on with."""
        self._finding.checked += 1
        if entry.tag is None:
            return
        if tag is not None and not same(tag, entry.tag):
            what = f"tag of lane {lane.name!r} is {entry.tag:.12g} where {tag:.12g} follows"
            self._finding.blame(what, *self._evidence(lane, entry))
            self._served.pop((lane.band, lane.name), None)
        self._set_tag(lane, entry.tag, entry)

    def _set_tag(self, lane: Lane, tag: float, entry: Entry) -> None:
        lane.tag = tag
        self._last[lane.band, lane.name] = entry
        self._turns.file(lane)

    def _begin(self, lane: Lane, entry: Entry, v: float) -> None:
        if lane.tag is not None:
            self._served[lane.band, lane.name] = Service.begin(entry, lane.tag, v, lane.largest)

    def _look(self, lane: Lane, entry: Entry, v: float | None = None) -> None:
        """Judge the lane's service until just before `entry`."""
        service = self._served.get((lane.band, lane.name))
        if v is None and self._times is not None:
            v = self._times.of(lane.band)
        if service is not None and lane.tag is not None and v is not None:
            self._tell(lane, service.before(lane.tag, v, lane.largest), entry)

    def _tell(self, lane: Lane, wrong: str, entry: Entry) -> None:
        service = self._served.get((lane.band, lane.name))
        if wrong and service is not None:
            what = f"service of lane {lane.name!r}, backlogged throughout, is {wrong}"
            self._finding.blame(what, service.since, entry)
            del self._served[lane.band, lane.name]

    def _end(self, lane: Lane) -> None:
        """The lane is backlogged no more."""
        self._served.pop((lane.band, lane.name), None)
        lives, lanes = self._replay.lives, self._replay.lanes
        if len(lanes) <= 2 * len(lives) + 1000:
            return
        charged = {(life.begun.band, life.lane) for life in lives.values() if life.place in RUNNING}
        for each in [each for band in BANDS for each in lanes.of(band)]:
            v = self._times.of(each.band) if self._times else None
            # Such a finish tag says nothing any more, as in the scripts.
            known = each.tag is not None and v is not None and each.tag <= v
            if each is not lane and not each.waiting and known and (each.band, each.name) not in charged:
                lanes.drop(each)
                self._last.pop((each.band, each.name), None)

    def _evidence(self, lane: Lane, entry: Entry) -> list[Entry]:
        last = self._last.get((lane.band, lane.name))
        return [last, entry] if last else [entry]

    def _lane(self, band: int, name: str) -> Lane:
        lane = self._replay.lanes.find(band, name)
        if lane is None:
            lane = self._replay.lanes.at(band, name)
            lane.tag = self._new_tag
        return lane

    def _begin_anew(self, entry: Entry, rules: Rules) -> None:
        """New settings: what was served under the former ones says nothing about shares under these."""
        self._served.clear()
        lanes = self._replay.lanes
        for lane in [lane for band in BANDS for lane in lanes.of(band)]:
            lane.largest = 0.0
        for life in self._replay.lives.values():
            if life.place is Place.QUEUED:
                lane = lanes.at(life.begun.band, life.lane)
                lane.largest = max(lane.largest, rules.share(life.begun))
        for lane in [lane for band in BANDS for lane in lanes.of(band) if lane.is_servable]:
            v = self._times.of(lane.band) if self._times else None
            if v is not None:
                self._begin(lane, entry, v)

    def _rebase(self, band: int, by: float, times: VirtualTimes) -> None:
        """All tags of `band` are less by `by`; who is ahead of whom, and by how much, is as before."""
        times.rebase(band, by)
        self._newcomers.rebase(band, by)
        for lane in self._replay.lanes.of(band):
            if lane.tag is not None:
                lane.tag -= by
        self._turns.refile(band)
        for (number, _), service in self._served.items():
            if number == band:
                service.rebase(by)

    def _forget_tags(self) -> None:
        self._new_tag = None
        self._newcomers = Newcomers(None)
        if self._times is not None:
            self._times.forget_lanes()
        for lane in [lane for band in BANDS for lane in self._replay.lanes.of(band)]:
            lane.tag = None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")
