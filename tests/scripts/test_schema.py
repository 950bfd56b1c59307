"""docs/redis-schema.md lists exactly the keys and fields that a live server has."""

import asyncio
import json
import re
from functools import partial
from pathlib import Path

from script_fleet import Fleet, OpenFleet, addresses, ask

from picker_fleet.domain.request import Endpoint, Fault, Outcome
from picker_fleet.endpoints.readings import EndpointMetrics, encode_reading
from picker_fleet.state import accounting_token
from picker_fleet.state.keys import Keys
from picker_fleet.state.pool_state import FoundLimit
from picker_fleet.state.reads import Usage

E1, E2 = addresses(2)
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "redis-schema.md"
PLACES = {
    "HOUR": "[0-9]+", "BAND": "[0-9]+", "FLOWQUEUE": "[^\x1f]*",
    "WORKLOAD": ".+", "REPLICA": "[^:]+", "ENDPOINT": ".+",
    "PATH": ".+", "<30>": "\x1e", "<31>": "\x1f",
}  # fmt: skip


def documented() -> dict[str, str]:
    """Key pattern without the pool's prefix -> type of key, as docs/redis-schema.md lists keys."""
    return dict(re.findall(r"^\| `epp:\{POOL\}:([^`]+)` \| (\w+) \|", PAGE.read_text(encoding="utf-8"), re.M))


def parts(name: str) -> list[str]:
    """The parts of a key pattern, including the separators."""
    return re.split("(:|<3[01]>)", name)


def documented_fields() -> set[str]:
    """Documented fields of the pool's hash, with band numbers filled in."""
    section = PAGE.read_text(encoding="utf-8").split("## Fields of `pool`")[1].split("## ")[0]
    rows = re.findall(r"^\| (`[^|]+) \|", section, re.M)
    names = re.findall("`(.+?)`", " ".join(rows))
    return {name.replace("BAND", band) for name in names for band in "012"}


def matching(name: str) -> list[str]:
    """The documented patterns that match the name of a live key."""

    def expression(pattern: str) -> str:
        return "".join(PLACES.get(part, re.escape(part)) for part in parts(pattern))

    return [pattern for pattern in documented() if re.fullmatch(expression(pattern), name)]


async def live(it: Fleet) -> dict[str, str]:
    """Name without prefix -> type of every key in the server; asserts that no other pool has keys."""
    keys = await it.redis.keys("*")
    assert all(key.startswith(it.keys.prefix) for key in keys), keys
    return {key.removeprefix(it.keys.prefix): await it.redis.type(key) for key in keys}


def test_the_keys_that_python_code_uses_are_documented() -> None:
    keys = Keys.of("p")
    spelled = [key for name, key in vars(keys).items() if name != "prefix"]
    assert len(spelled) == 14
    for key in (*spelled, keys.usage(490_896), keys.wake("r-1")):
        assert matching(key.removeprefix("epp:{p}:")), key


async def test_every_key_of_a_run_is_documented_and_every_documented_key_is_used(fleet: OpenFleet) -> None:
    async with fleet("a", "b") as (it, a, b):
        await it.redis.flushall()
        publish = partial(a.publish, tenants={"separator": "/"})
        seen: dict[str, str] = {}
        await publish(E1, upper_per=1)
        for replica in it.replicas:
            await replica.beat()

        async def look() -> None:
            for name, kind in (await live(it)).items():
                (pattern,) = matching(name)
                seen[pattern] = kind

        # Requests run, wait, are granted, are cancelled and are restored.
        await a.admit("r1", workload="w")
        await a.admit("waits", flow="colon:and space", workload="w")
        await asyncio.gather(*(b.admit(f"q{i}", flow=f"flow{i % 3}") for i in range(130)))
        await look()
        await a.store.cancel("waits", 1, "cancelled")
        await a.settle("r1")
        await look()
        await a.store.tombstone("ended elsewhere")
        await a.store.note_origin("resp_1", E1)
        await it.redis.hset(it.keys.prefix + "requests", "damaged", "x")
        await a.store.renew("damaged", None, "", "")
        await a.store.renew("lost", None, "", accounting_token.write(ask("lost"), E1))
        await a.store.report_client_gone("lost")
        # Under each ordering, requests wait, become overdue, are preempted, and reach their flow's limit.
        await b.admit("limited", flow="limited", limit=1)
        await b.admit("the only one of its flow", flow="lonely", band=2)
        await look()
        await publish(E1, upper_per=1, ordering="edf", starvation_ms=1, total_capacity=3)
        await b.admit("edf", band=0)
        await look()
        await publish(E1, upper_per=1, ordering="workload-aware", starvation_ms=1)
        await b.admit("growing", band=0, workload="v")
        await look()
        await publish(E1, upper_per=1, ordering="workload-aware", wait_weight=0)
        await b.admit("static", band=0, workload="u")
        await it.after(5)
        await a.sweep()
        await look()
        await a.store.note_change("{}")
        assert await a.store.operator_changes() == ["{}"]
        await a.store.mark_endpoint(E1, "down", True)
        await look()
        await a.store.mark_endpoint(E1, "down", False)
        # A request fails on an endpoint.
        await a.store.report_fault(Fault("unknown", E1, "500", ""), "flow")
        await look()
        # A replica begins to read all flow queues for the fleet.
        await a.store._client.call("claim_queue_snapshot", 600_000)
        await look()
        # An end reports its token count, and the next turn belongs to a flow at its limit.
        await a.store.settle("lost", Outcome.COMPLETED, 37.0, 7, 100)
        await publish(E1, E2, upper_per=500, guard_share=0)
        for name in ("first", "second", "third"):
            await b.admit(name, flow="one", limit=1)
        await look()
        # A request is missing on the last two metrics pages of its endpoint.
        await a.admit("ghost", candidates=E1)
        await a.place("ghost", candidates=E1)
        now_ms = int(await it.now_ms())  # read once, so that the last page is newer than the page before
        await it.redis.zadd(it.keys.prefix + "inflight", {"ghost": now_ms + 30_000})
        page = EndpointMetrics(now_ms, waiting=0.0, running=0.0, before_ms=now_ms - 1, before_load=0.0)
        await it.redis.hset(it.keys.prefix + "metrics", E1, encode_reading(page, 0))
        assert (await a.sweep(unseen_s=1.0)).given_up >= 1
        await look()
        # A tenant waits for its balance, and another for its turn.
        await publish(E1, upper_per=1)
        limit = {"unit": "requests", "amount": 1, "per_ms": 60_000}
        await a.store.set_tenants("tenants", {"acme": json.dumps({"limits": [limit]})})
        await a.store.set_tenants("tenant_changes", {"zeta": "{}"})
        for number, flow in enumerate(("acme/a", "acme/a", "acme/a", "zeta/a", "zeta/b")):
            await b.admit(f"t{number}", flow=flow)
        await publish(E1, upper_per=500)
        for _ in range(10):
            await look()
            await a.sweep()
        usage = Usage(1, 0, 1, 0, 1, 2.0)
        await a.store.count_usage(1, 490_896, 0, {("acme/a", "llama"): usage}, leaves=False)
        await look()
        # A request's only candidate is an endpoint at its limit.
        await publish(Endpoint(E1, max_inflight=1), E2, upper_per=500, guard_share=0)
        for name in ("fills", "full"):
            await b.admit(name, flow=f"flow of {name}", candidates=E1)
            await b.place(name, candidates=E1)
        await look()
        await a.sweep()  # the request may be granted again
        await look()
        # A request is split between two stages.
        await publish(E1, Endpoint(E2, prefills=True, decodes=False), upper_per=500)
        await b.store.admit(ask("split"), "1", "*", prefill="*")
        await look()
        # A replica falls silent, and a sweep orphans only a part of this replica's requests.
        await publish(E1, upper_per=1, silence_ms=100)
        await it.after(110)
        await a.beat(silence_s=0.1)
        assert (await a.sweep()).more
        await look()
        # Every documented key was used with its type, except keys that only replicas' background tasks write.
        unused = {("routes", "stream")}
        assert {each for each in documented().items() if each[1] != "channel"} - unused == set(seen.items())
        assert set(await it.redis.hkeys(it.keys.pool)) <= documented_fields()


async def test_every_documented_field_of_the_pool_is_used(fleet: OpenFleet) -> None:
    async with fleet("a", full=True, tenants={"separator": "/"}) as (it, a):
        await a.admit("of another band", priority=7)
        for band in (0, 1, 2):
            await a.admit(f"q{band}", band=band, body_bytes=900)
        await a.store.report_fault(Fault("runs", E1, "503", ""), "flow")
        assert (await a.store.state(60)).endpoint_refusals == {E1: 1}
        for name in ("runs", "q0", "q1", "q2"):
            await a.settle(name)
        await a.store.mark_endpoint(E1, "down", True)
        await a.store.set_live_config({"guard_share": 0.2}, {"guard_share": 0.2})
        await a.store.set_limits({E1: FoundLimit(4, "test", 0)})
        await a.store.set_tenants("tenants", {"acme": '{"max_parallel": 9}'})
        await a.sweep()
        # The hash of the pool has exactly the documented fields.
        rebuilding = {"lost"}  # a field that exists only after a loss (tests/scripts/test_lost_keys.py)
        assert set(await it.redis.hkeys(it.keys.pool)) == documented_fields() - rebuilding
