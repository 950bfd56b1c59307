"""The gate that goes on without the shared state: going over, working alone, coming back."""

import asyncio
from dataclasses import replace

import pytest
from failover_bench import E1, E2, PULSE, Bench, eventually, watched
from local_requests import ask
from metrics_page import page_of, samples
from scripted_store import until

from picker_fleet.admission import accounting_token
from picker_fleet.errors import ExpiredTtl, RequestError, StateUnavailable
from picker_fleet.failover.gate import FailoverState
from picker_fleet.request import Alive, Band, Completion, Outcome
from picker_fleet.state.store import Decision

PATIENT_S = 60.0  # a resync lasts until the other replica is back, however slow the machine is


async def test_given_a_share_when_decisions_fail_then_requests_are_placed_within_it() -> None:
    # Given 6 of 10 free among two replicas
    bench = Bench()
    bench.store.away = True
    # When requests come
    placed = [await bench.gate.admit(ask(str(n)), stream_owned=False) for n in range(3)]
    # Then three are placed, where there is least, with fallbacks and a accounting token
    assert bench.gate.state is FailoverState.LOCAL
    assert bench.free == 0.0
    assert placed[0].endpoints == (E2, E1)
    assert {each.endpoints[0] for each in placed} <= {E1, E2}
    assert all(each.accounting_token for each in placed)
    # And what may have been asked of the shared state for the first is taken back
    assert bench.store.cancelled == [("0", "cancelled")]
    # When one ends, whoever placed it, then the next one goes
    waiting = asyncio.create_task(bench.gate.admit(ask("next"), stream_owned=False))
    await until(lambda: bench.queued == 1)
    bench.end("from before", placed[0])
    assert (await waiting).endpoints
    assert samples(bench.metrics)[("epp_degraded",)] == 1


async def test_given_a_queue_that_is_off_when_alone_then_everything_goes() -> None:
    # Given a share of 3, and a queue that is switched off
    bench = Bench(config={"request_queue_controller": {"enabled": False}})
    bench.store.away = True
    # When far more come, then all are placed, evenly as far as this replica knows
    placed = [await bench.gate.admit(ask(str(n)), stream_owned=False) for n in range(20)]
    status = bench.gate.status()
    assert bench.gate.state is FailoverState.LOCAL
    assert status is not None
    assert (status.queued, status.free, status.let_go) == (0, 3.0, 20)
    first = [each.endpoints[0] for each in placed]
    assert (first.count(E1), first.count(E2)) == (9, 11)  # which had 3 and 1 before
    # And what has ended gives nothing back that was never taken
    bench.end("0", placed[0])
    assert bench.free == 3.0


async def test_given_refusals_that_envoy_tells_of_when_alone_then_they_are_no_ends() -> None:
    bench = Bench()
    bench.store.away = True
    placement = await bench.gate.admit(ask("placed"), stream_owned=False)
    # When the log tells of one that was never placed, and twice of one that was
    bench.end("refused")
    for _ in range(2):
        bench.end("placed", placement)
    # Then one end is counted
    counted = {
        key: value for key, value in samples(bench.metrics).items() if key[0] == "epp_completions_total"
    }
    assert sum(counted.values()) == 1
    # And Redis is told of it alone
    async with watched(bench):
        bench.answer_heartbeats()
        await eventually(lambda: not bench.gate.degraded)
    assert [name for name, *_ in bench.store.settled] == ["placed"]


async def test_given_no_bound_known_when_decisions_fail_then_refused() -> None:
    bench = Bench(pulse=None)
    bench.store.away = True
    with pytest.raises(StateUnavailable):
        await bench.gate.admit(ask(), stream_owned=False)
    assert bench.gate.status() is None


async def test_given_what_was_placed_since_the_last_beat_when_lost_then_it_counts() -> None:
    bench = Bench()
    for n in range(2):
        await bench.gate.admit(ask(f"shared {n}"), stream_owned=False)
    bench.store.away = True
    await bench.gate.admit(ask("alone"), stream_owned=False)
    assert bench.free == 0.0


async def test_given_ends_that_redis_has_not_seen_when_lost_then_they_free_places() -> None:
    bench = Bench(replace(PULSE, stock=10.0))
    placement = await bench.gate.admit(ask("r"), stream_owned=False)
    # Given an end that is not on its way yet, and one that may have arrived
    bench.store.answering = False
    bench.end("r", placement)
    bench.end("sent", placement)
    bench.store.unsent = ["r"]
    bench.store.away = True
    await bench.gate.admit(ask("alone"), stream_owned=False)
    assert bench.free == 0.0
    assert bench.gate.status().let_go == 1  # type: ignore[union-attr]


async def test_given_a_paused_fleet_when_redis_is_lost_then_nothing_is_let_go() -> None:
    bench = Bench(replace(PULSE, paused=True))
    bench.store.away = True
    task = asyncio.create_task(bench.gate.admit(ask(), stream_owned=False))
    await until(lambda: bench.queued == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_given_waiting_requests_when_redis_is_silent_then_they_go_over_with_their_age() -> None:
    bench = Bench()
    async with watched(bench):
        # Given one that waits for its turn in the shared queue, and one whose admission is not answered
        bench.store.admitting = [Decision("queued", "30000")]
        queued = asyncio.create_task(bench.gate.admit(ask("queued"), stream_owned=False))
        await until(lambda: bench.shared.waiting == 1)
        bench.store.silent = True
        asked = asyncio.create_task(bench.gate.admit(ask("asked"), stream_owned=False))
        await until(lambda: bench.shared.waiting == 2)
        # When that silence is proven
        bench.gate.redis_lost("silence", "no answer in time")
        # Then both are placed alone, and taken back from the shared queue
        assert (await queued).endpoints
        assert (await asked).endpoints
    assert sorted(bench.store.cancelled) == [("asked", "cancelled"), ("queued", "cancelled")]


async def test_given_an_admission_without_an_answer_when_its_time_is_up_then_it_is_refused() -> None:
    # Given a Redis that is silent, and not yet for long enough
    bench = Bench()
    async with watched(bench):
        bench.store.silent = True
        # When a request's time is up, then it has its answer, and is taken back
        with pytest.raises(ExpiredTtl):
            await bench.gate.admit(ask("r", ttl_s=0.1), stream_owned=False)
        assert bench.gate.state is FailoverState.SHARED
    assert bench.store.cancelled == [("r", "cancelled")]


async def test_given_one_that_leaves_again_when_it_comes_back_then_more_beats_are_wanted() -> None:
    bench = Bench(wait_s=PATIENT_S)
    wanted = []
    async with watched(bench):
        for _ in range(6):
            bench.gate.redis_lost("silence", "no answer in time")
            beats = 0
            while bench.gate.state is FailoverState.LOCAL:
                bench.gate.heartbeat_answered(PULSE)
                beats += 1
            wanted.append(beats)
            await eventually(lambda: bench.gate.state is FailoverState.SHARED)
    # Then up to a limit
    assert wanted == [2, 4, 8, 16, 16, 16]
    found = samples(bench.metrics)
    changes = {key: n for key, n in found.items() if key[0] == "epp_failover_transitions_total"}
    assert sorted(changes.values()) == [0, 0, 6, 6, 6]
    assert found["epp_failover_transitions_total", "cause=silence", "to=local"] == 6


async def test_given_a_heartbeat_that_is_missed_when_others_come_back_then_they_count_from_there() -> None:
    bench = Bench(wait_s=PATIENT_S)
    bench.gate.redis_lost("refused", "refused")
    bench.gate.heartbeat_answered(PULSE)
    bench.gate.heartbeat_missed()
    bench.gate.heartbeat_answered(PULSE)
    assert bench.gate.state is FailoverState.LOCAL


@pytest.mark.parametrize("client_first", [False, True])
async def test_given_a_client_that_leaves_as_redis_is_lost_then_its_request_is_not_placed(
    client_first: bool,
) -> None:
    bench = Bench()
    async with watched(bench):
        bench.store.admitting = [Decision("queued", "30000")]
        task = asyncio.create_task(bench.gate.admit(ask("r"), stream_owned=False))
        await until(lambda: bench.shared.waiting == 1)
        # When both cancel the same wait, in either order
        cancels = [bench.shared.give_up, task.cancel]
        for cancel in reversed(cancels) if client_first else cancels:
            cancel()
        # Then the client's word counts, and what was asked for is taken back
        with pytest.raises(asyncio.CancelledError):
            await task
    assert bench.store.cancelled == [("r", "cancelled")]


def counted(bench: Bench, name: str, label: str) -> dict[str, float]:
    """What has been counted of a family, by the value of one of its labels."""
    found = (
        ({**dict(part.split("=") for part in key[1:])}, n)
        for key, n in samples(bench.metrics).items()
        if key[0] == name
    )
    return {labels[label]: n for labels, n in found if n}


def waits(bench: Bench) -> dict[str, float]:
    return counted(bench, "epp_queue_latency_seconds_count", "success")


@pytest.mark.parametrize("news", ["expired", "preempted", "evicted"])
async def test_given_a_wait_in_the_shared_queue_when_refused_then_it_counts_once_as_failed(news: str) -> None:
    bench = Bench()
    bench.store.admitting = [Decision("queued", "30000")]
    task = asyncio.create_task(bench.gate.admit(ask("r"), stream_owned=False))
    await until(lambda: bench.shared.waiting == 1)
    bench.shared.on_notification(news, "r")
    with pytest.raises(RequestError):
        await task
    assert waits(bench) == {"false": 1}


@pytest.mark.parametrize("outcome", [Outcome.COMPLETED, Outcome.UPSTREAM_FAILED])
async def test_given_a_wait_that_crosses_over_and_back_when_its_request_ends_then_it_counts_once_by_its_outcome(  # noqa: E501
    outcome: Outcome,
) -> None:
    # Given one that waits in the shared queue of a fleet whose places are all taken
    bench = Bench(replace(PULSE, stock=10.0))
    bench.store.admitting = [Decision("queued", "30000")]
    task = asyncio.create_task(bench.gate.admit(ask("r"), stream_owned=False))
    await until(lambda: bench.shared.waiting == 1)
    # When Redis goes, and it waits on by itself
    bench.store.away = True
    other = asyncio.create_task(bench.gate.admit(ask("other"), stream_owned=False))
    await until(lambda: bench.queued == 2)
    # Then no client has left, and nothing is counted of a wait that goes on
    assert counted(bench, "epp_requests_cancelled_total", "model") == waits(bench) == {}
    # When Redis is back, and it is handed over and placed
    bench.store.away = False
    bench.store.admitting = [Decision("placed", E1)]
    async with watched(bench):
        bench.answer_heartbeats()
        placement = await task
        await other
    # Then it has not gone past the queue, and whether it succeeds is not known yet
    assert counted(bench, "epp_bypass_total", "model") == waits(bench) == {}
    # And it counts by its end
    waited_s = placement.waited_s
    assert waited_s is not None
    bench.gate.settle(
        Completion("r", outcome, 200, E1, 1, 1, 0.1, 0.1, "", placement.accounting_token, 0.1, waited_s, "m")
    )
    await until(lambda: waits(bench))
    assert waits(bench) == {"true" if outcome is Outcome.COMPLETED else "false": 1}


@pytest.mark.parametrize("how", ["expired", "preempted", "left"])
async def test_given_a_wait_without_redis_when_it_comes_to_nothing_then_it_counts_once_as_failed(
    how: str,
) -> None:
    # Given a replica without budget, with room for one request in its queue
    config = {"fair_request_queue": {"total_capacity": 2, "flow_capacity": 2}}
    bench = Bench(replace(PULSE, stock=10.0), config)
    bench.store.away = True
    waits_s = 1.0 if how == "expired" else 30.0
    task = asyncio.create_task(
        bench.gate.admit(ask("r", band=Band.SHEDDABLE, ttl_s=waits_s), stream_owned=False)
    )
    await until(lambda: bench.queued == 1)
    # When its time is up, it has to make room, or its client leaves
    if how == "left":
        task.cancel()
    elif how == "preempted":
        other = asyncio.create_task(bench.gate.admit(ask("o", band=Band.CRITICAL), stream_owned=False))
    # Then its wait is one that failed
    with pytest.raises((RequestError, asyncio.CancelledError)):
        await task
    assert waits(bench) == {"false": 1}
    if how == "preempted":
        other.cancel()


async def test_given_a_process_that_stood_still_when_its_question_was_given_up_then_it_asks_again() -> None:
    bench = Bench()
    # Given that nothing ran in it for a while, as between SIGSTOP and SIGCONT, and its question was given up
    bench.stand_still()
    bench.store.away = True
    asking = asyncio.create_task(bench.gate.admit(ask("r"), stream_owned=False))
    await eventually(lambda: len(bench.store.ages_s) >= 3)
    # Then it does not go by itself: it was away, not Redis
    assert bench.gate.state is FailoverState.SHARED
    bench.store.away = False
    assert (await asking).endpoints == (E1,)
    assert bench.gate.state is FailoverState.SHARED


async def test_given_a_process_that_stood_still_when_a_stream_ends_then_it_is_not_asked_for() -> None:
    bench = Bench()
    # Given two streams that came while nothing ran in it
    bench.stand_still()
    given_up, wanted = (
        asyncio.create_task(bench.gate.admit(ask(name), stream_owned=False)) for name in ("gone", "here")
    )
    # When Envoy has given one of them up since
    await asyncio.sleep(0)
    given_up.cancel()
    # Then that one, which another replica may have by now, is not asked for
    with pytest.raises(asyncio.CancelledError):
        await given_up
    assert (await wanted).endpoints == (E1,)
    assert len(bench.store.ages_s) == 1


async def test_given_a_process_that_stood_still_on_its_way_back_when_redis_goes_again_then_alone_again() -> (
    None
):
    bench = Bench(wait_s=PATIENT_S)
    bench.store.away = True
    await bench.gate.admit(ask("r"), stream_owned=False)
    bench.tell_peers(b=True)
    async with watched(bench):
        bench.store.away = False
        bench.answer_heartbeats()
        # Given that nothing ran in it for a while
        bench.stand_still()
        # When a decision cannot be had, then it goes by itself, and does not wait on its way for ever
        bench.store.away = True
        assert (await bench.gate.admit(ask("s"), stream_owned=False)).endpoints
        assert bench.gate.state is FailoverState.LOCAL


async def test_given_redis_back_when_all_have_told_then_shared_again_and_nothing_is_forgotten() -> None:
    bench = Bench()
    bench.store.away = True
    placed = [await bench.gate.admit(ask(str(n)), stream_owned=False) for n in range(3)]
    bench.end("over", placed[0])
    placed.append(await bench.gate.admit(ask("3"), stream_owned=False))
    waiting = asyncio.create_task(bench.gate.admit(ask("waits"), stream_owned=False))
    await until(lambda: bench.queued == 1)
    bench.gate.renew(Alive("old", E1, placed[0].accounting_token))
    bench.tell_peers(b=True)
    async with watched(bench):
        await eventually(lambda: bench.pokes)
        # When it answers probes again
        bench.store.away = False
        bench.answer_heartbeats()
        await eventually(lambda: not bench.gate.degraded)
        # Then all that is over is buried, and all that runs is told
        assert bench.store.buried == ["over"]
        assert sorted(bench.store.renewed) == ["0", "1", "2", "3", "old"]
        # And while another replica has not, a place is needed here and there
        assert bench.gate.state is FailoverState.RESYNCING
        assert not waiting.done()
        bench.end("0", placed[0])
        await waiting
        assert bench.store.ages_s[-1] > 0.0
        assert [name for name, _, _ in bench.store.settled] == ["over", "0"]
        # And when every replica has, it is over
        bench.tell_peers()
        await eventually(lambda: bench.gate.status() is None)
    assert [name for name, _, _ in bench.store.settled] == ["over", "0", "over", "0"]
    assert samples(bench.metrics)[("epp_degraded",)] == 0
    bench.end("1", placed[1])
    assert bench.store.settled[-1][0] == "1"


async def test_given_a_way_out_and_back_when_requests_go_past_the_queue_then_each_counts_once() -> None:
    bench = Bench(wait_s=PATIENT_S)
    # Given one let in by the shared state, and one without it
    await bench.gate.admit(ask("shared"), stream_owned=False)
    bench.store.away = True
    await bench.gate.admit(ask("alone"), stream_owned=False)
    bench.tell_peers(b=True)
    async with watched(bench):
        bench.store.away = False
        bench.answer_heartbeats()
        await eventually(lambda: bench.gate.state is FailoverState.RESYNCING and not bench.gate.degraded)
        # When one is let in on the way back, by this replica's purse and the shared state
        await bench.gate.admit(ask("both"), stream_owned=False)
        assert bench.gate.state is FailoverState.RESYNCING
    # Then there are three
    assert page_of(bench.metrics).count(b"epp_bypass_total{") == 1
    assert b'epp_bypass_total{model="m",target_model="m"} 3.0' in page_of(bench.metrics)


async def test_given_redis_back_when_it_goes_again_before_all_have_told_then_alone_again() -> None:
    bench = Bench()
    bench.store.away = True
    await bench.gate.admit(ask("a"), stream_owned=False)
    free = bench.free
    bench.tell_peers(b=True)
    async with watched(bench):
        bench.answer_heartbeats()
        await eventually(lambda: bench.gate.state is FailoverState.RESYNCING and not bench.gate.degraded)
        # When the next decision fails, then the place it had paid for is spent alone
        assert (await bench.gate.admit(ask("b"), stream_owned=False)).endpoints
        assert bench.gate.state is FailoverState.LOCAL
        assert bench.free == free - 1


async def test_given_ends_heard_on_the_way_back_when_it_goes_again_then_a_part_is_kept() -> None:
    # Given a replica on its way back, that has heard more ends than its part of the bound
    bench = Bench(replace(PULSE, stock=10.0), wait_s=PATIENT_S)
    placed = await bench.gate.admit(ask("from before"), stream_owned=False)
    bench.store.away = True
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await bench.gate.admit(ask("alone"), stream_owned=False)
    bench.store.away = False
    bench.tell_peers(b=True)
    async with watched(bench):
        bench.answer_heartbeats()
        await eventually(lambda: bench.gate.state is FailoverState.RESYNCING and not bench.gate.degraded)
        for n in range(8):
            bench.end(f"theirs {n}", placed)
        assert bench.free == 8
        # When the shared state, which has given those places to others, goes again
        bench.gate.heartbeat_answered(replace(PULSE, stock=10.0))
        bench.store.away = True
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await bench.gate.admit(ask("once more"), stream_owned=False)
        # Then its part of what was free is all it has
        assert bench.gate.state is FailoverState.LOCAL
        assert bench.free == 0


@pytest.mark.parametrize("pulsed", [False, True])
async def test_given_ends_heard_before_it_has_told_what_runs_when_it_goes_again_then_they_pay_nobody(
    pulsed: bool,
) -> None:
    # Given a full pool, and a replica that Redis answers again, which has heard ends and told nothing yet
    full = replace(PULSE, stock=10.0)
    bench = Bench(full, wait_s=PATIENT_S)
    placed = await bench.gate.admit(ask("before"), stream_owned=False)
    bench.gate.redis_lost("silence", "it went")
    bench.tell_peers(b=True, told=())
    async with watched(bench):
        bench.answer_heartbeats(full)
        await eventually(lambda: bench.gate.state is FailoverState.RESYNCING)
        for n in range(4):
            bench.end(f"theirs {n}", placed)
        assert (bench.gate.degraded, bench.free) == (True, 4)
        # When the shared state, which has heard them too and given the places to others, goes again
        if pulsed:
            bench.gate.heartbeat_answered(full)
        bench.gate.redis_lost("silence", "it went again")
        # Then they are not this replica's to give
        assert bench.free == 0


@pytest.mark.parametrize("shared", [False, True])
async def test_given_requests_paid_for_that_wait_in_common_when_it_goes_again_then_they_are_not_let_go(
    shared: bool,
) -> None:
    # Given a replica on its way back whose places are all paid to requests that wait in the shared queue
    bench = Bench(wait_s=PATIENT_S)
    bench.store.away = True
    await bench.gate.admit(ask("alone"), stream_owned=False)
    bench.store.away = False
    bench.tell_peers(b=True)
    async with watched(bench):
        bench.answer_heartbeats()
        await eventually(lambda: bench.gate.state is FailoverState.RESYNCING and not bench.gate.degraded)
        bench.store.admitting = [Decision("queued", "30000")]
        free = int(bench.free)
        waiting = [
            asyncio.create_task(bench.gate.admit(ask(f"w{n}"), stream_owned=False)) for n in range(free)
        ]
        await until(lambda: bench.shared.waiting == free > 0)
        if shared:
            bench.tell_peers()
            await eventually(lambda: bench.gate.state is FailoverState.SHARED)
        # When the shared state, in which others have filled the stock, goes again
        bench.gate.heartbeat_answered(replace(PULSE, stock=10.0))
        bench.gate.redis_lost("silence", "it went again")
        await until(lambda: bench.queued == free)
        # Then what they had paid is not theirs any more
        assert not any(task.done() for task in waiting)
        assert bench.free == 0
        for task in waiting:
            task.cancel()


async def test_given_redis_not_reached_yet_when_watched_then_the_first_beat_is_the_beginning() -> None:
    bench = Bench(pulse=None)
    bench.gate.redis_lost("refused", "not there yet")
    bench.gate.heartbeat_answered(PULSE)
    assert bench.gate.state is FailoverState.SHARED


async def test_accounting_token_of_a_local_placement_restores_nothing_once_its_end_is_known() -> None:
    bench = Bench()
    # Given one let in by the shared state, and one without it, whose accounting token says when
    shared = await bench.gate.admit(ask("shared"), stream_owned=False)
    bench.store.away = True
    alone = await bench.gate.admit(ask("alone"), stream_owned=False)
    assert not accounting_token.is_alone(shared.accounting_token)
    assert accounting_token.is_alone(alone.accounting_token)
    async with watched(bench):
        bench.store.away = False
        bench.answer_heartbeats()
        await eventually(lambda: bench.gate.state is FailoverState.SHARED)
        bench.store.buried.clear()
        # When the shared state takes their ends, then the second is buried, so that nobody brings it back
        bench.end("shared", shared)
        bench.end("alone", alone)
        await eventually(lambda: bench.store.buried == ["alone"])


async def test_given_a_placement_alone_when_taken_back_then_its_place_is_free_once() -> None:
    bench = Bench()
    bench.store.away = True
    placement = await bench.gate.admit(ask("r"), stream_owned=False)
    free = bench.free
    bench.gate.withdraw("r", placement)
    bench.end("r", placement)
    assert bench.free == free + 1


async def test_given_a_stream_held_here_when_it_ends_alone_then_its_place_is_free() -> None:
    # Given a stream (`standard`) from before, whose end brings no accounting token
    bench = Bench(replace(PULSE, stock=10.0))
    await bench.gate.admit(ask("stream"), stream_owned=True)
    bench.store.away = True
    waiting = asyncio.create_task(bench.gate.admit(ask("next"), stream_owned=True))
    await until(lambda: bench.queued == 1)
    bench.end("stream")
    assert (await waiting).endpoints


async def test_given_an_endpoint_that_cannot_be_connected_to_when_alone_then_it_is_left_alone() -> None:
    bench = Bench()
    bench.store.away = True
    placement = await bench.gate.admit(ask("r"), stream_owned=False)
    failed = placement.endpoints[0]
    bench.gate.settle(
        Completion(
            "r", Outcome.UPSTREAM_FAILED, 503, None, None, None, 0.1, 0.1, failed, placement.accounting_token
        )
    )
    for n in range(3):
        assert failed not in (await bench.gate.admit(ask(str(n)), stream_owned=False)).endpoints
