"""Answers and metrics pages correct the prefix index. Without Redis a replica applies its records at once."""

from typing import Any

import pytest
from choosers import chooser_of, fleet_with
from tables import cases

from picker_fleet.domain.request import Band, Completion, Endpoint, InferenceRequest, Outcome, Workload
from picker_fleet.endpoints.readings import EndpointMetrics, MetricsCache
from picker_fleet.endpoints.snapshot import Snapshot, SnapshotCell
from picker_fleet.scheduling.cache_feedback import CacheWatch
from picker_fleet.scheduling.endpoint_history import block_hashes
from picker_fleet.scheduling.route_stream import EvidenceRecord, LossRecord, RouteStream

A, B = "10.0.0.1:8000", "10.0.0.2:8000"
BLOCKS = 40
PROMPT = block_hashes("llama", b"x" * (256 * BLOCKS))
TOKENS = 64 * BLOCKS + 32  # the prompt's tokens, at four bytes a token


class Replica:
    """A replica with a chooser and a watch of engines' caches; the test makes answers and metrics pages."""

    def __init__(self) -> None:
        self.now_s, cell = 100.0, SnapshotCell()
        cell.publish(Snapshot("1", (Endpoint(A), Endpoint(B))))
        self.readings = MetricsCache(None, lambda: self.now_s)
        self.routes = RouteStream("redis://127.0.0.1:1/0", stream="s", replica="r", clock=lambda: self.now_s)
        self.chooser = chooser_of(
            cell,
            fleet_with("prefix-affinity"),
            readings=self.readings,
            routes=self.routes,
            clock=lambda: self.now_s,
        )
        self.watch, self.requests = CacheWatch(self.routes, self.readings), 0
        self.routes.index.add(A, PROMPT)
        self.routes.index.add(A, block_hashes("other", b"y" * (256 * 300)))
        self.now_s += 60

    def answer(
        self, cached: int | None, served: str = A, prompt_tokens: int = TOKENS, status: int = 200
    ) -> None:
        """Place a request with the prompt on A, and end it after an answer of `served`."""
        self.requests += 1
        request = InferenceRequest(
            f"r{self.requests}", "m", "m", False, "f", Band.DEFAULT, 1.0, Workload("w", 3), 1.0, 30.0, None
        )._replace(prefix=PROMPT, body_bytes=256 * BLOCKS)
        self.chooser.placed(request, self.chooser.choose(request), (A,))
        end = Completion(request.id, Outcome.COMPLETED, status, served, prompt_tokens, 9, 1.0, None)
        self.chooser.ended(end._replace(cached_tokens=cached), "token")

    def shared(self) -> list[Any]:
        """Apply and return the records of evidence and losses that this replica has shared since the last
        call."""
        found = [each for each in self.routes._completions if isinstance(each, EvidenceRecord | LossRecord)]
        self.routes._completions.clear()
        self.routes._apply(found)
        return found


def test_only_an_answer_that_contradicts_the_prefix_index_corrects_it() -> None:
    replica = Replica()

    replica.answer(TOKENS - 1)
    (first,) = replica.shared()
    assert (round(first.kept), first.evicted) == (334, 0), "the blocks used since, and most of the prompt's"
    assert first.bytes_per_token == pytest.approx(4.0, rel=0.01)
    replica.now_s += 60
    replica.answer(TOKENS - 1)
    assert replica.shared() == [], "as predicted"

    replica.now_s += 60
    replica.answer(0)
    (missed,) = replica.shared()
    assert missed.kept == 0
    assert missed.evicted == 3, "up to 2 blocks may be in the cache"


def test_a_missing_number_of_cached_tokens_counts_as_0_once_the_engine_has_reported_one() -> None:
    replica = Replica()
    replica.answer(None)
    assert replica.shared() == [], "vLLM without --enable-prompt-tokens-details tells nothing"
    replica.answer(TOKENS)
    assert len(replica.shared()) == 1

    replica.now_s += 60
    replica.answer(None)

    assert [each.kept for each in replica.shared()] == [0]


@cases("answer", {
    "of another endpoint after a retry": ({"served": B},),
    "an error": ({"status": 500},),
    "with images, whose bytes are few tokens": ({"prompt_tokens": 256 * BLOCKS // 20},),
    "without usage": ({"prompt_tokens": 0},),
})  # fmt: skip
def test_answers_without_evidence_of_cached_blocks_do_not_change_the_index(answer: dict[str, Any]) -> None:
    replica = Replica()
    replica.answer(0, **answer)
    assert replica.shared() == []


def page(at_s: float, **more: Any) -> EndpointMetrics:
    return EndpointMetrics(int(at_s * 1000), waiting=0.0, running=0.0, **more)


@cases("is_lost, before, after, refused", {
    "the process started later": (True, {"started_s": 1e9}, {"started_s": 1e9 + 5}, False),
    "the looked up tokens fell": (True, {"prefix_queries": 50.0}, {"prefix_queries": 9.0}, False),
    "the preemptions fell": (True, {"preemptions": 5.0}, {"preemptions": 0.0}, False),
    "it was away, and its page tells nothing": (True, {}, {}, True),
    "it was away, and has looked nothing up since":
        (True, {"prefix_queries": 0.0}, {"prefix_queries": 0.0}, True),
    "it slept": (True, {"unready": "asleep", "started_s": 1e9}, {"started_s": 1e9}, False),
    "nothing changed": (False, {"started_s": 1e9}, {"started_s": 1e9 + 0.01}, False),
    "the network was away, but the process is the same":
        (False, {"started_s": 1e9}, {"started_s": 1e9}, True),
    "the network was away, but the counters went on":
        (False, {"preemptions": 3.0}, {"preemptions": 3.0}, True),
    "a page without the counters": (False, {"prefix_queries": 50.0}, {}, False),
})  # fmt: skip
def test_the_prefix_index_forgets_a_cache_exactly_if_metrics_pages_show_that_it_was_lost(
    is_lost: bool, before: dict[str, Any], after: dict[str, Any], refused: bool
) -> None:
    replica = Replica()
    replica.watch.read(A, page(1, **before))
    if refused:
        replica.watch.refused(A)
    replica.watch.read(A, page(2, **after))
    replica.watch.read(A, page(3, **after))

    assert replica.shared() == [LossRecord(A)] * is_lost
    if is_lost:
        assert replica.routes.index.match(PROMPT) == {}


def test_a_replica_that_takes_over_an_endpoint_compares_with_its_predecessors_last_page() -> None:
    replica = Replica()
    replica.watch.read(A, page(1, started_s=1e9))
    replica.readings.update({A: page(2, started_s=2e9)})  # another replica has noticed this restart

    replica.watch.read(A, page(3, started_s=2e9))

    assert replica.shared() == []


@cases("hits, expected", {
    "half of the predicted hits": (0.5, (0, 0.6)),
    "as many hits as predicted": (1.0, None),
})  # fmt: skip
def test_if_answers_report_no_cached_tokens_the_metrics_pages_counters_correct_the_index(
    hits: float, expected: tuple[float, float] | None
) -> None:
    replica = Replica()
    index, watch = replica.routes.index, replica.watch
    watch.read(A, page(1, prefix_queries=0.0, prefix_hits=0.0))
    for _ in range(30):
        index.add(A, PROMPT)  # the index predicts that the whole prompt is cached
    watch.read(A, page(2, prefix_queries=9_000.0, prefix_hits=9_000.0 * hits))
    assert replica.shared() == [], "too few tokens"

    capacity = index.capacity(A)
    watch.read(A, page(3, prefix_queries=76_800.0, prefix_hits=76_800.0 * hits))

    found = [(each.kept / capacity, each.evicted / capacity) for each in replica.shared()]
    assert found == ([expected] if expected else [])
    assert not index.predicted(A).tells
