"""A request's end is sent to Redis ahead of the next admission, or when the event loop's turn is over."""

import asyncio
from unittest.mock import Mock

import pytest
from decision_ledger import events_of
from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.service.accesslog.v3 import als_pb2
from script_fleet import DEADLINE_S, SETTLED, OpenFleet, Replica, addresses, ask

from picker_fleet.domain.request import Outcome, Placement
from picker_fleet.ingress.ext_proc.accesslog import Account, Collector
from picker_fleet.state import batching

E1, E2 = addresses(2)


@pytest.fixture(autouse=True)
def long_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delay batches for longer than a test, and treat a few ends of requests at once as frequent ends."""
    monkeypatch.setattr(batching, "_BATCH_DELAY_S", 60.0)
    monkeypatch.setattr(batching, "_END_ALPHA", 0.5)


def logged_end(replica: Replica, request_id: str, placement: Placement) -> None:
    """Send Envoy's final access-log entry of a request to `replica`."""
    entry = accesslog_pb2.HTTPAccessLogEntry(
        request={"request_id": request_id},
        response={"response_code": {"value": 200}},
        common_properties={"access_log_type": "DownstreamEnd"},
    )
    entry.common_properties.metadata.filter_metadata["picker"].update({"token": placement.accounting_token})
    message = als_pb2.StreamAccessLogsMessage(http_logs={"log_entry": [entry]})
    account = Account(replica.gate, replica.metrics, replica.keys, Mock())
    Collector([account]).on_message(message.SerializeToString())


async def test_a_requests_end_counts_before_an_admission_in_the_same_loop_turn(fleet: OpenFleet) -> None:
    async with fleet("a", endpoints=2, upper_per=1) as (it, a):
        other = await a.gate.admit(ask("other"), stream_owned=False)
        last = await a.gate.admit(ask("last"), stream_owned=False)
        assert {other.endpoints[0], last.endpoints[0]} == {E1, E2}
        # `last` ends in the loop turn in which `following` arrives, so `following` gets its endpoint.
        logged_end(a, "last", last)
        following = await a.gate.admit(ask("following"), stream_owned=False)
        assert following.endpoints[0] == last.endpoints[0]
        assert events_of(await it.log(), "following") == ["bypassed"]
        # Request `again` gets the freed endpoint although its replica reads the end after the arrival.
        again = asyncio.create_task(a.gate.admit(ask("again"), stream_owned=False))
        await asyncio.sleep(0)
        logged_end(a, "following", following)
        assert (await again).endpoints[0] == last.endpoints[0]
        assert events_of(await it.log(), "again") == ["bypassed"]
        await it.ends(a, "other", "again")


async def test_ends_of_requests_in_one_loop_turn_are_sent_in_one_message_after_the_turn(
    fleet: OpenFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet("a", upper_per=8) as (it, a):
        names = [f"r{number}" for number in range(7)]
        for name in names:
            await a.admit(name)
        messages: list[int] = []  # number of items in each message to Redis
        monkeypatch.setattr(a.metrics, "redis_call", lambda script, took_s, items: messages.append(items))
        # Two requests end in one loop turn; four more end while the message of these two ends is in flight.
        ends = [a.store.settle(name, Outcome.COMPLETED) for name in names[:2]]
        await asyncio.sleep(0)
        ends += [a.store.settle(name, Outcome.COMPLETED) for name in names[2:6]]
        async with asyncio.timeout(DEADLINE_S):
            assert await asyncio.gather(*ends) == [SETTLED] * 6
        assert messages == [2, 4]
        # While ends of requests are frequent, an end is sent in the message of the next admission.
        last = a.store.settle("r6", Outcome.COMPLETED)
        await asyncio.sleep(0.01)
        assert messages == [2, 4]
        await a.admit("next")
        assert (last.result(), messages) == (SETTLED, [2, 4, 2])
        await it.ends(a, "next")
