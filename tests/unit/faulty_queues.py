"""Queues that each break one rule and log as if they had not. For the tests of the auditor and of load
reports.
"""

from queue_simulator import FlowQueue, QueueSimulator, Request


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
        for flow_queue in self.flow_queues.values():
            if before < self.lower <= self.stock and flow_queue.waiting and self.stock + 0.25 <= self.upper:
                self.grant(self.head(flow_queue), flow_queue, "turn")
                return


class TakesWhilePaused(QueueSimulator):
    """The simulator ignores the setting `paused`."""


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
    def flow_in_turn(self, band: int) -> str:
        able = [
            (flow_queue.tag, f)
            for (b, f), flow_queue in self.flow_queues.items()
            if b == band and flow_queue.waiting
        ]
        return max(able)[1]


class NeverServesFlowB(QueueSimulator):
    def flow_in_turn(self, band: int) -> str:
        able = [
            (flow_queue.tag, f)
            for (b, f), flow_queue in self.flow_queues.items()
            if b == band and flow_queue.waiting
        ]
        return min(able, key=lambda each: (each[1] == "b", each))[1]


class AdvancesTagsByHalf(QueueSimulator):
    def next_tag(self, tag: float, share: float) -> float:
        return tag + share / 2


class IgnoresWeights(QueueSimulator):
    def share(self, r: Request) -> float:
        return r.cost


class LeavesVirtualTimeBehind(QueueSimulator):
    def grant(self, r: Request, flow_queue: FlowQueue, by: str) -> None:
        v = list(self.v)
        super().grant(r, flow_queue, by)
        self.log[-1]["v"] = f"{v[r.band]:.17g}"
        self.v = v


class ServesLowBandsFirst(QueueSimulator):
    def band_in_turn(self) -> int | None:
        return max((b for (b, _), flow_queue in self.flow_queues.items() if flow_queue.waiting), default=None)


class GuardsWithoutCredit(QueueSimulator):
    def guard_may(self) -> bool:
        return True


class NeverGuards(QueueSimulator):
    def guard_may(self) -> bool:
        return False


class LosesGuardCredit(QueueSimulator):
    """The guard loses what is left of its credit, so it gets less than its share of 0.4."""

    def __init__(self) -> None:
        super().__init__(guard_share=0.4)

    def most_credit(self) -> float:
        return 1.0


class GuardsTheShortestOverdue(QueueSimulator):
    def guards_choice(self) -> Request:
        return self.overdue()[-1]


class GuardsTheNewest(QueueSimulator):
    def overdue(self) -> list[Request]:
        return [r for flow_queue in self.flow_queues.values() for r in flow_queue.waiting.values()][-1:]


class ServesTheNewest(QueueSimulator):
    def head(self, flow_queue: FlowQueue) -> Request:
        return max(flow_queue.waiting.values(), key=lambda r: r.arrived)


class BypassesTheQueue(QueueSimulator):
    @property
    def queued(self) -> int:
        return 0

    def write(self, *fields: object, **more: object) -> None:
        super().write(*fields, **more)  # type: ignore[arg-type]
        self.log[-1]["queued"] = str(sum(len(flow_queue.waiting) for flow_queue in self.flow_queues.values()))


class DispatchesPastTheDeadline(QueueSimulator):
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


class KeepsRoundingError(QueueSimulator):
    def give_back(self, r: Request) -> None:
        self.stock = max(1e-13, self.stock - r.taken)


class ReturnsToAnotherEndpoint(QueueSimulator):
    def end(self, r: Request, event: str) -> None:
        r.endpoint = r.endpoint and self.endpoints[-1]
        super().end(r, event)
