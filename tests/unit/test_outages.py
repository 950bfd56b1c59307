"""Admission with failover: losing Redis, admitting locally, and resyncing."""

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from admission_bench import E1, E2, FULL, PULSE, QUEUED, Bench, NoPeers, resyncing, returned, watched
from background import running, until
from local_requests import ask
from metrics_page import samples
from scripted_store import answered

from picker_fleet import background
from picker_fleet.admission import admission
from picker_fleet.admission.admission import Admission
from picker_fleet.admission.failover import FailoverState
from picker_fleet.admission.ledger import Phase
from picker_fleet.admission.outage import unseen_s
from picker_fleet.admission.peers import EndedCharge, OutageCount, RedisUse
from picker_fleet.domain.bands import Band
from picker_fleet.domain.errors import (
    ExpiredTtl,
    OverLimit,
    RequestError,
    RequestIdTaken,
    ShuttingDown,
    StateUnavailable,
)
from picker_fleet.domain.request import Alive, Completion, Outcome, Placement
from picker_fleet.state import accounting_token
from picker_fleet.state.replies import Notification, Placed, Renewal, SettleReply, Verdict

UNSEEN_S = unseen_s(0.0)  # a resync restores no request without a sign of life for so many seconds
PATIENT_S = 60.0  # seconds that a resync waits for the other replica; long, for a slow machine


async def test_without_redis_a_replica_places_requests_within_its_share_of_the_bound() -> None:
    # 6 units of the bound of 10 are free, 3 for each of two replicas.
    bench = Bench(away=True)
    placed = [await bench.place(str(n)) for n in range(3)]
    # Each request goes to the least loaded endpoint, with a fallback and an accounting token.
    assert bench.gate.failover.state is FailoverState.LOCAL
    assert bench.free == 0.0
    assert placed[0].endpoints == (E2, E1)
    assert {each.endpoints[0] for each in placed} <= {E1, E2}
    assert all(each.accounting_token for each in placed)
    # The first request may have reached Redis, so the replica cancels it there.
    assert bench.store.cancelled == [("0", "cancelled")]
    # The end of a request that began before the outage also lets the next request in.
    waiting = await bench.wait_here("next")
    bench.end("from before", placed[0])
    assert (await waiting).endpoints
    assert samples(bench.metrics)[("epp_degraded",)] == 1


@pytest.mark.parametrize("stranger", [{"digest": "y"}, {"flow": "g", "digest": "x"}], ids=str)
async def test_without_redis_a_different_request_cannot_take_a_known_id(stranger: dict[str, str]) -> None:
    bench = Bench()
    bench.store.admitting = [Placed((E1,))]
    await bench.place("before", digest="x")
    bench.store.away = True
    await bench.place("runs", digest="x")
    await bench.place("runs", digest="x")  # Envoy's retry
    waiting = await bench.wait_here("waits", digest="x")
    for name in ("before", "runs", "waits"):
        with pytest.raises(RequestIdTaken):
            await bench.place(name, **stranger)
    assert not waiting.done()
    assert bench.gate.failover.outage is not None
    bench.gate.failover.outage.gate.release(1.0)  # the request `waits` is placed as soon as its task runs
    with pytest.raises(RequestIdTaken):
        await bench.place("waits", **stranger)
    await waiting


async def test_without_redis_a_disabled_queue_places_every_request() -> None:
    # The queue is disabled; this replica's share of the bound is 3.
    bench = Bench(config={"request_queue_controller": {"enabled": False}}, away=True)
    # All requests are placed, balanced by the load that this replica knows.
    placed = [await bench.place(str(n)) for n in range(20)]
    status = bench.gate.failover.status()
    assert bench.gate.failover.state is FailoverState.LOCAL
    assert status is not None
    assert (status.queued, status.free, status.let_go) == (0, 3.0, 20)
    first = [each.endpoints[0] for each in placed]
    assert (first.count(E1), first.count(E2)) == (9, 11)  # E1 already had 3 requests, E2 had 1
    # The end of a request releases no budget, since no budget was acquired.
    bench.end("0", placed[0])
    assert bench.free == 3.0


async def test_without_redis_a_replica_grants_its_share_of_a_tenants_remaining_limit() -> None:
    limit = {"requests": 8, "per": "1h"}
    acme = {"path": "acme", "over_limit": "reject", "limits": [limit]}
    bench = Bench(config={"tenants": {"nodes": [acme]}})
    bench.store.admitting = [Placed((E1,), quota="requests=8,4,1800000")]
    assert (await bench.place("told", flow="acme/x")).quota == "requests=8,4,1800000"
    bench.store.away = True
    # Half of the limit is left, for two replicas.
    placed = [await bench.place(str(n), flow=f"acme/{n}") for n in range(2)]
    assert [each.quota.rpartition(",")[0] for each in placed] == ["requests=8,2", "requests=8,0"]
    with pytest.raises(OverLimit) as refused:
        await bench.place("more", flow="acme/y")
    assert refused.value.retry_after_s == 900
    # A request that no server answered is refunded, unless it began before the outage.
    bench.end("from before", placed[0]._replace(accounting_token=accounting_token.write(ask(), E1)))
    bench.end("1", placed[1], outcome=Outcome.UPSTREAM_FAILED, prompt_tokens=None, completion_tokens=None)
    await bench.place("next", flow="acme/y")
    with pytest.raises(OverLimit):
        await bench.place("more", flow="acme/y")
    # Tenants other than acme have no limit.
    bench.end("0", placed[0])
    await bench.place("other", flow="beta/x")
    # While this replica resyncs, only Redis charges the limit.
    async with resyncing(bench):
        bench.store.admitting = [Placed((E1,), quota="requests=8,7,1")]
        bench.end("next", placed[0])
        assert (await bench.place("resyncing", flow="acme/x")).quota == "requests=8,7,1"
        bench.tell_peers()
        # After the resync the replica charges in Redis the two requests that it granted in the outage.
        await until(lambda: bench.store.top_ups)
        assert bench.store.top_ups == [("acme", "requests", "3600000", pytest.approx(-2))]


async def test_a_tenants_waiting_request_starts_when_another_replica_gets_the_end_of_a_running_one() -> None:
    acme = {"path": "acme", "max_parallel_requests": 2}
    config, peers = {"tenants": {"nodes": [acme]}}, DirectPeers()
    a, b = Bench(config=config, peer_client=peers), Bench(config=config, replica="b")
    for bench in (a, b):
        bench.gate.failover.redis_lost("refused", "away")
    peers.gate = b.gate
    # The share of each replica is one request in flight. Envoy sends its access log to replica `b`.
    runs = await a.place("runs", flow="acme/x")
    waits = await a.wait_here("waits", flow="acme/y")
    b.end("runs", runs)
    await waits
    # Replica `b` has not used its own share yet, and gains none by the end.
    await b.place("theirs", flow="acme/x")
    late = await b.wait_here("late", flow="acme/y")
    await asyncio.sleep(0)
    assert not late.done()
    late.cancel()


async def test_an_end_that_another_replica_gets_corrects_the_charge_of_a_tenant() -> None:
    acme = {"path": "acme", "over_limit": "reject", "limits": [{"tokens": 1000, "per": "1d"}]}
    config, peers = {"tenants": {"nodes": [acme]}}, DirectPeers()
    a, b = Bench(config=config, peer_client=peers), Bench(config=config, replica="b")
    for bench in (a, b):
        bench.gate.failover.redis_lost("refused", "away")
    peers.gate = b.gate
    sizes = {"prompt_tokens": 10.0, "answer_tokens": 240.0}
    for name, end in {
        "short": {"prompt_tokens": 10, "completion_tokens": 40},
        "failed": {"outcome": Outcome.UPSTREAM_FAILED, "prompt_tokens": None, "completion_tokens": None},
    }.items():
        b.end(name, await a.place(name, flow="acme/x", **sizes), **end)
        a.gate.failover.outage.gate.release(1.0)  # room for the next request
        await until(lambda: not a.gate.failover.outage.gate.charged())
    # The share of one of two replicas is 500 tokens, of which 50 are used and the next request takes 250.
    placed = await a.place("next", flow="acme/x", **sizes)
    assert placed.quota.split(",")[1] == "400"


async def test_without_redis_a_tenant_is_charged_for_answers_without_usage_as_with_redis() -> None:
    acme = {"path": "acme", "over_limit": "reject", "limits": [{"tokens": 1000, "per": "1d"}]}
    bench = Bench(config={"tenants": {"nodes": [acme]}})
    bench.store.away = True
    unknown = dict.fromkeys(("prompt_tokens", "completion_tokens"))
    sizes = {"prompt_tokens": 10.0, "answer_tokens": 40.0}
    left = []
    for status, body_bytes, what in ((400, 100, "application/json"), (200, 25_600, "text/event-stream")):
        placed = await bench.place(f"r{status}", flow="acme/x", **sizes)
        bench.end(f"r{status}", placed, status=status, body_bytes=body_bytes, content_type=what, **unknown)
        left.append((await bench.place(f"next{status}", flow="acme/x", **sizes)).quota.split(",")[1])
    # The share of one of two replicas is 500 tokens; answers show both replicas' shares. The refused request
    # is charged none, and the stream of 25 600 bytes 100 tokens for its answer instead of 40.
    assert left == ["900", "580"]


async def test_an_access_log_entry_of_a_refused_request_is_not_counted_as_a_completion() -> None:
    bench = Bench(away=True)
    placement = await bench.place("placed")
    bench.end("refused")
    for _ in range(2):
        bench.end("placed", placement)
    assert sum(bench.counted("epp_completions_total", "outcome").values()) == 1
    async with returned(bench):
        assert [name for name, *_ in bench.store.settled] == ["placed"]


async def test_a_replica_that_never_reached_redis_refuses_requests_and_does_not_go_local() -> None:
    bench = Bench(pulse=None, away=True)
    with pytest.raises(StateUnavailable):
        await bench.place()
    assert bench.gate.failover.status() is None
    bench.gate.failover.redis_lost("refused", "not there yet")
    bench.gate.failover.heartbeat_answered(PULSE)
    assert bench.gate.failover.state is FailoverState.SHARED


async def test_placements_since_the_last_heartbeat_reduce_a_replicas_share() -> None:
    bench = Bench()
    for name in ("shared", "too"):
        await bench.place(name)
    bench.store.away = True
    await bench.place("alone")
    assert bench.free == 0.0


async def test_ends_of_requests_that_redis_has_not_seen_release_budget() -> None:
    bench = Bench(FULL)
    placement = await bench.place("r")
    # Redis has not received the end of "r", nor both ends of "slow"; it may have received the end of "sent"
    # and the first end of "late", from another replica.
    bench.store.answering = False
    for name in ("r", "sent", "slow"):
        bench.end(name, placement, is_read=name != "slow")
    for name in ("slow", "late"):
        bench.end(name, placement, is_late=True)
    bench.store.unsent, bench.store.away = ["r", "slow", "slow", "late"], True
    bench.lose_redis()
    assert bench.free == 2.0


class DirectPeers(NoPeers):
    """A peer client that calls the gate of the other replica without a network."""

    def __init__(self) -> None:
        self.gate: Admission | None = None
        self.asked = 0

    async def count(self, address: str) -> OutageCount | None:
        self.asked += 1
        return self.gate.failover.outage_count() if self.gate is not None else None

    async def redis_use(self, address: str) -> RedisUse | None:
        self.asked += 1
        return self.gate.failover.redis_use() if self.gate is not None else None

    async def ended_before(self, address: str, ids: Collection[str]) -> Collection[str] | None:
        return self.gate.failover.ended_before(ids) if self.gate is not None else None

    async def ended(self, address: str, ids: Collection[str]) -> Mapping[str, EndedCharge] | None:
        return self.gate.failover.ended(ids) if self.gate is not None else None


async def test_budget_of_ended_requests_that_redis_never_confirmed_is_recovered() -> None:
    # Each of two replicas has placed five running requests. Six requests end, and Redis is lost before it
    # confirms the ends. Two ends reached the replica that placed the request, four the other replica.
    peers = DirectPeers()
    a, b = Bench(FULL, peer_client=peers), Bench(FULL, replica="b")
    placed = {name: await (a if name < "5" else b).place(name) for name in "0123456789"}
    a.store.answering = b.store.answering = False
    for name, bench in zip("012567", (a, b, b, b, a, a), strict=True):
        bench.end(name, placed[name])
    # No budget is recovered while replica `b` still uses Redis.
    a.gate.failover.redis_lost("refused", "away")
    waiting = [await a.wait_here(f"waiting {n}") for n in range(7)]
    assert a.free == 0.0
    b.gate.failover.redis_lost("refused", "away")
    await until(
        lambda: a.gate.failover.outage_count() is not None and b.gate.failover.outage_count() is not None
    )
    await until(lambda: peers.asked)  # replica `b` does not answer yet, so replica `a` asks again
    peers.gate = b.gate
    # Six requests take the recovered budget; the seventh waits until a request from before the outage ends.
    await until(lambda: sum(task.done() for task in waiting) == 6)
    assert a.free == 0.0
    b.end("8", placed["8"])
    assert (a.free, b.free) == (0.0, 1.0)
    a.end("3", placed["3"])
    await asyncio.gather(*waiting)


@pytest.mark.parametrize("may_run_unseen", [
    lambda bench: bench.gate.failover.update_peers({"a": {"grpc": "a"}}),  # a peer has left
    # A renewal is ignored in a pause of the replica.
    lambda bench: (bench.stand_still(), bench.gate.renew(Alive("runs", E1, "token"))),
])  # fmt: skip
async def test_no_budget_is_recovered_while_requests_may_run_unseen(
    may_run_unseen: Callable[[Bench], object],
) -> None:
    clock = [1.0]
    bench = Bench(FULL, clock=lambda: clock[0])
    clock[0] += 2 * UNSEEN_S
    may_run_unseen(bench)
    bench.gate.failover.redis_lost("refused", "away")
    assert bench.gate.failover.outage_count() is None
    clock[0] += UNSEEN_S
    await until(lambda: bench.gate.failover.outage_count() is not None)


async def test_a_paused_fleet_places_nothing_without_redis() -> None:
    bench = Bench(replace(PULSE, paused=True), away=True)
    task = await bench.wait_here()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_waiting_requests_move_to_the_local_queue_with_their_age() -> None:
    bench = Bench()
    async with watched(bench):
        # One request waits in the shared queue; Redis does not answer the admission of the other request.
        queued = await bench.wait_in_redis("queued")
        bench.store.silent = True
        asked = bench.start("asked")
        await until(lambda: bench.gate.queue.waiting == 2)
        bench.lose_redis()
        # Both requests are placed locally, and cancelled in Redis.
        assert (await queued).endpoints
        assert (await asked).endpoints
    assert sorted(bench.store.cancelled) == [("asked", "cancelled"), ("queued", "cancelled")]


async def test_an_unanswered_admission_is_refused_when_the_requests_time_is_up() -> None:
    bench = Bench()
    async with watched(bench):
        # Redis is silent, but not yet for long enough to count as unavailable.
        bench.store.silent = True
        with pytest.raises(ExpiredTtl):
            await bench.place("r", ttl_s=0.1)
        assert bench.gate.failover.state is FailoverState.SHARED
    assert bench.store.cancelled == [("r", "cancelled")]


async def test_after_repeated_failovers_a_replica_needs_more_answered_heartbeats() -> None:
    bench = Bench(wait_s=PATIENT_S)
    wanted = []
    async with watched(bench):
        for _ in range(6):
            bench.lose_redis()
            beats = 0
            while bench.gate.failover.state is FailoverState.LOCAL:
                bench.gate.failover.heartbeat_answered(PULSE)
                beats += 1
            wanted.append(beats)
            await until(lambda: bench.gate.failover.state is FailoverState.SHARED)
    assert wanted == [2, 4, 8, 16, 16, 16]
    to = {"local": 6, "resyncing": 6, "shared": 6}
    assert bench.counted("epp_failover_transitions_total", "to") == to
    assert bench.counted("epp_failover_transitions_total", "cause")["silence"] == 6


async def test_a_missed_heartbeat_restarts_the_count_of_answered_heartbeats() -> None:
    bench = Bench(wait_s=PATIENT_S)
    bench.gate.failover.redis_lost("refused", "refused")
    bench.gate.failover.heartbeat_answered(PULSE)
    bench.gate.failover.heartbeat_missed(StateUnavailable("away"))
    bench.gate.failover.heartbeat_answered(PULSE)
    assert bench.gate.failover.state is FailoverState.LOCAL


@pytest.mark.parametrize("client_first", [False, True])
async def test_the_request_of_a_client_that_leaves_as_redis_is_lost_is_not_placed(client_first: bool) -> None:
    bench = Bench()
    async with watched(bench):
        task = await bench.wait_in_redis("r")
        cancels = [bench.gate.queue.give_up, task.cancel]
        for cancel in reversed(cancels) if client_first else cancels:
            cancel()
        # The client's cancellation takes precedence, and the request is cancelled in Redis.
        with pytest.raises(asyncio.CancelledError):
            await task
    assert bench.store.cancelled == [("r", "cancelled")]


@pytest.mark.parametrize("outcome", [Outcome.COMPLETED, Outcome.UPSTREAM_FAILED])
async def test_a_wait_in_the_shared_and_then_the_local_queue_is_counted_once(outcome: Outcome) -> None:
    # The stock is full, and the request waits in the shared queue.
    bench = Bench(FULL)
    task = await bench.wait_in_redis("r")
    # Redis is lost, and the request waits in the local queue.
    bench.store.away = True
    other = bench.start("other")
    await until(lambda: bench.queued == 2)
    # The request still waits, so no outcome is counted.
    assert bench.counted("epp_requests_cancelled_total", "model") == bench.waits == {}
    # Redis is available again and places the request.
    bench.store.away = False
    bench.store.admitting = [Placed((E1,))]
    async with watched(bench):
        bench.answer_heartbeats()
        placement = await task
        await other
    # A request that has waited did not bypass the queue; the wait counts once the outcome is known.
    assert bench.counted("epp_bypass_total", "model") == bench.waits == {}
    assert placement.waited_s is not None
    bench.end("r", placement, outcome=outcome, waited_s=placement.waited_s, target_model="m")
    await until(lambda: bench.waits)
    assert bench.waits == {"true" if outcome is Outcome.COMPLETED else "false": 1}


@pytest.mark.parametrize("how", ["expired", "preempted", "left"])
async def test_a_failed_wait_in_the_local_queue_counts_once_as_failed(how: str) -> None:
    # There is no free budget, and the queue has room for one request.
    bench = Bench(FULL, {"fair_request_queue": {"total_capacity": 2, "flow_capacity": 2}}, away=True)
    task = await bench.wait_here("r", band=Band.SHEDDABLE, ttl_s=1.0 if how == "expired" else 30.0)
    other = bench.start("o", band=Band.CRITICAL) if how == "preempted" else task
    if how == "left":
        task.cancel()
    with pytest.raises((RequestError, asyncio.CancelledError)):
        await task
    assert bench.waits == {"false": 1}
    other.cancel()


async def test_after_a_pause_of_the_replica_a_failed_call_is_repeated() -> None:
    bench = Bench(away=True)
    # The process was paused, as between SIGSTOP and SIGCONT, and a call to Redis has failed.
    bench.stand_still()
    asking = bench.start("r")
    await until(lambda: len(bench.store.ages_s) >= 3)
    # The replica was paused and Redis was not lost, so the replica does not fail over.
    assert bench.gate.failover.state is FailoverState.SHARED
    bench.store.away = False
    assert (await asking).endpoints == (E1,)
    assert bench.gate.failover.state is FailoverState.SHARED


async def test_a_replica_that_lost_its_cpu_core_for_a_moment_sends_no_request_age() -> None:
    # Two requests reach Redis 9 ms and 20 ms after the replica.
    bench = Bench(clock=lambda: 100.0)
    for age_s in (0.009, 0.02):
        await bench.gate.admit(ask(f"after {age_s} s"), stream_owned=False, age_s=age_s)
    # Only 20 ms are sent as an age: 9 ms must not put a request before earlier ones in the message (G4).
    assert bench.store.ages_s == [0.0, pytest.approx(0.02)]


async def test_after_a_pause_of_the_replica_an_ended_stream_is_not_admitted() -> None:
    bench = Bench()
    # Two streams arrive during the pause, and Envoy has ended one of them.
    bench.stand_still()
    given_up, wanted = (bench.start(name) for name in ("gone", "here"))
    await asyncio.sleep(0)
    given_up.cancel()
    # Another replica may have the ended stream's request by now, so this replica does not admit the request.
    with pytest.raises(asyncio.CancelledError):
        await given_up
    assert (await wanted).endpoints == (E1,)
    assert len(bench.store.ages_s) == 1


async def test_a_resync_reports_all_running_and_ended_requests_to_redis() -> None:
    bench = Bench(away=True)
    placed = [await bench.place(str(n)) for n in range(3)]
    bench.end("over", placed[0])
    placed.append(await bench.place("3"))
    waiting = await bench.wait_here("waits")
    bench.gate.renew(Alive("old", E1, placed[0].accounting_token))
    bench.tell_peers(b=True)
    async with watched(bench):
        await until(lambda: bench.pokes)
        # Redis answers probes again.
        bench.store.away = False
        bench.answer_heartbeats()
        await until(lambda: not bench.gate.failover.degraded)
        # Redis has a tombstone for the ended request, and all running requests.
        assert bench.store.tombstones == ["over"]
        assert sorted(name for name, _ in bench.store.alive) == ["0", "1", "2", "3", "old"]
        # Until the other replica has resynced, a request needs both local budget and admission by Redis.
        assert bench.gate.failover.state is FailoverState.RESYNCING
        assert not waiting.done()
        bench.end("0", placed[0])
        await waiting
        assert bench.store.ages_s[-1] > 0.0
        assert [name for name, _, _ in bench.store.settled] == ["over", "0"]
        # When every replica has resynced, Redis alone decides about admission.
        bench.tell_peers()
        await until(lambda: bench.gate.failover.status() is None)
    assert [name for name, _, _ in bench.store.settled] == ["over", "0", "over", "0"]
    assert samples(bench.metrics)[("epp_degraded",)] == 0
    bench.end("1", placed[1])
    assert bench.store.settled[-1][0] == "1"


async def test_each_request_that_bypasses_the_queue_counts_once_in_every_failover_state() -> None:
    bench = Bench(wait_s=PATIENT_S)
    # Redis admits the first request, the local budget the second; while resyncing, both admit the third.
    await bench.place("shared")
    bench.store.away = True
    await bench.place("alone")
    async with resyncing(bench):
        await bench.place("both")
        assert bench.gate.failover.state is FailoverState.RESYNCING
    assert bench.counted("epp_bypass_total", "model") == {"m": 3}


@pytest.mark.parametrize("paused", [False, True])
async def test_a_replica_that_loses_redis_while_resyncing_goes_local_again(paused: bool) -> None:
    bench = Bench(wait_s=PATIENT_S, away=True)
    await bench.place("a")
    free = bench.free
    async with resyncing(bench):
        if paused:
            bench.stand_still()
        # The next decision by Redis fails; the request keeps the local budget that the request has acquired.
        bench.store.away = True
        assert (await bench.place("b")).endpoints
        assert bench.gate.failover.state is FailoverState.LOCAL
        assert bench.free == free - 1


async def test_budget_released_while_resyncing_is_limited_to_the_replicas_share() -> None:
    # While resyncing, the replica receives the ends of more requests than its share of the bound.
    bench = Bench(FULL, wait_s=PATIENT_S)
    placed = await bench.place("from before")
    bench.store.away = True
    tasks = [await bench.wait_here("alone")]
    tasks[0].cancel()
    async with resyncing(bench):
        for n in range(8):
            bench.end(f"theirs {n}", placed)
        assert bench.free == 8
        # Redis has given the released budget to other replicas, and is lost again.
        bench.gate.failover.heartbeat_answered(FULL)
        bench.store.away = True
        tasks.append(await bench.wait_here("once more"))
        # The replica keeps its share of the budget that was free in Redis, which is none.
        assert bench.gate.failover.state is FailoverState.LOCAL
        assert bench.free == 0
        tasks[1].cancel()
    await asyncio.wait(tasks)


@pytest.mark.parametrize("pulsed", [False, True])
async def test_budget_released_while_resyncing_is_lost_if_redis_is_lost_again(pulsed: bool) -> None:
    # The stock is full. Redis answers again, and the replica receives ends of requests before the resync is
    # done.
    bench = Bench(FULL, wait_s=PATIENT_S)
    placed = await bench.place("before")
    bench.lose_redis()
    bench.tell_peers(b=True, answered=())
    async with watched(bench):
        bench.answer_heartbeats(FULL)
        await until(lambda: bench.gate.failover.state is FailoverState.RESYNCING)
        for n in range(4):
            bench.end(f"theirs {n}", placed)
        assert (bench.gate.failover.degraded, bench.free) == (True, 4)
        # Redis has given the budget of the ended requests to other replicas, and is lost again.
        if pulsed:
            bench.gate.failover.heartbeat_answered(FULL)
        bench.lose_redis()
        assert bench.free == 0


@pytest.mark.parametrize("shared", [False, True])
async def test_budget_taken_while_resyncing_must_be_taken_again_in_the_next_outage(shared: bool) -> None:
    # While resyncing, requests that wait in the shared queue have acquired the whole local budget.
    bench = Bench(wait_s=PATIENT_S, away=True)
    await bench.place("alone")
    async with resyncing(bench):
        bench.store.admitting = [QUEUED]
        free = int(bench.free)
        waiting = [bench.start(f"w{n}") for n in range(free)]
        await until(lambda: bench.gate.queue.waiting == free > 0)
        if shared:
            bench.tell_peers()
            await until(lambda: bench.gate.failover.state is FailoverState.SHARED)
        # Other replicas have filled the stock in Redis, which is lost again.
        bench.gate.failover.heartbeat_answered(FULL)
        bench.lose_redis()
        await until(lambda: bench.queued == free)
        # In the new outage, the requests have to acquire budget again, and no budget counts as lost.
        assert not any(task.done() for task in waiting)
        assert bench.free == (bench.gate.failover.outage.initial_free if shared else 0) == 0  # type: ignore[union-attr]
        for task in waiting:
            task.cancel()


async def test_requests_seen_running_in_one_outage_count_as_in_flight_in_the_next_outage() -> None:
    bench = Bench(away=True)
    token = (await bench.place("alone")).accounting_token
    async with returned(bench):
        bench.gate.renew(Alive("of another", E1, token))
        await until(lambda: bench.gate.failover.state is FailoverState.SHARED)
        bench.lose_redis()
        assert bench.gate.failover.outage is not None
        assert {"alone", "of another"} <= bench.gate.failover.outage.before.keys()


async def test_a_request_that_queued_while_resyncing_and_ran_counts_as_in_flight_in_the_next_outage() -> None:
    bench = Bench(wait_s=PATIENT_S, away=True)
    await bench.place("alone")
    async with resyncing(bench):
        bench.store.admitting = [QUEUED]
        waiting = bench.start("waits")
        await until(lambda: bench.gate.queue.waiting)
        bench.tell_peers()
        await until(lambda: bench.gate.failover.state is FailoverState.SHARED)
        bench.store.placing = [Placed((E1,))]
        bench.gate.queue.notified(Notification("waits", Verdict.GRANTED))
        await waiting
        bench.lose_redis()
        assert bench.gate.failover.outage is not None
        assert "waits" in bench.gate.failover.outage.before


async def test_the_accounting_token_of_a_local_placement_restores_nothing_after_its_end() -> None:
    bench = Bench()
    # Redis admits one request, and the local budget admits another.
    shared = await bench.place("shared")
    bench.store.away = True
    alone = await bench.place("alone")
    assert [accounting_token.is_alone(each.accounting_token) for each in (shared, alone)] == [False, True]
    async with returned(bench):
        await until(lambda: bench.gate.failover.state is FailoverState.SHARED)
        bench.store.tombstones.clear()
        # The end of the local placement leaves a tombstone, so that no replica restores the request.
        bench.end("shared", shared)
        bench.end("alone", alone)
        await until(lambda: bench.store.tombstones == ["alone"])


async def test_a_withdrawn_local_placement_releases_its_cost_once() -> None:
    bench = Bench(away=True)
    placement = await bench.place("r")
    free = bench.free
    bench.gate.withdraw("r", placement)
    bench.end("r", placement)
    assert bench.free == free + 1


@pytest.mark.parametrize(
    ("lost", "calls"), [("before", 0), ("between", 1), ("never", 1), ("never, and Redis is slow", 2)]
)
async def test_a_request_whose_answer_is_read_late_is_released_once_and_counted_once(
    lost: str, calls: int
) -> None:
    bench = Bench(away=lost == "before")
    placement = await bench.place()
    bench.end("r", placement, is_read=False, completion_tokens=None)
    if calls < 2:
        await asyncio.sleep(0)
    assert bench.counted("epp_completions_total", "outcome") == {}
    if lost == "between":
        bench.lose_redis()
    free = 0.0 if lost.startswith("never") else bench.free
    bench.end("r", placement)
    await asyncio.sleep(0)
    assert bench.counted("epp_completions_total", "outcome") == {"completed": 1}
    assert sum(bench.counted("epp_output_tokens_total", "model").values()) == 1
    assert len(bench.store.settled) == calls
    assert lost.startswith("never") or bench.free == free


async def test_an_end_that_is_reported_again_is_sent_to_redis_but_not_counted_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    placement = await bench.place()
    bench.end("r", placement)
    await asyncio.sleep(0)
    settle = bench.store.settle

    def unknown(*call: Any, **options: Any) -> Any:
        settle(*call, **options)
        return answered(SettleReply("unknown", ""))

    monkeypatch.setattr(bench.store, "settle", unknown)
    for _ in range(3):
        bench.end("r", placement)
        await asyncio.sleep(0)
    assert bench.counted("epp_completions_total", "outcome") == {"completed": 1}
    assert len(bench.store.settled) == 4
    entry = bench.gate.ledger.get("r")
    assert entry is not None
    assert entry.confirmed


async def test_an_answer_that_its_client_reads_in_time_needs_no_redis_call_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission, "_UNREAD_S", 0.0)
    bench = Bench()
    for name in ("read", "unread"):
        token = (await bench.place(name)).accounting_token
        end = Completion(name, Outcome.COMPLETED, 200, E1, *[None] * 4, accounting_token=token)
        bench.gate.answered(end._replace(is_read=False))
        if name == "read":
            bench.gate.settle(end)
    await until(lambda: bench.gate.ledger.get("unread").phase is Phase.ENDED)  # type: ignore[union-attr]
    assert [name for name, *_ in bench.store.settled] == ["read", "unread"]


@pytest.mark.parametrize("answer", ["at another replica", "here before the outage", "here in the outage"])
async def test_an_end_long_after_the_answer_releases_local_budget_if_this_replica_got_the_answer(
    monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    monkeypatch.setattr(admission, "_UNREAD_S", 0.0)
    bench = Bench(FULL)
    token = accounting_token.write(ask("r"), E1)
    end = Completion("r", Outcome.COMPLETED, 200, E1, *[None] * 4, accounting_token=token, is_late=True)
    if answer == "here before the outage":
        bench.gate.answered(end._replace(is_read=False))
    bench.lose_redis()
    free = bench.free
    if answer == "here in the outage":
        bench.gate.answered(end._replace(is_read=False))
    await asyncio.sleep(0.01)
    assert bench.free == free  # until its end Redis counts the request
    bench.gate.settle(end)
    assert bench.free - free == (answer != "at another replica")


async def test_the_end_of_an_owned_stream_releases_the_cost_of_the_request() -> None:
    # In mode `standard` the replica has the request's stream, so the stream's end needs no accounting token.
    bench = Bench(FULL)
    await bench.place("stream", stream_owned=True)
    bench.store.away = True
    waiting = await bench.wait_here("next", stream_owned=True)
    bench.end("stream")
    assert (await waiting).endpoints


async def test_an_unreachable_endpoint_gets_no_request_for_a_while() -> None:
    bench = Bench(away=True)
    placement = await bench.place("r")
    failed = placement.endpoints[0]
    bench.end("r", placement, outcome=Outcome.UPSTREAM_FAILED, status=503, served=None, failed=failed)
    for n in range(3):
        assert failed not in (await bench.place(str(n))).endpoints


async def test_a_background_task_that_fails_in_an_outage_is_counted_and_begins_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(background, "_PAUSE_S", 0.01)
    failed: list[str] = []
    background.count_failures(failed.append)
    bench = Bench(FULL, peer_client=AsyncMock(NoPeers, ask=AsyncMock(side_effect=ZeroDivisionError)))
    bench.lose_redis()
    await bench.wait_here()  # the wait makes the gate ask peers for budget
    async with running(bench.gate.failover.run()):
        await until(lambda: failed == ["budget-transfer"] * 2)


LEASE_S = 15.0  # a lease in seconds, as configured by default


@pytest.mark.parametrize(("answer", "own"), [("renewed", True), ("unknown", False), ("waiting", False)])
async def test_redis_decides_whether_a_lease_still_belongs_to_its_request(answer: Renewal, own: bool) -> None:
    bench = Bench()
    placement = await bench.place("r")
    bench.store.renewing = answer
    assert await bench.gate.confirm("r", placement, 2.0) is own
    # The call has no accounting token, because a lost lease must not be restored past the bound.
    assert bench.store.alive == [("r", "")]


@pytest.mark.parametrize("age_s", [2.0, LEASE_S + 1.0])
async def test_without_redis_a_lease_that_redis_gave_is_valid_until_it_expires(age_s: float) -> None:
    bench = Bench()
    placement = await bench.place("r")
    bench.store.deaf = True
    assert await bench.gate.confirm("r", placement, age_s) is (age_s < LEASE_S)
    # The lease takes no local budget, because the request already counts as in flight.
    assert bench.gate.failover.state is FailoverState.LOCAL
    free = bench.free
    assert await bench.gate.confirm("r", placement, age_s) is (age_s < LEASE_S)
    assert bench.free == free


async def test_without_redis_and_without_a_known_bound_no_lease_can_be_confirmed() -> None:
    bench = Bench(pulse=None)
    bench.store.deaf = True
    with pytest.raises(StateUnavailable):
        await bench.gate.confirm("r", Placement((E1,), "", 1), 2.0)


async def test_the_lease_of_a_request_placed_by_local_budget_never_expires() -> None:
    bench = Bench(wait_s=PATIENT_S, away=True)
    placement = await bench.place("mine")
    free = bench.free
    assert await bench.gate.confirm("mine", placement, 2 * LEASE_S)
    assert bench.free == free
    # While resyncing, a local lease is confirmed and restored in Redis; an expired shared lease is refused.
    async with resyncing(bench):
        bench.store.renewing = "unknown"
        bench.store.alive.clear()
        assert await bench.gate.confirm("mine", placement, 2 * LEASE_S)
        assert not await bench.gate.confirm("old", placement, 2 * LEASE_S)
        assert bench.store.alive == [("mine", placement.accounting_token), ("old", "")]


async def test_a_replica_counts_as_cut_off_while_it_lacks_redis_and_a_peer_reaches_redis() -> None:
    peers, clock = DirectPeers(), [0.0]
    a = Bench(FULL, config={"leases": {"inflight": "2s", "access_log_interval": "1s"}}, peer_client=peers)
    b = Bench(FULL, replica="b", clock=lambda: clock[0])
    a.lose_redis()
    waiting = await a.wait_here()
    await until(lambda: peers.asked)  # the peer `b` has not answered yet
    assert not a.gate.is_cut_off
    assert not waiting.done()
    peers.gate = b.gate
    with pytest.raises(StateUnavailable):  # Envoy must try another replica
        await waiting
    assert a.gate.is_cut_off
    clock[0] += 60.0  # Redis answers replica `b` no longer
    await until(lambda: not a.gate.is_cut_off)
    b.gate.failover.heartbeat_answered(FULL)
    await until(lambda: a.gate.is_cut_off)
    a.answer_heartbeats()
    assert not a.gate.is_cut_off


@pytest.mark.parametrize(
    "peer", ["still lacks Redis", "uses Redis", "has used Redis", "used Redis until now"]
)
async def test_after_a_pause_a_replica_uses_its_budget_only_if_no_peer_has_used_redis_meanwhile(
    peer: str,
) -> None:
    peers, loop, skipped_s = DirectPeers(), asyncio.get_running_loop(), [0.0]
    options = {"wait_s": 0.0, "clock": lambda: loop.time() + skipped_s[0]}
    short = {"leases": {"inflight": "2s", "access_log_interval": "1s"}}
    a, b = Bench(config=short, peer_client=peers, **options), Bench(replica="b", **options)
    b.tell_peers(["b:1"])
    peers.gate = b.gate
    if peer != "used Redis until now":
        a.lose_redis()
        b.lose_redis()
    await a.place("before")
    async with running(b.gate.failover.run()):
        skipped_s[0] += 10.0
        a.stand_still()
        if peer == "used Redis until now":
            a.lose_redis()
            b.lose_redis()
        elif peer != "still lacks Redis":
            b.answer_heartbeats()
            await until(lambda: b.gate.failover.outage is None)
        if peer == "has used Redis":
            b.lose_redis()
        waiting = await a.wait_here("after")
        if peer == "still lacks Redis":
            await waiting
        else:
            with pytest.raises(StateUnavailable):  # Envoy must try another replica
                await waiting


@pytest.mark.parametrize("redis", ["answers", "is away"])
async def test_a_replica_that_shuts_down_refuses_waiting_and_later_requests(redis: str) -> None:
    bench = Bench(FULL)
    if redis == "answers":
        waiting = await bench.wait_in_redis("r")
    else:
        bench.gate.failover.redis_lost("refused", "away")
        waiting = await bench.wait_here("r")
    bench.gate.shut_down()
    for refused in (waiting, bench.start("later")):
        with pytest.raises(ShuttingDown):
            await refused
    assert not waiting.cancelled()
    assert bench.store.cancelled == ([("r", "cancelled")] if redis == "answers" else [])
