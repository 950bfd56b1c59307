"""Admission of requests over a scripted store: refusals, waits, repeated queueing, pauses, settled costs."""

import asyncio
from typing import Any

import admission_bench
import pytest
from admission_bench import E1, QUEUED
from background import until
from choosers import chooser_of, fleet_with
from local_requests import ask
from metrics_page import samples
from scripted_store import answered
from tables import cases

from picker_fleet.admission import shared_queue
from picker_fleet.domain import errors
from picker_fleet.domain.bands import Band
from picker_fleet.domain.request import Alive, Completion, Endpoint, Outcome, Placement
from picker_fleet.endpoints.snapshot import Snapshot, SnapshotCell
from picker_fleet.scheduling.answer_comparison import AnswerComparison
from picker_fleet.state import accounting_token
from picker_fleet.state.replies import AnyVerdict, Notification, Placed, Verdict
from picker_fleet.state.store import parse_notification, parse_verdict

TOKENS = {
    "request_queue_controller": {"unit": "tokens", "watermark_per_backend": 4096},
    "fair_request_queue": {"default_answer_tokens": 256},
}
GONE = parse_verdict("gone")
PLACED = Placed((E1,))


WAITING = ("epp_queue_length", "model=m", "target_model=m-v2")
# Metric counters of requests that leave the queue unserved, and the labels of each.
REMOVED = {
    "epp_preemptions_total": ("band=Sheddable",),
    "epp_evictions_total": ("band=Sheddable",),
    "epp_requests_expired_total": WAITING[1:],
}


class Bench(admission_bench.Bench):
    """Admission of requests for the model variant `m-v2` in the lowest band."""

    async def place(self, request_id: str = "r", *, stream_owned: bool = False, **changes: Any) -> Placement:
        own = {"target_model": "m-v2", "band": Band.SHEDDABLE}
        return await super().place(request_id, stream_owned=stream_owned, **(own | changes))

    def count(self, *sample: str) -> float:
        return samples(self.metrics).get(sample, 0.0)

    async def queued(self, *placing: AnyVerdict) -> asyncio.Task[Placement]:
        """Queue a request; the store will answer calls of `place` with the verdicts `placing`."""
        self.store.placing = list(placing)
        return await self.wait_in_redis()

    def grant(self) -> None:
        assert self.gate.queue.notified(Notification("r", Verdict.GRANTED))

    async def being_placed(self, *placing: AnyVerdict) -> asyncio.Task[Placement]:
        """Queue and grant a request, which then waits for the store's reply to `place`."""
        task = await self.queued(*placing)
        self.store.placement.clear()
        self.grant()
        await self.store.placed.wait()
        return task


@pytest.fixture
async def bench() -> Bench:
    return Bench()


@cases("detail, error, reason", {
    "no endpoints": ("no-endpoints 1", errors.NoEndpoints, "rejected-no-endpoints"),
    "saturated": ("saturated 7", errors.Saturated, "rejected-saturated"),
    "a full queue": ("total-capacity 60", errors.TotalCapacity, "rejected-saturated"),
    "a full flow": ("insufficient-flow-capacity 3", errors.InsufficientFlowCapacity, "rejected-saturated"),
})  # fmt: skip
async def test_a_refusal_has_its_own_retry_after(
    bench: Bench, detail: str, error: type[errors.RequestError], reason: str
) -> None:
    bench.store.admitting = [parse_verdict(f"refused {detail}")]
    with pytest.raises(error) as caught:
        await bench.place()
    code, seconds = detail.replace("-", "_").split()
    assert (caught.value.retry_after_s, caught.value.reason) == (int(seconds), reason)
    assert bench.count("epp_queue_push_errors_total", f"error_type={code}", *WAITING[1:]) == 1


@cases("notification, error, reason, counter", {
    "preempted": ("preempted", errors.Preempted, "evicted-queue-pressure", "epp_preemptions_total"),
    "evicted": ("evicted", errors.Evicted, "evicted-queue-pressure", "epp_evictions_total"),
    "expired": ("expired", errors.ExpiredTtl, "rejected-ttl-expired", "epp_requests_expired_total"),
})  # fmt: skip
async def test_a_queued_request_that_is_removed_is_answered_at_once(
    bench: Bench, notification: str, error: type[errors.Dropped], reason: str, counter: str
) -> None:
    # The shared queue takes 9 s to drain.
    bench.gate.queue.retry_after_s = 9
    task = await bench.queued()
    bench.gate.queue.notified(Notification("r", Verdict(notification)))
    with pytest.raises(error) as caught:
        await task
    assert (caught.value.status, caught.value.reason) == (503, reason)
    assert caught.value.retry_after_s == 9
    assert {name: bench.count(name, *labels) for name, labels in REMOVED.items()} == {
        name: float(name == counter) for name in REMOVED
    }
    assert (bench.count(*WAITING), bench.waits) == (0, {"false": 1})
    assert bench.store.cancelled == []


async def test_a_request_is_split_also_while_its_replica_knows_no_decode_endpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cell, tries = SnapshotCell(), list[tuple[str, str]]()
    cell.publish(Snapshot("1", (Endpoint(E1, prefills=True, decodes=False),)))
    bench = Bench(chooser=chooser_of(cell, fleet_with("in-flight", stages={"threshold": 0})))

    def admit(*call: Any) -> asyncio.Future[AnyVerdict]:
        tries.append((call[2], call[4]))
        return answered(parse_verdict("refused no-endpoints 1") if len(tries) == 1 else PLACED)

    monkeypatch.setattr(bench.store, "admit", admit)
    await bench.place(can_split=True, body_bytes=4000)
    assert tries == [("", f"{E1}=0.0000"), ("*", f"{E1}=0.0000")], "the second try is among all endpoints"


async def test_a_request_of_another_flow_cannot_take_the_id_of_a_granted_request(bench: Bench) -> None:
    task = await bench.queued(GONE)
    bench.grant()
    with pytest.raises(errors.RequestIdTaken):  # the task of the granted request has not yet run
        await bench.place(flow="other")
    bench.store.admitting = [PLACED]
    assert (await task).endpoints == (E1,)


@pytest.mark.parametrize(
    "line",
    [
        "unknown r",
        "",
        "placed",
        "placed r",
        "placed 1 e:1 r",
        "refused x",
        "refused odd 1\x1f r",
        "refused over-limit x\x1f r",
        "queued 5",
        "gone r",
        "unknown-pool r",
    ],
)
def test_a_malformed_notification_from_redis_is_ignored(line: str) -> None:
    what, _, about = line.partition(" ")
    assert parse_notification(what, about) is None


@pytest.mark.parametrize("when", ["waiting", "granted", "admitted"])
async def test_a_request_past_a_deadline_set_by_its_client_is_answered_504(bench: Bench, when: str) -> None:
    bench.store.admitting = [QUEUED if when != "admitted" else parse_verdict("expired")]
    bench.store.placing = [parse_verdict("expired")]
    task = bench.start(ttl_s=0.25, by_client=True)
    if when != "admitted":
        await until(lambda: bench.gate.queue.waiting)
        verdict = Verdict.EXPIRED if when == "waiting" else Verdict.GRANTED
        bench.gate.queue.notified(Notification("r", verdict))
    # The request is not counted as expired in the queue.
    with pytest.raises(errors.DeadlineExceeded, match=r"deadline of 0\.25 s") as caught:
        await task
    assert (caught.value.status, caught.value.reason) == (504, "rejected-context-cancelled")
    assert not any(bench.count(name, *labels) for name, labels in REMOVED.items())


async def test_a_request_that_is_queued_again_waits_for_the_next_grant(bench: Bench) -> None:
    task = await bench.queued(QUEUED, PLACED)
    bench.grant()
    await until(lambda: bench.store.placing == [PLACED])

    # After the second grant the request is placed, without a second admission.
    bench.grant()
    assert (await task).endpoints == (E1,)
    assert len(bench.store.admitted) == 1


async def test_a_grant_that_arrives_with_the_reply_that_queues_again_is_not_lost(bench: Bench) -> None:
    task = await bench.being_placed(QUEUED, PLACED)

    # The next grant arrives together with the reply that queues the request again.
    bench.store.placement.set()
    bench.grant()

    assert (await task).endpoints == (E1,)


async def test_a_request_that_is_being_placed_is_not_registered_in_redis_again(bench: Bench) -> None:
    task = await bench.being_placed(PLACED)
    assert await bench.gate.queue.register_again()
    assert len(bench.store.admitted) == 1
    bench.store.placement.set()
    await task


async def test_a_request_that_is_placed_before_its_registration_is_not_admitted_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_queue, "_CHUNK", 1)
    first, second = await bench.queued(PLACED), await bench.wait_in_redis("second")
    bench.store.silent = True
    registering = asyncio.create_task(bench.gate.queue.register_again())
    await until(lambda: len(bench.store.ages_s) == 3)
    # While Redis has yet to answer for the first request, the second request is placed.
    bench.gate.queue.notified(Notification("second", Verdict.GRANTED))
    await second
    # The registration of the first request is not awaited once the request has got its turn.
    bench.grant()
    assert await registering
    assert len(bench.store.ages_s) == 3
    await first


async def test_after_a_pause_the_request_of_an_ended_stream_is_not_admitted_again(bench: Bench) -> None:
    # During the pause another replica has taken the granted request.
    task = await bench.queued(GONE)
    bench.gate.queue.pause_detector.mark_resumed()
    bench.grant()
    await bench.store.placed.wait()
    # Envoy has ended the request's stream.
    await asyncio.sleep(0)
    task.cancel()
    # Another stream may own the request by now, so this stream does not admit the request again.
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(bench.store.admitted) == 1


async def test_after_a_pause_only_requests_of_existing_streams_are_registered(bench: Bench) -> None:
    task = await bench.queued()
    bench.gate.queue.pause_detector.mark_resumed()
    # Envoy ends the stream before the replica registers its request again.
    registering = asyncio.create_task(bench.gate.queue.register_again())
    for _ in range(3):
        await asyncio.sleep(0)
    task.cancel()
    assert await registering
    assert len(bench.store.admitted) == 1


async def test_access_log_entries_that_are_read_just_after_a_pause_renew_no_lease(bench: Bench) -> None:
    bench.gate.renew(Alive("before", E1, "token"))
    bench.gate.queue.pause_detector.mark_resumed()
    bench.gate.renew(Alive("after", E1, "token"))
    assert bench.store.alive == [("before", "token")]


async def test_an_answer_that_stops_growing_renews_its_lease_half_as_often_and_without_accounting_token(
    bench: Bench,
) -> None:
    # The shared state of the last epoch may have lost the request, and so gets the token.
    for epoch, answer_bytes in zip("1111112", (0, 0, 5, 5, 5, 9, 9), strict=True):
        bench.store.epoch = epoch
        bench.gate.renew(Alive("r", E1, "token", answer_bytes=answer_bytes))
    assert [token for _, token in bench.store.alive] == ["token", "token", "token", "", "token", "token"]


async def test_an_older_stream_ends_when_a_newer_stream_queues_the_same_request_again(bench: Bench) -> None:
    older = await bench.being_placed(QUEUED, PLACED)

    # Envoy sends the request again on a newer stream; Redis queues the older stream's request again.
    newer = bench.start()
    await until(lambda: len(bench.store.admitted) == 2)
    bench.store.placement.set()
    with pytest.raises(errors.ClientGone):
        await older

    bench.grant()
    assert (await newer).endpoints == (E1,)


@cases("in_tokens, status, prompt, answer, actual, learned", {
    "in requests": (False, 200, 7, 100, None, None),
    "in tokens": (True, 200, 7, 100, 107.0, 100),
    "an unknown prompt": (True, 200, None, 100, None, 100),
    "an unknown answer": (True, 200, 7, None, None, None),
    "refused by its engine": (False, 400, None, None, 1.0, None),
    "refused by its engine, in tokens": (True, 422, None, None, 1.0, None),
    "failed": (True, 500, None, None, None, None),
})  # fmt: skip
async def test_a_request_is_settled_with_its_real_cost(
    in_tokens: bool,
    status: int,
    prompt: int | None,
    answer: int | None,
    actual: float | None,
    learned: int | None,
) -> None:
    bench = Bench(config=TOKENS if in_tokens else {})
    bench.gate.settle(Completion("r", Outcome.COMPLETED, status, None, prompt, answer, 1.0, 0.1))
    assert bench.store.settled == [("r", actual, learned)]


async def test_a_stream_without_usage_costs_at_least_a_token_for_each_256_bytes() -> None:
    bench = Bench(config=TOKENS)
    stream = Completion("r", Outcome.COMPLETED, 200, None, None, None, 1.0, 0.1)
    stream = stream._replace(content_type="text/event-stream", body_bytes=25_600)
    bench.gate.settle(stream)
    bench.gate.settle(stream._replace(outcome=Outcome.CLIENT_GONE, prompt_tokens=7, completion_tokens=1))
    assert bench.store.settled == [("r", -100.0, None), ("r", 107.0, None)]


@pytest.mark.parametrize("is_odd", [False, True])
async def test_the_end_of_a_request_that_is_reported_twice_is_counted_once(
    is_odd: bool, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AnswerComparison, "compare", lambda _, end, token: end._replace(is_odd=is_odd))
    end = Completion("r", Outcome.COMPLETED, 200, None, None, None, 1.0, 0.1, accounting_token="t")
    bench.gate.settle(end)
    bench.gate.settle(end)
    (entry,) = bench.gate.ledger
    await until(lambda: entry.confirmed)
    assert bench.count("epp_completions_total", "model=m", "outcome=completed") == 1


def test_a_successful_dispatch_shows_that_requests_wait(bench: Bench) -> None:
    bench.gate.queue.dequeued(1, 0)
    assert not bench.gate.queue.places_are_awaited
    bench.gate.queue.dequeued(2, 1)
    assert bench.gate.queue.places_are_awaited


async def test_the_accounting_token_adds_the_default_answer_length_to_a_cost_without_it() -> None:
    bench = Bench(config=TOKENS)
    placement = await bench.place(cost=10.0, learn=True, limit=4)
    assert placement.accounting_token.split("\t")[:9] == ["f", "2", "1.0", "266.0", "", "3", "m", E1, "4"]
    assert accounting_token.write(ask(cost=10.0), E1, 256).split("\t")[3] == "10.0"
