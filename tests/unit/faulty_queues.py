"""Queues that break one rule each, and write their log as if they had not."""

from queue_simulator import Lane, QueueSimulator
from raw_entries import Request


class OverAdmits(QueueSimulator):
    def has_room(self, r: Request) -> bool:
        return True


class FillsPastTheLowerBound(QueueSimulator):
    @property
    def lower(self) -> float:
        return float("3.5")

    def dispatch(self) -> None:
        self.settings["lower_per"], before = 2, self.stock
        super().dispatch()
        for lane in self.lanes.values():
            if before < self.lower <= self.stock and lane.waiting and self.stock + 0.25 <= self.upper:
                self.grant(self.head(lane), lane, "turn")
                return


class TakesWhilePaused(QueueSimulator):
    """It does not look at the setting at all."""


class ForgetsFlowLimits(QueueSimulator):
    def flow_full(self, r: Request) -> bool:
        return False

    def endpoint_full(self, r: Request, endpoint: str) -> bool:
        return False


class ForgetsEndpointLimits(QueueSimulator):
    def place(self, r: Request) -> bool:
        r.endpoint, r.state = self.endpoints[0], "placed"
        return True


class ServesTheGreatestTag(QueueSimulator):
    def lane_in_turn(self, band: int) -> str:
        able = [(lane.tag, f) for (b, f), lane in self.lanes.items() if b == band and lane.waiting]
        return max(able)[1]


class NeverServesFlowB(QueueSimulator):
    def lane_in_turn(self, band: int) -> str:
        able = [(lane.tag, f) for (b, f), lane in self.lanes.items() if b == band and lane.waiting]
        return min(able, key=lambda each: (each[1] == "b", each))[1]


class AdvancesTagsByHalf(QueueSimulator):
    def next_tag(self, tag: float, share: float) -> float:
        return tag + share / 2


class IgnoresWeights(QueueSimulator):
    def share(self, r: Request) -> float:
        return r.cost


class LeavesVirtualTimeBehind(QueueSimulator):
    def grant(self, r: Request, lane: Lane, by: str) -> None:
        v = list(self.v)
        super().grant(r, lane, by)
        self.log[-1]["v"] = f"{v[r.band]:.17g}"
        self.v = v


class ServesLowBandsFirst(QueueSimulator):
    def band_in_turn(self) -> int | None:
        return max((b for (b, _), lane in self.lanes.items() if lane.waiting), default=None)


class GuardsWithoutCredit(QueueSimulator):
    def guard_may(self) -> bool:
        return True


class NeverGuards(QueueSimulator):
    def guard_may(self) -> bool:
        return False


class CutsTheCredit(QueueSimulator):
    """With a share whose inverse is no whole number, the guard gets less than it."""

    def __init__(self) -> None:
        super().__init__(guard_share=0.4)

    def most_credit(self) -> float:
        return 1.0


class GuardsTheWrongOne(QueueSimulator):
    def guards_choice(self) -> Request:
        return self.overdue()[-1]


class GuardsTheNewest(QueueSimulator):
    def overdue(self) -> list[Request]:
        return [r for lane in self.lanes.values() for r in lane.waiting.values()][-1:]


class ServesTheNewest(QueueSimulator):
    def head(self, lane: Lane) -> Request:
        return max(lane.waiting.values(), key=lambda r: r.arrived)


class BypassesTheQueue(QueueSimulator):
    @property
    def queued(self) -> int:
        return 0

    def write(self, *about: object, **more: object) -> None:
        super().write(*about, **more)  # type: ignore[arg-type]
        self.log[-1]["queued"] = str(sum(len(lane.waiting) for lane in self.lanes.values()))


class DispatchesTheLate(QueueSimulator):
    def is_late(self, r: Request) -> bool:
        return False


class EndsTwice(QueueSimulator):
    def end(self, r: Request, event: str) -> None:
        super().end(r, event)
        self.write(event, r)


class LetsNewFlowsGoFirst(QueueSimulator):
    def start(self, r: Request, finish: float) -> float:
        return max(self.v[r.band], finish)


class LosesARunningRequest(QueueSimulator):
    def end(self, r: Request, event: str) -> None:
        if r.id == "r1":
            self.give_back(self.requests.pop(r.id))
        else:
            super().end(r, event)


class ReturnsTooMuch(QueueSimulator):
    def give_back(self, r: Request) -> None:
        self.stock = max(0.0, self.stock - 1.5 * r.taken)


class KeepsALittle(QueueSimulator):
    def give_back(self, r: Request) -> None:
        self.stock = max(1e-13, self.stock - r.taken)


class ReturnsToAnotherEndpoint(QueueSimulator):
    def end(self, r: Request, event: str) -> None:
        r.endpoint = r.endpoint and self.endpoints[-1]
        super().end(r, event)
