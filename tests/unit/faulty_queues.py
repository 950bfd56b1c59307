"""Simulated queues that each break one rule but write a decision log as if every rule were kept."""

from queue_simulator import QueueSimulator, Request

from picker_fleet.admission.fair_queue import BandQueue, FairQueue
from picker_fleet.admission.tenant_tree import Order

Turn = tuple[Request, bool] | None


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
        turn = self.next_turn()
        if turn is not None and before < self.lower <= self.stock and self.stock + 0.25 <= self.upper:
            self.grant(*turn)


class TakesWhilePaused(QueueSimulator):
    """A queue that dispatches requests even while the setting `paused` is on."""


class ForgetsFlowLimits(QueueSimulator):
    def flow_full(self, r: Request) -> bool:
        return False

    def endpoint_full(self, r: Request, endpoint: str) -> bool:
        return False


class ForgetsEndpointLimits(QueueSimulator):
    def place(self, r: Request) -> bool:
        r.endpoint, r.state = self.endpoints[0], "placed"
        return True


class ChoosesByKey(QueueSimulator):
    """A queue that serves the flow with the least `key` first and has no starvation guard."""

    def key(self, name: str, tag: float) -> tuple[float, ...]:
        raise NotImplementedError

    def next_turn(self) -> Turn:
        for band in self.queue.bands.values():
            if band.turns:
                name = min(band.turns, key=lambda name, band=band: self.key(name, band.turns.score(name)))
                return next(iter(band.queues[name].requests)), False
        return None


class ServesTheGreatestTag(ChoosesByKey):
    def key(self, name: str, tag: float) -> tuple[float, ...]:
        return (-tag,)


class NeverServesFlowB(ChoosesByKey):
    def key(self, name: str, tag: float) -> tuple[float, ...]:
        return (name == "b", tag)


class AdvancesTagsByHalf(QueueSimulator):
    class fair_queue(FairQueue[Request]):
        def charge(self, order: Order, child: str, share: float) -> None:
            super().charge(order, child, share / 2)


class IgnoresWeights(QueueSimulator):
    class fair_queue(FairQueue[Request]):
        def share(self, r: Request) -> float:
            return r.cost


class LetsNewFlowsGoFirst(QueueSimulator):
    class fair_queue(FairQueue[Request]):
        def insert(self, r: Request) -> None:
            band, new = self.bands[r.priority], self.length(r) == 0
            super().insert(r)
            if new:
                band.set_tag(r.flow_queue, max(band.v, band.finish.get(r.flow_queue, 0.0)))


class LeavesVirtualTimeBehind(QueueSimulator):
    def grant(self, r: Request, by_guard: bool) -> None:
        band = self.queue.bands[r.priority]
        v = band.v
        super().grant(r, by_guard)
        band.v = v
        self.log[-1]["v"] = f"{v:.17g}"


class ServesLowBandsFirst(QueueSimulator):
    class fair_queue(FairQueue[Request]):
        def bands_in_order(self) -> list[BandQueue[Request]]:
            return list(self.bands.values())[::-1]


class GuardsWithoutCredit(QueueSimulator):
    def next_turn(self) -> Turn:
        self.queue.credit = 1.0
        return super().next_turn()


class NeverGuards(QueueSimulator):
    def next_turn(self) -> Turn:
        self.queue.credit = 0.0
        return super().next_turn()


class LosesGuardCredit(QueueSimulator):
    """A queue that cuts the starvation guard's credit to 1 after each grant, so the guard is served too
    little."""

    def __init__(self) -> None:
        super().__init__(guard_share=0.4)

    def grant(self, r: Request, by_guard: bool) -> None:
        super().grant(r, by_guard)
        self.queue.credit = min(self.queue.credit, 1.0)


class GuardsTheShortestOverdue(QueueSimulator):
    def next_turn(self) -> Turn:
        turn = super().next_turn()
        return (self.queue.overdue.last(), True) if turn is not None and turn[1] else turn


class GuardsTheNewest(QueueSimulator):
    def next_turn(self) -> Turn:
        waiting = list(self.queue.requests())
        return (waiting[-1], True) if waiting and self.queue.credit >= 1 else super().next_turn()


class ServesTheNewest(QueueSimulator):
    def next_turn(self) -> Turn:
        turn = super().next_turn()
        if turn is None or turn[1]:
            return turn
        return self.queue.bands[turn[0].priority].queues[turn[0].flow_queue].newest(), False


class BypassesTheQueue(QueueSimulator):
    @property
    def queued(self) -> int:
        return 0

    def write(self, *fields: object, **more: object) -> None:
        super().write(*fields, **more)  # type: ignore[arg-type]
        self.log[-1]["queued"] = str(len(self.queue))


class DispatchesPastTheDeadline(QueueSimulator):
    def is_late(self, r: Request) -> bool:
        return False


class EndsTwice(QueueSimulator):
    def end(self, r: Request, event: str) -> None:
        super().end(r, event)
        self.write(event, r)


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
