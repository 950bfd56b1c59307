"""The limit of an endpoint settles where the engine's batch is full and nothing waits behind the batch."""

import math
from dataclasses import dataclass, field

import pytest

from picker_fleet.fleet.limit_controller import LimitController, Misses, Observation, Page

A, B = "10.0.0.1:8000", "10.0.0.2:8000"


@dataclass
class Engine:
    """An engine that runs up to `slots` requests, if these fit into `kv_tokens` at `tokens` each."""

    slots: int
    kv_tokens: float = 1e9
    tokens: float = 100.0
    preemptions: float = 0.0
    sequences: int = 1  # number of sequences of a request
    has_page: bool = True
    passed_on: int = 10**9  # most requests that the API server passes on
    on_way: int = 0  # requests between the fleet and the engine
    started_s: float = 0.0

    def running(self, in_flight: int) -> int:
        return min(in_flight * self.sequences, self.slots, self.passed_on, int(self.kv_tokens / self.tokens))

    def page(self, in_flight: int, read_s: float) -> Page | None:
        if not self.has_page:
            return None
        in_flight = max(in_flight - self.on_way, 0)
        running = self.running(in_flight)
        kv = min(running * self.tokens / self.kv_tokens, 1.0)
        passed_on = min(in_flight * self.sequences, self.passed_on)
        return Page(read_s, passed_on - running, running, kv, self.preemptions, self.started_s)


@dataclass
class Pool:
    """Engines whose limits a controller sets once a second; each endpoint could get `demand` requests."""

    engines: dict[str, Engine]
    demand: int = 1000
    tokens: int | None = None  # tokens of a request, if limits are in tokens
    controller: LimitController = field(
        default_factory=lambda: LimitController(least=1, most=1_000_000, initial=8)
    )
    lasts_s: float = 2.0  # how long a request runs, in a batch of any size
    now_s: float = 0.0
    completed: int = 0

    def run(self, seconds: int, misses: Misses | None = None, age_s: float = 0.1) -> list[dict[str, int]]:
        """Advance by `seconds`. Returns the limits after each second."""
        history = []
        for _ in range(seconds):
            self.now_s += 1.0
            # An endpoint takes a request while it is below its limit.
            in_flight = {
                address: min(self.demand, math.ceil(limits.get(address, 8) / (self.tokens or 1)))
                for limits in (self.controller.limits(),)
                for address in self.engines
            }
            waits = any(self.demand > count for count in in_flight.values())
            seen = {
                address: Observation(
                    (count := in_flight[address]),
                    engine.page(count, self.now_s - age_s),
                    tokens=self.tokens and count * self.tokens,
                )
                for address, engine in self.engines.items()
            }
            for address, engine in self.engines.items():
                self.completed += int(engine.running(in_flight[address]) / engine.sequences / self.lasts_s)
            self.controller.look(self.now_s, seen, waiting=waits, completed=self.completed, misses=misses)
            history.append(self.controller.limits())
        return history

    def reason(self, address: str = A) -> str:
        return self.controller.endpoints[address].reason


@pytest.mark.parametrize("slots", [1, 4, 32, 256])
def test_a_limit_finds_the_batch_of_an_engine_within_20_s_and_stays_there(slots: int) -> None:
    pool = Pool({A: Engine(slots)})
    pool.run(20)
    for limits in pool.run(120):
        assert slots <= limits[A] <= max(slots * 1.15, slots + 2)
    assert pool.reason().startswith(("engine queued", "requests wait"))


@pytest.mark.parametrize("slots", [1, 4, 32])
def test_a_limit_in_tokens_finds_the_tokens_of_a_batch(slots: int) -> None:
    pool = Pool({A: Engine(slots)}, tokens=700, controller=LimitController(least=1, most=10**9, initial=4096))
    pool.run(30)
    for limits in pool.run(120):
        assert slots <= limits[A] / 700 <= max(slots * 1.15, slots + 2)
    assert "tokens in flight" in pool.reason()


def test_requests_of_several_sequences_fill_the_batch_with_fewer_requests() -> None:
    pool = Pool({A: Engine(64, sequences=4)})
    pool.run(20)
    assert all(16 <= limits[A] <= 18 for limits in pool.run(60))


def test_only_the_engine_that_can_run_fewer_requests_gets_a_lower_limit_within_10_s() -> None:
    # The prompts of one engine grow, so that its KV cache holds a quarter of the requests.
    long, other = Engine(64, kv_tokens=64 * 120), Engine(16)
    pool = Pool({A: long, B: other})
    pool.run(30)
    before = pool.controller.limits()[B]
    long.tokens *= 5
    pool.run(10)
    assert 12 <= pool.controller.limits()[A] <= 17
    assert abs(pool.controller.limits()[B] - before) <= 2
    # Short prompts again: the limit grows back.
    long.tokens /= 5
    pool.run(90)
    assert pool.controller.limits()[A] > 40


@pytest.mark.parametrize("has_page", [True, False])
def test_a_load_below_the_limit_does_not_change_the_limit(has_page: bool) -> None:
    assert Pool({A: Engine(32, has_page=has_page)}, demand=5).run(60)[-1] == {A: 8}


def test_a_full_kv_cache_ends_the_doubling_and_the_limit_settles_where_requests_queue() -> None:
    pool = Pool({A: Engine(100, kv_tokens=1900)})
    limits = [each[A] for each in pool.run(60)]
    assert max(limits) <= 32
    assert all(19 <= limit <= 21 for limit in limits[20:])


@pytest.mark.parametrize(("lasts_s", "is_lowered"), [(2.0, True), (0.25, False)])
def test_preemptions_lower_an_engines_limit_unless_many_more_requests_have_ended(
    lasts_s: float, is_lowered: bool
) -> None:
    engine = Engine(32)
    pool = Pool({A: engine}, lasts_s=lasts_s)
    pool.run(20)
    for _ in range(8):
        engine.preemptions += 6
        pool.run(1)
    assert ("preempted" in pool.reason()) == is_lowered
    assert (pool.controller.limits()[A] < 32) == is_lowered


def test_a_counter_of_preemptions_that_begins_again_hides_no_preemptions() -> None:
    engine = Engine(32, preemptions=1e6)
    pool = Pool({A: engine})
    pool.run(24)
    engine.preemptions = 0.0
    for _ in range(7):
        engine.preemptions += 8
        pool.run(1)
    assert "preempted" in pool.reason()


def test_a_single_burst_of_preemptions_does_not_lower_a_limit() -> None:
    engine = Engine(32)
    pool = Pool({A: engine})
    pool.run(20)
    before = pool.controller.limits()
    engine.preemptions += 8
    pool.run(1)
    assert pool.controller.limits() == before


@pytest.mark.parametrize(("lasts_s", "least"), [(0.5, 32 + 12), (8.0, 32 + 2)])
def test_a_limit_includes_requests_on_their_way_for_which_running_requests_soon_make_room(
    lasts_s: float, least: int
) -> None:
    pool = Pool({A: Engine(32, on_way=12)}, lasts_s=lasts_s)
    pool.run(60)
    limits = [each[A] for each in pool.run(60)]
    assert min(limits) == least
    assert max(limits) <= 32 + 12 + 2


def test_a_request_refused_by_an_engine_lowers_its_limit() -> None:
    controller = LimitController(least=1, most=100, initial=20)
    for refusals in (0, 3):
        controller.look(float(refusals), {A: Observation(16, None, refusals)}, waiting=True)
    assert controller.limits() == {A: 16}
    assert controller.endpoints[A].reason == "engine refused requests at 16 in flight"
    for refusals in (4, 5):
        controller.look(float(refusals), {A: Observation(16, None, refusals)}, waiting=True)
    assert controller.limits() == {A: 14}


def test_endpoints_without_pages_grow_by_one_request_after_they_have_refused_requests() -> None:
    controller = LimitController(least=1, most=100, initial=8)
    refusals, limits = dict.fromkeys((A, B), 0), []
    for now_s in range(180):
        count = {address: controller.limits().get(address, 8) for address in refusals}
        for address in refusals:
            refusals[address] += max(count[address] - 6, 0)
        seen = {address: Observation(min(count[address], 6), None, refusals[address]) for address in refusals}
        controller.look(float(now_s), seen, waiting=True, completed=6 * now_s)
        limits.append(count[A])
    assert set(limits[60:]) == {6, 7}
    assert limits[60:].count(7) <= 5


def test_an_engine_that_refused_all_requests_for_a_while_soon_runs_as_many_as_before() -> None:
    controller = LimitController(least=1, most=1000, initial=100)
    engine, refusals = Engine(100), 0
    for now_s in range(30):
        is_refusing = 1 <= now_s <= 8
        refusals += is_refusing
        count = 0 if now_s > 1 and is_refusing else controller.limits().get(A, 100)
        seen = Observation(count, engine.page(count, now_s - 0.1), refusals)
        controller.look(now_s, {A: seen}, waiting=True)
    assert controller.limits()[A] >= 90


def test_an_engine_that_queues_only_requests_of_other_routers_keeps_its_limit() -> None:
    controller = LimitController(least=1, most=100, initial=20)
    for now_s in range(8):
        controller.look(float(now_s), {A: Observation(0, Page(now_s - 0.1, 5, 8))}, waiting=True)
    assert controller.limits() == {A: 20}


def test_below_its_limit_an_endpoint_that_queues_requests_for_a_few_pages_keeps_its_limit() -> None:
    controller = LimitController(least=1, most=100, initial=16)
    limits = []
    for now_s in range(12):
        controller.look(float(now_s), {A: Observation(8, Page(now_s - 0.1, 6, 2))}, waiting=False)
        limits.append(controller.limits()[A])
    assert limits[7:9] == [16, 8]


def test_a_single_metrics_page_with_a_queue_does_not_change_the_limit() -> None:
    # New requests wait in the engine until its next step.
    engine = Engine(32)
    pool = Pool({A: engine}, demand=30)
    pool.run(20)
    before = pool.controller.limits()
    engine.slots = 10
    pool.run(1)
    assert pool.controller.limits() == before
    engine.slots = 32
    pool.run(1)
    assert pool.controller.limits() == before


def test_requests_on_their_way_to_the_engine_do_not_count_as_running() -> None:
    controller = LimitController(least=1, most=100, initial=6)
    for now_s, (running, waiting) in enumerate(((1, 0), (1, 0), (2, 4), (2, 4))):
        controller.look(float(now_s), {A: Observation(6, Page(now_s - 0.1, waiting, running))}, waiting=False)
    assert controller.limits() == {A: 3}


def test_a_metrics_page_from_before_the_last_change_of_the_limit_is_ignored() -> None:
    pool = Pool({A: Engine(32)})
    pool.run(5, age_s=0.9)
    assert pool.run(20, age_s=0.9)[-1][A] == pool.controller.limits()[A] <= 36


def test_no_limit_grows_until_a_latency_objective_is_missed() -> None:
    most = {A: 20, B: 1000}

    def misses(address: str, limit: int) -> str:
        return f"predicted TTFT at {limit}" if limit > most[address] else ""

    pool = Pool({A: Engine(32), B: Engine(32)})
    pool.run(10, misses)
    assert 18 <= pool.controller.limits()[A] <= 20
    assert pool.controller.limits()[B] >= 32
    # The prompts grow.
    most[A] = 10
    pool.run(10, misses)
    assert pool.controller.limits()[A] == 10
    assert "predicted TTFT" in pool.reason()


def test_a_load_below_a_limit_in_tokens_does_not_say_how_many_requests_would_miss_an_objective() -> None:
    controller = LimitController(least=1, most=10**9, initial=4096)
    pool = Pool({A: Engine(32)}, demand=1, tokens=20, controller=controller)

    def misses(address: str, tokens: int) -> str:
        return "predicted TTFT" if tokens > 60 else ""

    assert pool.run(20, misses)[-1] == {A: 4096}
    pool.demand = 10
    assert 40 < pool.run(90, misses)[-1][A] <= 80, "this load misses the objective"


def test_every_limit_stays_within_the_configured_bounds() -> None:
    pool = Pool({A: Engine(100)}, controller=LimitController(least=4, most=20, initial=8))
    assert pool.run(20)[-1] == {A: 20}
    pool.controller.configure(least=4, most=12, initial=8)
    assert pool.run(1)[-1] == {A: 12}


def test_a_limit_soon_regains_its_former_value_after_a_configured_maximum_is_lifted() -> None:
    pool = Pool({A: Engine(64)})
    pool.run(20)
    pool.controller.configure(least=1, most=4, initial=8)
    assert pool.run(40)[-1] == {A: 4}
    pool.controller.configure(least=1, most=1000, initial=8)
    assert pool.run(6)[-1][A] >= 64


def test_an_engine_that_restarts_with_a_smaller_batch_gets_a_lower_limit_within_10_s() -> None:
    pool = Pool({A: Engine(64, preemptions=1000.0)})
    pool.run(30)
    pool.engines[A] = Engine(8, started_s=30.0)
    assert pool.run(10)[-1][A] <= 10


def test_without_metrics_pages_a_limit_follows_the_throughput() -> None:
    pool = Pool({A: Engine(48, has_page=False), B: Engine(48, has_page=False)})
    pool.run(90)
    for limits in pool.run(120):
        assert all(34 <= limit <= 66 for limit in limits.values())
    for engine in pool.engines.values():
        engine.slots = 24
    pool.run(300)
    assert all(17 <= limit <= 36 for limit in pool.run(60)[-1].values())


@pytest.mark.parametrize("others", [1, 3, 10])
def test_the_limit_of_one_endpoint_without_a_page_follows_its_own_throughput(others: int) -> None:
    with_pages = {f"10.0.1.{number}:8000": Engine(32) for number in range(others)}
    pool = Pool({A: Engine(32, has_page=False), **with_pages})
    pool.run(300)
    assert all(20 <= limits[A] <= 66 for limits in pool.run(300))


def test_without_metrics_pages_no_rate_is_measured_over_a_loss_of_the_count() -> None:
    pool = Pool({A: Engine(8, has_page=False)}, completed=10**6)
    pool.run(12)
    assert "a trial" in pool.reason()
    pool.completed = 0
    for _ in range(20):
        pool.run(1)
        assert not pool.reason().startswith("-"), pool.reason()


def test_without_metrics_pages_surges_of_load_raise_a_limit_only_with_the_throughput() -> None:
    pool = Pool({A: Engine(8, has_page=False), B: Engine(8, has_page=False)}, lasts_s=0.4)
    for surge in range(20):
        pool.demand = (
            max(pool.controller.limits().values(), default=8) + 2
        )  # a raised limit takes all requests
        pool.run(9)
        pool.demand = 1
        pool.run(3)
        assert max(pool.controller.limits().values()) <= 10, f"in surge {surge}"


def test_without_metrics_pages_a_limit_goes_back_at_most_to_the_configured_maximum() -> None:
    pool = Pool({A: Engine(8, has_page=False)}, lasts_s=0.4)
    while pool.controller.limits().get(A) != 16:
        pool.run(1)
    pool.controller.configure(least=1, most=4, initial=4)
    assert {limits[A] for limits in pool.run(60)} <= {3, 4}


def test_requests_missing_on_the_metrics_page_raise_a_limit_only_with_the_throughput() -> None:
    pool = Pool({A: Engine(256, passed_on=20)})
    assert max(limits[A] for limits in pool.run(300)) <= 128
    assert pool.run(120)[-1][A] <= 64
