"""The compared policies, which use the product's queue (`LocalQueue`, `FairQueue`) and scheduler.

The caller passes the time to each policy. The network is not simulated: a decision takes no time, but a
policy learns of a freed slot only `RELEASE_S` after the answer's end.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from bench.rig.simulated import Server
from picker_fleet.admission.local_queue import LocalQueue, Waiting, rules_of
from picker_fleet.domain.bands import Band
from picker_fleet.domain.config import EffectiveConfig, parse
from picker_fleet.domain.errors import RequestError
from picker_fleet.domain.request import InferenceRequest, Workload
from picker_fleet.scheduling.scheduler import Scheduler, with_in_flight
from picker_fleet.scheduling.scorers import EndpointState, PickRequest
from picker_tools.simulator.engine import Sequence as Generation

RELEASE_S = 0.01
_SCRAPE_S = 0.1
_SCORERS = {"queue-depth": 2.0, "kv-cache": 2.0}  # the scorers' weights in deploy/picker.yaml
CRITICALITY = {"chat": 3, "urgent": 5, "nightly": 1}


@dataclass(slots=True, eq=False)
class Job:
    """One request; `tokens` has the lengths of its prompt and answer in tokens."""

    number: int
    tenant: str
    kind: str
    tokens: Generation
    arrived_s: float
    server: int = -1
    first_s: float = 0.0
    ended_s: float = 0.0
    refused: bool = False
    left: bool = False  # the client has left


@dataclass(slots=True)
class Pool:
    """A picker's knowledge of the servers: its count of requests in flight, and scraped metrics.

    `grown` is called for each token that a server generates for a placed request.
    """

    servers: Sequence[Server]
    random: Callable[[], float]
    grown: Callable[[Job], None]
    in_flight: list[int] = field(default_factory=list)
    _seen: list[tuple[float, float, float]] = field(default_factory=list)
    _seen_s: float = -1.0
    _scheduler: Scheduler = field(default_factory=lambda: Scheduler(with_in_flight(_SCORERS)))

    def __post_init__(self) -> None:
        self.in_flight = [0] * len(self.servers)

    def place(self, job: Job, server: int) -> None:
        job.server = server
        self.in_flight[server] += 1
        self.servers[server].submit(job.tokens, lambda _: self.grown(job))

    def least_request(self) -> int:
        """The less loaded of two random servers, as Envoy's LEAST_REQUEST chooses by default."""
        count = len(self.servers)
        first, second = int(self.random() * count), int(self.random() * count)
        return first if self.in_flight[first] <= self.in_flight[second] else second

    def best(self, now_s: float) -> int:
        """The server that the scheduler chooses, from metrics that are at most `_SCRAPE_S` old."""
        if now_s - self._seen_s >= _SCRAPE_S or not self._seen:
            loads = [server.engine.load() for server in self.servers]
            self._seen = [(each.waiting, each.running, each.kv_usage) for each in loads]
            self._seen_s = now_s
        states = [
            EndpointState(str(at), waiting=seen[0], running=seen[1], kv_utilisation=seen[2], in_flight=load)
            for at, (seen, load) in enumerate(zip(self._seen, self.in_flight, strict=True))
        ]
        pick = PickRequest(random=self.random)
        return int(self._scheduler.rank(pick, states, limit=1).best[0].address)


class Direct:
    """A policy without a queue: places each request at once, by least request or, if `scored`, by score."""

    def __init__(self, pool: Pool, *, scored: bool) -> None:
        self._pool, self._scored = pool, scored

    def arrive(self, job: Job, now_s: float) -> None:
        self._pool.place(job, self._pool.best(now_s) if self._scored else self._pool.least_request())

    def release(self, job: Job, now_s: float) -> None:
        self._pool.in_flight[job.server] -= 1

    def leave(self, job: Job) -> None:
        pass


class Queued:
    """A policy with `queues` queues, which split bound and capacities evenly; one queue models the fleet.

    With several queues the tenants' requests are skewed: the first queue gets none of tenant `bulk`, the last
    none of `chat`.
    """

    def __init__(
        self,
        pool: Pool,
        bound: float,
        *,
        fairness: str = "weighted-fair",
        ordering: str = "fcfs",
        queues: int = 1,
    ) -> None:
        tree: Mapping[str, object] = {
            "discovery": {"static": [{"address": "10.0.0.1:8000"}]},
            "fair_request_queue": {"fairness": fairness, "ordering": ordering},
            "workloads": {"wait_cap": 30.0},
        }
        settings = parse(tree)
        rules = rules_of(EffectiveConfig(settings, {}), queues)
        self._ttl_s = settings.fair_request_queue.queue_ttl
        self._pool = pool
        self._queues = [LocalQueue(rules) for _ in range(queues)]
        self._room = [bound * len(pool.servers) / queues] * queues
        self._waiting: dict[int, tuple[int, Waiting]] = {}
        self._jobs: dict[str, Job] = {}
        self._at: dict[int, int] = {}

    def arrive(self, job: Job, now_s: float) -> None:
        at = self._ingress(job)
        workload = Workload("", CRITICALITY[job.kind])
        request = InferenceRequest(
            str(job.number), "m", "m", True, job.tenant, Band.DEFAULT, 1.0, workload, 1.0, self._ttl_s, None
        )
        try:
            waiting, _ = self._queues[at].offer(request, 1.0, now_s)
        except RequestError:
            job.refused = True
            return
        self._jobs[request.id], self._waiting[job.number] = job, (at, waiting)
        self._serve(at, now_s)

    def release(self, job: Job, now_s: float) -> None:
        self._pool.in_flight[job.server] -= 1
        at = self._at.pop(job.number)
        self._room[at] += 1
        self._serve(at, now_s)

    def leave(self, job: Job) -> None:
        """Remove `job` from its queue if it still waits, because its client left or its TTL is over."""
        if (found := self._waiting.pop(job.number, None)) is not None:
            self._queues[found[0]].remove(found[1])
            job.refused = True

    def _serve(self, at: int, now_s: float) -> None:
        queue = self._queues[at]
        while self._room[at] >= 1 and (turn := queue.turn(now_s)) is not None:
            waiting, by_guard = turn
            job = self._jobs.pop(waiting.id)
            self._waiting.pop(job.number)
            queue.serve(waiting, by_guard)
            self._room[at] -= 1
            self._at[job.number] = at
            self._pool.place(job, self._pool.best(now_s))

    def _ingress(self, job: Job) -> int:
        count = len(self._queues)
        if count == 1:
            return 0
        return job.number % (count - 1) + (job.tenant == "bulk")


Policy = Direct | Queued
