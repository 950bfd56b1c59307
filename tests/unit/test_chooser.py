"""A replica's candidates for the Lua script: endpoints scored by load, prefix, session and latency."""

import re
from collections import Counter
from collections.abc import Mapping
from unittest.mock import Mock

import pytest
from choosers import chooser_of, fleet_with
from local_requests import ask
from pools import a_pool
from scripted_store import ScriptedStore

from picker_fleet.domain.config import EffectiveConfig, parse
from picker_fleet.domain.known_fleet import KnownFleet
from picker_fleet.domain.request import (
    Completion,
    Ejection,
    Endpoint,
    InferenceRequest,
    LatencyObjective,
    Outcome,
)
from picker_fleet.endpoints.readings import EndpointMetrics, Reading, Readings
from picker_fleet.endpoints.snapshot import Snapshot, SnapshotCell
from picker_fleet.fleet.endpoint_health import Probes
from picker_fleet.scheduling.chooser import EndpointChooser
from picker_fleet.scheduling.forecasts import broken_promise
from picker_fleet.scheduling.route_stream import RouteStream
from picker_fleet.scheduling.sessions import SessionTokens
from picker_fleet.state import accounting_token
from picker_fleet.state.accounting_token import Keyring

A, B, C = (f"10.0.0.{i}:8000" for i in (1, 2, 3))


class Knowledge:
    """A chooser over endpoints and readings that the test sets; the clock stands still until `tick` is
    called."""

    def __init__(self, *endpoints: Endpoint, fallbacks: int = 0, **scorers: float) -> None:
        self.cell = SnapshotCell()
        self.cell.publish(Snapshot("1", endpoints))
        self.readings: dict[str, Reading] = {}
        self.now_s = 0.0
        self.routes = RouteStream("redis://127.0.0.1:1/0", stream="s", replica="r", clock=lambda: self.now_s)
        self.index, self.latencies = self.routes.index, self.routes.latencies
        weights = {name.replace("_", "-"): weight for name, weight in scorers.items()} or {"in-flight": 1.0}
        self.fleet = fleet_with(scorers=weights, fallbacks=fallbacks)
        self.chooser = chooser_of(
            self.cell,
            self.fleet,
            readings=Mock(snapshot=self._readings),
            routes=self.routes,
            clock=lambda: self.now_s,
        )

    def _readings(self) -> Readings:
        pages = {address: each.metrics for address, each in self.readings.items()}
        return Readings(pages, dict(self.readings).__getitem__)

    def asked_by(self, token: str) -> str:
        """The endpoint with the best score for a request with this session token; '' if several have that
        score."""
        scores = self.choose(session=token)
        best = max(scores.values())
        return next(iter(scores)) if list(scores.values()).count(best) == 1 else ""

    def tick(self) -> None:
        self.now_s += 1

    def scraped(self, address: str, *, known: bool = True, **figures: object) -> None:
        self.readings[address] = Reading(EndpointMetrics(0, **figures), 0.0, known)  # type: ignore[arg-type]

    def waiting(self, *requests: float) -> None:
        """Set the queue lengths that scrapes found at the model servers A, B, C."""
        for address, queued in zip((A, B, C), requests, strict=False):
            self.scraped(address, waiting=queued)

    def choose(self, **fields: object) -> Mapping[str, float]:
        """Candidate endpoints and the score of each, best first."""
        candidates = self.chooser.choose(ask(**fields)).candidates
        pairs = (each.split("=") for each in candidates.split(",") if each)
        return {address: float(score) for address, score in pairs}


def test_without_scorers_the_script_chooses_among_all_allowed_endpoints() -> None:
    chooser = chooser_of(SnapshotCell())
    assert chooser.choose(ask()).candidates == "*"
    assert chooser.choose(ask(subset=(A, B))).candidates == f"{A},{B}"
    assert chooser.choose(ask(subset=())).candidates == ""
    # Both the labels and the subset hint limit the endpoints.
    chooser = in_zones({}, {})
    assert chooser.choose(ask(selector={"zone": "a"}, subset=(A, B))).candidates == A
    assert chooser.choose(ask(selector={"zone": "a"}, subset=(B, C))).candidates == ""


def in_zones(prefer: Mapping[str, str], own: Mapping[str, str]) -> EndpointChooser:
    """A chooser without scorers over A in zone a, B in zone b, C without zone; its replica has labels
    `own`."""
    cell = SnapshotCell()
    zones = {A: {"zone": "a"}, B: {"zone": "b"}, C: {}}
    cell.publish(Snapshot("1", tuple(Endpoint(address, labels=labels) for address, labels in zones.items())))
    return chooser_of(cell, KnownFleet(parse({"labels": own, "scheduling": {"prefer": prefer}})))


def test_endpoints_of_the_replicas_own_zone_are_preferred_by_half_of_the_weight_of_load() -> None:
    chooser = in_zones({"zone": "same"}, {"zone": "b"})
    candidates = chooser.choose(ask()).candidates.split(",")
    assert candidates[0] == f"{B}=0.3333"
    assert set(candidates[1:]) == {f"{A}=0.0000", f"{C}=0.0000"}
    assert chooser.live_weight == pytest.approx(2 / 3)
    assert in_zones({"zone": "a"}, {}).choose(ask()).candidates.startswith(f"{A}=0.3333,")


def test_a_replica_without_the_preferred_label_prefers_no_endpoint_and_logs_this(
    caplog: pytest.LogCaptureFixture,
) -> None:
    chooser = in_zones({"zone": "same"}, {"zone": ""})
    assert {each.partition("=")[2] for each in chooser.choose(ask()).candidates.split(",")} == {"0.0000"}
    assert "`labels` has no zone of this replica" in caplog.text


def test_no_endpoint_is_preferred_for_fresh_readings_while_most_readings_are_stale() -> None:
    known = Knowledge(Endpoint(A), Endpoint(B), Endpoint(C), queue_depth=3)
    known.scraped(A, waiting=0.0)
    known.scraped(B, known=False)
    known.scraped(C, known=False)
    assert len(set(known.choose().values())) == 1
    # Endpoints that are down do not count among endpoints with stale readings.
    down = (Endpoint("10.0.0.8:8000", down=True), Endpoint("10.0.0.9:8000", down=True))
    known = Knowledge(Endpoint(A), Endpoint(B), Endpoint(C), *down, queue_depth=3)
    known.waiting(9.0, 0.0)
    assert list(known.choose()) == [B, C, A]


def test_the_endpoint_with_the_shortest_queue_is_first_and_an_unknown_queue_is_average() -> None:
    known = Knowledge(Endpoint(A), Endpoint(B), Endpoint(C), queue_depth=3)
    known.waiting(5.0, 1.0)
    found = known.choose()
    assert list(found) == [B, C, A]
    assert (found[C], found[A]) == (pytest.approx(0.375), 0)
    # The script adds a quarter of the score for load in flight, so the queue's part weighs three quarters.
    assert found[B] == pytest.approx(0.75)


def test_new_readings_are_used_within_a_second_and_new_endpoints_at_once() -> None:
    known = Knowledge(Endpoint(A), Endpoint(B), queue_depth=1)
    known.waiting(0.0, 9.0)
    assert next(iter(known.choose())) == A
    known.scraped(A, waiting=99.0)
    known.tick()
    assert next(iter(known.choose())) == B
    # A new list of endpoints takes effect at once.
    known.cell.publish(Snapshot("2", (Endpoint(A),)))
    assert list(known.choose()) == [A]


def test_similar_requests_share_cached_choices_that_begin_with_each_of_the_best_endpoints() -> None:
    known = Knowledge(*map(Endpoint, (A, B, C)), prefix_affinity=1.0)
    orders = {tuple(known.choose()) for _ in range(300)}
    assert {order[0] for order in orders} == {A, B, C}
    # A prompt that an endpoint has served gets another choice; other prompts keep the cached choices.
    known.index.add(B, (b"one", b"two"))
    assert next(iter(known.choose(prefix=(b"one", b"two")))) == B
    assert {tuple(known.choose()) for _ in range(300)} <= orders
    assert {next(iter(known.choose(prefix=(b"other",)))) for _ in range(300)} == {A, B, C}
    known.index.add(C, (b"one", b"two", b"three"))
    assert next(iter(known.choose(prefix=(b"one", b"two", b"three")))) == C


async def test_replicas_share_only_service_times_of_successful_requests_without_queue_waits() -> None:
    known = Knowledge(Endpoint(A), latency=1)
    good = Completion("r", Outcome.COMPLETED, 200, A, 1, 1, 20.0, 19.6, service_s=0.5)
    failed = ({"outcome": Outcome.UPSTREAM_FAILED}, {"status": 404}, {"status": 0})
    for other in ({}, {"served": None}, *failed, {"fault": "error in 200"}):
        known.chooser.ended(good._replace(**other), "")
    assert [done.seconds for done in known.routes._completions] == [0.5]


def test_a_request_goes_where_its_latency_objective_is_predicted_to_be_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("random.random", lambda: 0.5)
    known = Knowledge(Endpoint(A), Endpoint(B), slo_headroom=3)
    objective = LatencyObjective(ttft_s=1.0)
    prompt = ask("r", body_bytes=40_000, latency=objective, stream=True)

    def place(request: InferenceRequest, address: str) -> str:
        """Place `request`; returns its accounting token."""
        loads = known.chooser.placed(request, known.chooser.choose(request), (address,), "0,0")
        written = accounting_token.write(request, address, load=loads.decode or ())
        return accounting_token.signed(written, request.id, Keyring())

    assert known.chooser.shortfall_s(prompt) is None, "nothing is known yet"
    end = Completion("r", Outcome.COMPLETED, 200, None, 10_000, 11, 1.0, 0.4, service_s=1.4)
    for turn in range(200):
        size = 10_000 + 400 * (turn % 100)
        for address, seconds_a_byte in ((A, 1e-5), (B, 2e-5)):
            token = place(prompt._replace(body_bytes=size), address)
            known.chooser.ended(end._replace(ttft_s=size * seconds_a_byte), token)
            known.tick()  # the prefill ends
    assert {each.address for each in known.routes._completions} == {A, B}
    known.routes._apply(known.routes._completions)

    assert list(known.choose(latency=objective, body_bytes=40_000)) == [A, B]
    place(prompt, A)
    place(prompt, A)  # endpoint A now computes two prompts before the next prompt
    assert list(known.choose(latency=objective, body_bytes=40_000)) == [B, A]
    assert known.chooser.shortfall_s(prompt) is None
    late_s = known.chooser.shortfall_s(prompt._replace(latency=LatencyObjective(ttft_s=0.1)))
    assert late_s == pytest.approx(0.7, abs=0.1)
    picture = prompt._replace(body_bytes=1_000_000, prompt_bytes=40_000)
    assert known.chooser.shortfall_s(picture) is None, "an image costs less than its base64"
    assert list(known.choose(latency=objective, body_bytes=10**6, prompt_bytes=40_000)) == [B, A]
    assert known.chooser.early_ms(prompt) == 0
    known.chooser.follow(EffectiveConfig(parse({"fair_request_queue": {"ordering": "edf"}}), {}))
    # To have its first token after 1 s of its TTL of 10 s, the request must start 0.2 s after its arrival.
    assert known.chooser.early_ms(prompt._replace(ttl_s=10.0)) == pytest.approx(9800, abs=100)
    assert known.chooser.shortfall_s(prompt, 0.9) == pytest.approx(late_s), "the wait in the queue counts"
    monkeypatch.setattr("random.random", lambda: 0.1)
    near = prompt._replace(latency=LatencyObjective(ttft_s=0.5))
    assert known.chooser.shortfall_s(near) is None, "one stream in eight that is nearly in time is tried"
    assert known.chooser.shortfall_s(near._replace(stream=False)) == pytest.approx(late_s - 0.4)
    assert known.chooser.shortfall_s(prompt, 0.9) == pytest.approx(late_s, abs=0.11), "never one far too late"

    def why(**objective: float) -> str:
        promised = LatencyObjective(**objective)
        return broken_promise(known.routes.model, lambda _: promised, known.now_s, A, 4)

    assert why(ttft_s=0.5) == ""
    assert re.fullmatch(r"predicted TTFT \d+ ms exceeds 200 ms at 4 in flight", why(ttft_s=0.2))
    assert why(tpot_s=0.01)
    known.now_s += 61.0
    assert known.chooser.shortfall_s(prompt, 0.9) is None, "the endpoints may be faster by now"
    assert why(ttft_s=0.2) == "", "a model without requests lowers no limit"


async def test_routes_that_arrive_for_a_departed_endpoint_are_forgotten() -> None:
    known = Knowledge(Endpoint(A), prefix_affinity=1)
    known.choose()
    known.index.add(B, [b"12345678"])
    known.tick()
    known.choose()
    assert known.index.match([b"12345678"]) == {}


class Probed:
    """Probes of endpoints; each probe fails with a given fault, finds the endpoint `unready`, or succeeds."""

    def __init__(self, readings: Mapping[str, Reading] | None = None) -> None:
        self.store, self.cell, self.meter = ScriptedStore(), SnapshotCell(), Mock()
        self.now_s, self.fleet = 0.0, fleet_with()
        self.fleet.in_flight = {A: 1}
        self.probes = Probes(
            self.store,  # type: ignore[arg-type]
            self.cell,
            self.meter,
            Mock(snapshot=lambda: readings or {}),
            self.fleet,
            clock=lambda: self.now_s,
            caches=Mock(),
        )

    def publish(self, *down: str, of: tuple[str, ...] = (A, B, C)) -> None:
        self.cell.publish(Snapshot(f"down: {down}", tuple(Endpoint(each, down=each in down) for each in of)))

    def probe(self, *results: str, address: str = A) -> list[tuple[str, str, bool]]:
        """Probe `address` with these results ("" is a success); return all marks of endpoints so far."""
        for result in results:
            if result and result != "unready":
                self.probes.scrape_failed(address, result, 0.1)
            else:
                self.probes.scraped(address, 0.1, EndpointMetrics(0, unready=result or None))
        return self.store.marks


async def test_an_endpoint_that_refuses_connections_is_down_until_three_probes_succeed() -> None:
    probed, down = Probed(), [(A, "down", True)]
    probed.publish(of=(A,))
    # An endpoint that answers badly or late is not down; an endpoint that takes no connection is.
    assert probed.probe("status", "timeout", "") == []
    assert probed.probe("connection") == down
    # Once an endpoint is down, three probes in a row must succeed.
    probed.publish(A, of=(A,))
    assert probed.probe("", "", "page", "", "") == down
    assert probed.probe("") == [*down, (A, "down", False)]
    # Each probe that finds the endpoint unready marks the endpoint as down again.
    assert probed.probe("", "", "unready", "", "", "unready")[2:] == down * 2
    # All results of probes and scrapes are passed on to the meter.
    probed.probes.scrape_published(1, 0.1)
    probed.probes.scrape_unpublished(1)
    probed.probes.scrape_ages(1, {})
    assert probed.meter.scraped.call_count == 12
    passed = [call[0] for call in probed.meter.method_calls[-3:]]
    assert passed == ["scrape_published", "scrape_unpublished", "scrape_ages"]


async def test_a_silent_endpoint_is_down_unless_most_endpoints_are_silent() -> None:
    silent = Reading(EndpointMetrics(0, fault="no page within 1 s", failures=3), 0.0, False)
    readings = {A: silent, B: silent, C: Reading(EndpointMetrics(0), 0.0, True)}
    probed, down = Probed(readings), [(A, "down", True)]
    probed.publish()
    assert probed.probe("silent") == []
    readings[B] = Reading(EndpointMetrics(0, fault="answered 404", failures=9), 0.0, False)
    assert probed.probe("silent") == down
    probed.publish(A)
    assert probed.probe("timeout") == probed.probe("timeout", address=B) == down * 2
    probed.publish(A, B)
    readings[C] = silent
    assert probed.probe("silent", address=C) == down * 2


@pytest.mark.parametrize(
    ("status", "is_well"), [(200, True), (204, True), (404, True), (503, False), (307, False)]
)
async def test_the_status_of_a_probe_decides_whether_an_ejected_endpoint_comes_back(
    status: int, is_well: bool
) -> None:
    probed = Probed()
    probed.probes.probed(A, status, True)
    assert probed.store.marks == []
    probed.cell.publish(Snapshot("2", (Endpoint(A, ejected=Ejection("500", 0)),)))
    probed.probes.probed(A, status, True)
    assert probed.store.marks == [(A, "ejected", not is_well)]


async def test_an_unchanged_metrics_page_is_reported_as_stuck_while_requests_run() -> None:
    probed = Probed()
    probed.publish(of=(A,))
    page = EndpointMetrics(0, waiting=1.0, running=2.0, kv_utilisation=0.5)

    def after(seconds: float) -> list[tuple[str, str, bool]]:
        probed.now_s += seconds
        probed.probes.scraped(A, 0.1, page)
        return probed.store.marks

    assert after(0) == []
    assert after(4.9) == []
    stuck = (A, "stuck", True)
    assert after(0.1) == [stuck]
    assert after(5) == [stuck] * 2
    # While the metrics page stands still, no probe brings the ejected endpoint back.
    probed.cell.publish(Snapshot("2", (Endpoint(A, ejected=Ejection("stuck", 0)),)))
    probed.probes.probed(A, 200, True)
    assert probed.store.marks[-1] == (A, "ejected", True)
    # Once no request runs on the endpoint, the endpoint's page is no longer stuck.
    probed.fleet.in_flight = {}
    assert after(1)[-1] == (A, "stuck", False)
    probed.probes.probed(A, 200, True)
    assert probed.store.marks[-1] == (A, "ejected", False)


def test_the_shown_scores_have_a_part_for_each_scorer_and_a_total() -> None:
    known = Knowledge(Endpoint(A), Endpoint(B, down=True), Endpoint(C), queue_depth=3)
    known.waiting(5.0, 0.0, 1.0)
    found = known.chooser.scores()
    assert found.keys() == {A, C}
    assert found[C]["queue-depth"] == 1
    assert found[C]["total"] == pytest.approx(0.75 * found[C]["queue-depth"] + 0.25 * found[C]["in-flight"])


def test_a_session_token_selects_its_endpoint_and_no_other_text_does() -> None:
    addresses = [f"10.0.0.{number}:80" for number in range(1, 5)]
    bench = Knowledge(*map(Endpoint, addresses), session_affinity=4)
    tokens = {address: bench.chooser.session_token(address) for address in addresses}
    assert [bench.asked_by(tokens[address]) for address in addresses] == addresses
    assert not any("10.0" in token for token in tokens.values())
    keys = bench.chooser._sessions._keys
    keys.take(" ".join(["0b" * 16, "0a" * 16, keys.offer()]))
    assert bench.asked_by(tokens[addresses[2]]) == addresses[2]
    # A token of another fleet, a changed token and an invented one select no endpoint.
    foreign = SessionTokens(Keyring(), bench.cell).token_of(addresses[1])
    for token in (foreign, tokens[addresses[1]][:-1] + "g", addresses[1], "alice"):
        assert bench.asked_by(token) == ""
    bench.cell.publish(Snapshot("2", tuple(map(Endpoint, addresses[:2]))))
    bench.tick()
    assert bench.asked_by(tokens[addresses[2]]) == ""
    # Without the session scorer, clients get no session token.
    assert Knowledge(Endpoint(A), queue_depth=1).chooser.session_token(A) == ""


def test_a_session_key_selects_one_endpoint_until_that_endpoint_leaves() -> None:
    bench = Knowledge(*many()[:50], session_affinity=4)
    keys = [f"=user-{number}" for number in range(2000)]
    before = {key: bench.chooser.session_endpoint(key, None) for key in keys}
    counts = Counter(before.values())
    assert len(counts) == 50
    assert max(counts.values()) < 2.5 * min(counts.values())
    assert bench.asked_by(keys[0]) == before[keys[0]]
    gone = MANY[7]
    bench.cell.publish(Snapshot("2", many(at_7=Endpoint(gone, draining=True))[:50]))
    after = {key: bench.chooser.session_endpoint(key, None) for key in keys}
    assert {key for key in keys if after[key] != before[key]} == {key for key in keys if before[key] == gone}
    # A session key also selects one endpoint among the endpoints of a subset hint.
    hinted = {bench.chooser.session_endpoint(key, (MANY[1], MANY[2], "9.9.9.9:1")) for key in keys}
    assert hinted == {MANY[1], MANY[2]}
    assert bench.chooser.session_endpoint(keys[0], ()) == ""


@pytest.mark.parametrize("scorers", [{}, {"queue_depth": 3.0}])
def test_a_request_goes_to_the_endpoint_with_its_stored_state_if_that_takes_requests(
    scorers: dict[str, float],
) -> None:
    known = Knowledge(Endpoint(A), Endpoint(B, labels={"gpu": "l4"}), Endpoint(C, down=True), **scorers)
    known.waiting(0.0, 9.0, 0.0)
    if not scorers:
        known.chooser.follow(fleet_with().config)
    choose = known.chooser.choose
    assert choose(ask(origin=B)).candidates == choose(ask(origin=B, selector={"gpu": "l4"})).candidates == B
    # Stored state is ignored if the endpoint that has the state is down, gone or not allowed.
    for request in (ask(origin=C), ask(origin="9.9.9.9:1"), ask(origin=B, subset=(A, C))):
        plain = choose(request._replace(origin="")).candidates.split("=")[0]
        assert choose(request).candidates.split("=")[0] == plain
        assert plain != B
    assert known.chooser.unscored(ask(origin=B)).candidates == "*"
    known.chooser.placed(ask("r"), choose(ask("r", origin=B)), (B,), "3")
    why = known.chooser.explain("r")
    assert why is not None
    assert ([each.address for each in why.candidates], set(why.excluded)) == ([B], {A, C})
    assert "state" in why.rule


STEADY, QUICK = A, B


WEIGHTS: list[tuple[dict[str, float], str]] = [
    ({}, QUICK),  # costs: STEADY 1.0 + 0.5 · 0, QUICK 0.6 + 0.5 · 0.6
    ({"gamma": 0}, QUICK),
    ({"gamma": 2}, STEADY),
    ({"alpha": 0, "beta": 0, "gamma": 1}, STEADY),
    ({"alpha": 5, "gamma": 2}, QUICK),
]


@pytest.mark.parametrize(("latency", "first"), WEIGHTS)
async def test_the_configured_latency_weights_decide_the_choice(
    latency: dict[str, float], first: str
) -> None:
    scheduling = {"scorers": [{"name": "latency", "weight": 3}], "latency": latency}
    pool = a_pool({"scheduling": scheduling})
    pool.endpoints.publish(Snapshot("1", (Endpoint(STEADY), Endpoint(QUICK))))
    for steady, quick in ((1.0, 0.0), (1.0, 1.2)) * 5:
        pool.routes.latencies.add(STEADY, steady)
        pool.routes.latencies.add(QUICK, quick)
    choice = pool.chooser.choose(ask("r1"))
    assert choice.candidates.split("=")[0] == first
    scores = pool.chooser.scores()
    assert max(scores, key=lambda address: scores[address]["latency"]) == first


MANY = [f"10.0.{n // 250}.{n % 250}:8000" for n in range(300)]


def many(**changed: Endpoint) -> list[Endpoint]:
    """A pool of 300 endpoints; the argument `at_N` replaces endpoint number N."""
    return [changed.get(f"at_{n}", Endpoint(address)) for n, address in enumerate(MANY)]


def test_in_a_large_pool_successive_requests_consider_every_endpoint() -> None:
    known = Knowledge(*many(), queue_depth=1)
    seen: set[str] = set()
    for _ in range(1500):
        found = known.choose()
        assert len(found) == 5
        seen |= found.keys()
        known.tick()
    assert seen == set(MANY)


def test_many_simultaneous_picks_are_spread_over_a_large_pool() -> None:
    known = Knowledge(*many(), queue_depth=1)
    seen: set[str] = set()
    for _ in range(64 * 100):  # the clock stands still, so that no reading is renewed
        seen |= known.choose().keys()
    assert len(seen) > 280


@pytest.mark.parametrize("pool", [many(), many()[:20]], ids=["large", "small"])
def test_a_request_has_one_candidate_for_the_pick_and_one_for_each_fallback(pool: list[Endpoint]) -> None:
    assert len(Knowledge(*pool, queue_depth=1, fallbacks=8).choose()) == 9


def test_in_a_large_pool_endpoints_with_the_prefix_or_the_adapter_are_considered() -> None:
    known = Knowledge(*many(), prefix_affinity=3, lora_affinity=3, session_affinity=3)
    prompt = (b"one", b"two", b"three")
    known.choose()
    known.index.add(MANY[7], prompt[:1])
    known.index.add(MANY[99], prompt)
    known.scraped(MANY[123], active_adapters=frozenset({"tuned"}), max_adapters=4)
    known.tick()
    for _ in range(20):
        known.tick()
        assert list(known.choose(prefix=(*prompt, b"four")))[:2] == [MANY[99], MANY[7]]
        assert next(iter(known.choose(target_model="tuned"))) == MANY[123]


def test_in_a_large_pool_the_only_allowed_endpoint_is_found() -> None:
    known = Knowledge(
        *many(
            at_5=Endpoint(MANY[5], labels={"gpu": "h100", "zone": "a"}),
            at_6=Endpoint(MANY[6], labels={"gpu": "h100", "zone": "b"}, draining=True),
            at_7=Endpoint(MANY[7], labels={"zone": "a"}, down=True),
        ),
        queue_depth=1,
    )
    unknown_addresses = [f"10.9.9.{n}:1" for n in range(100)]
    for _ in range(20):
        known.tick()
        assert list(known.choose(selector={"gpu": "h100"})) == [MANY[5]]
        assert list(known.choose(subset=(MANY[6], *unknown_addresses, MANY[200], MANY[7]))) == [MANY[200]]
        assert list(known.choose(subset=tuple(MANY), selector={"zone": "a"})) == [MANY[5]]
        assert known.choose(selector={"zone": "b"}) == known.choose(subset=(MANY[7],)) == {}
    # A flow's limit may leave only one endpoint with room, so all endpoints are candidates.
    assert len(known.choose(limit=1)) == len(MANY) - 2


def test_in_a_large_pool_with_endpoint_limits_all_endpoints_are_considered() -> None:
    known = Knowledge(*many(at_0=Endpoint(MANY[0], max_inflight=3)), queue_depth=1)
    for n, address in enumerate(MANY):
        known.scraped(address, waiting=float(n != 250))
    known.tick()
    assert next(iter(known.choose())) == MANY[250]
