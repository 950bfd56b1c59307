"""The model of lua/lib/outliers.lua: which endpoints are ejected, full or on trial."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from model_state import Moment

MOST_FAILURES, MOST_ALONE = 8, 5
TRIAL_MS, FULL_MS, UNSEEN_MS, KEPT_MS = 15_000, 1_000, 10_000, 60_000


@dataclass
class Entry:
    """The outlier record of one endpoint. `by`: request id and flow of each failure since the endpoint's last
    answer; the flow is '' if the request failed on another endpoint, too."""

    at_ms: int
    by: list[list[str]] = field(default_factory=list)
    times: int = 0
    until_ms: int = 0
    seen_ms: int = 0
    returned_ms: int = 0
    trial: bool = False
    cap: int | None = None
    cap_until_ms: int = 0
    fulls: int = 0  # number of times that the endpoint was full since its last answer
    elsewhere: bool = False  # another endpoint has since answered a flow that failed on this endpoint

    def flows(self) -> list[str]:
        return [flow for _, flow in self.by if flow]

    def forget_one(self) -> None:
        """Forget the oldest failure that has no flow or the newest failure's flow, else the oldest of all."""
        *former, (_, newest) = self.by
        alike = [at for at, (_, flow) in enumerate(former) if flow in ("", newest)]
        del self.by[alike[0] if alike else 0]


class Outliers(dict[str, Entry]):
    """The outlier records by endpoint."""

    def __init__(self, moment: Moment) -> None:
        super().__init__()
        self._moment = moment

    def lower(self, limits: Mapping[str, int]) -> dict[str, int]:
        """The `limits` by endpoint, lowered where an endpoint is full or on trial."""
        caps = dict(limits)
        for address, entry in self.items():
            over = entry.cap_until_ms <= self._moment.now_ms
            if entry.cap is not None and (not over or entry.fulls):
                cap = entry.cap + over  # once its hold is over, a full endpoint may get one trial request
                caps[address] = min(cap, caps.get(address, cap))
        return caps

    def of(self, address: str) -> Entry:
        return self.setdefault(address, Entry(self._moment.now_ms))

    def told(self, request_id: str) -> tuple[str, list[str]] | None:
        """The endpoint and the outlier record of an earlier failure of this request, or None."""
        for address, entry in self.items():
            for each in entry.by:
                if each[0] == request_id:
                    return address, each
        return None

    def may_eject(self, ready: int, ejected: int) -> bool:
        return ready >= 2 and ejected < (ready + ejected) * self._moment.settings["eject_percent"] // 100

    def eject(self, entry: Entry) -> None:
        now_ms, most_ms = self._moment.now_ms, self._moment.settings["eject_most_ms"]
        goes_on = entry.trial or now_ms - entry.returned_ms < most_ms
        entry.times = entry.times + 1 if goes_on else 1
        entry.until_ms = now_ms + min(self._moment.settings["eject_ms"] * 2 ** (entry.times - 1), most_ms)
        entry.seen_ms, entry.trial, entry.cap, entry.fulls = 0, False, None, 0

    def limit(self, entry: Entry, cap: int, ms: int) -> None:
        entry.cap, entry.cap_until_ms = cap, self._moment.now_ms + ms

    def is_limited(self, entry: Entry) -> bool:
        return entry.cap is not None and entry.cap_until_ms > self._moment.now_ms

    def full(self, entry: Entry, cap: int, hold_ms: int) -> None:
        now_ms = self._moment.now_ms
        is_new = not (entry.fulls and self.is_limited(entry))
        entry.fulls += is_new
        most_ms = max(self._moment.settings["eject_most_ms"], hold_ms)
        longer_ms = min(hold_ms * 2 ** (entry.fulls - 1), most_ms)
        until_ms = now_ms + longer_ms if is_new else max(entry.cap_until_ms, now_ms + hold_ms)
        entry.at_ms, entry.cap, entry.cap_until_ms = now_ms, cap, until_ms

    def answered_elsewhere(self, address: str, flow: str) -> None:
        for other, entry in self.items():
            if other != address and flow in entry.flows():
                entry.elsewhere = True

    def answered(self, address: str) -> None:
        entry = self[address]
        if entry.trial:
            entry.trial, entry.cap, entry.returned_ms = False, None, self._moment.now_ms
        if entry.cap is not None and entry.cap_until_ms <= self._moment.now_ms:
            entry.cap = None
        entry.by, entry.elsewhere, entry.fulls = [], False, 0
        if entry.times == 0 and entry.cap is None:
            del self[address]

    def expire(self, address: str) -> None:
        """In a sweep, end an expired limit or trial of an endpoint that is not ejected; drop old records."""
        entry = self[address]
        over = entry.cap is None or entry.cap_until_ms <= self._moment.now_ms
        if entry.cap is not None and over and not entry.fulls:
            if entry.trial:
                entry.trial, entry.returned_ms = False, self._moment.now_ms
            entry.cap = None
        last_ms = max(entry.at_ms, entry.until_ms, entry.returned_ms)
        if over and self._moment.now_ms - last_ms > KEPT_MS:
            del self[address]
