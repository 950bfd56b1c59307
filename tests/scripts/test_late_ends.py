"""In a full pool a request stays placed if the end of stream of its body comes long after the last byte."""

import asyncio
import json

from decision_ledger import events_of
from extproc_client import body, converse, exchange_context, headers, parts
from script_fleet import OpenFleet, Replica, ended, waiting

from picker_fleet.ingress.ext_proc.codec import WHOLE_BYTES
from picker_fleet.ingress.ext_proc.exchange import Exchange

ASK = json.dumps(
    {"model": "llama", "prompt": "x" * WHOLE_BYTES}
).encode()  # a smaller body would be answered before its end


async def whole_but_open(replica: Replica, times_s: list[float]) -> Exchange:
    """Send all bytes of a body, but not the end of stream: this places the request, made-1. The exchange's
    clock shows the last of `times_s`."""
    exchange = Exchange(exchange_context(replica.gate, clock=lambda: times_s[-1]))
    messages = headers("lean", {"content-length": str(len(ASK))}), body(ASK, ended=False)
    assert await converse(exchange, *messages) == []
    return exchange


async def test_a_request_keeps_its_placement_until_its_late_end_of_stream(fleet: OpenFleet) -> None:
    # A request whose body has no end of stream yet fills the pool, and a second request waits.
    async with fleet("a", upper_per=1) as (it, a):
        times_s = [0.0]
        exchange = await whole_but_open(a, times_s)
        second = await waiting(it, a, "second", flow="llama")
        times_s.append(20.0)
        answers = await converse(exchange, body())
        assert parts(answers) == ["request_headers"] + ["request_body"] * 9
        assert not second.done()
        assert events_of(await it.log(), "made-1") == ["bypassed"]
        assert await it.counts() == (1, 1, [1])
        a.gate.settle(ended("made-1"))
        await second
        await it.ends(a, "second")


async def test_a_request_reclaimed_before_its_late_end_of_stream_is_queued_by_age(fleet: OpenFleet) -> None:
    # The placement is reclaimed before the end of stream, and the first waiting request is granted.
    async with fleet("a", upper_per=1, lease_ms=1) as (it, a):
        times_s = [0.0]
        exchange = await whole_but_open(a, times_s)
        first = await waiting(it, a, "first", flow="llama")
        second = await waiting(it, a, "second", flow="llama")
        await it.after(5)
        assert (await a.sweep()).reclaimed == 1
        await a.publish("10.0.0.1:8000", upper_per=1)  # from now on leases last 60 s
        await first
        await a.store.renew("first", None, "", "")
        times_s.append(20.0)
        answers = asyncio.create_task(converse(exchange, body()))
        await it.until_logged("queued", "made-1")
        # Request made-1 is queued again by its age, ahead of the request `second`.
        a.gate.settle(ended("first"))
        assert parts(await answers) == ["request_headers"] + ["request_body"] * 9
        assert not second.done()
        a.gate.settle(ended("made-1"))
        await second
        await it.ends(a, "second")
        assert events_of(await it.log(), "made-1") == [
            "bypassed",
            "reclaimed",
            "queued",
            "granted",
            "placed",
            "completed",
        ]
