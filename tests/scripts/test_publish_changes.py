"""Publishing only the changed endpoints has the same effect as publishing the whole list."""

import random
from collections.abc import Mapping

import pytest
from script_fleet import SETTINGS, Fleet, Replica, addresses, running, until

from picker_fleet.domain.request import Endpoint
from picker_fleet.fleet.publisher import acknowledged
from picker_fleet.state.replies import name_of
from picker_fleet.state.store import Store

_ROOM = {**SETTINGS, "upper_per": 2, "lower_per": 1}


async def publish(replica: Replica, endpoints: Mapping[str, Endpoint], version: str) -> None:
    await replica.store.publish(
        _ROOM, list(endpoints.values()), config_version="test", endpoints_version=version
    )


async def what_is_published(fleet: Fleet) -> tuple[object, ...]:
    """All parts of the shared state that depend on the endpoints."""
    found, state = await fleet.dump(), await fleet.state()
    kept = [found.get(name, {}) for name in ("endpoints", "load", "limits")]
    marks, version = sorted(found.get("marks", {})), found["pool"]["endpoints_version"]
    return (*kept, marks, version, state.ready_backends, state.upper, state.in_flight)


async def test_publishing_changed_endpoints_equals_publishing_all_of_them(valkey_url: str, pool: str) -> None:
    dice, names = random.Random(7), addresses(6)
    async with (
        running(valkey_url, pool, "a", endpoints=0) as (by_changes, a),
        running(valkey_url, f"{pool}-whole", "a", endpoints=0) as (by_lists, b),
    ):
        former: dict[str, Endpoint] = {}
        for each in (a, b):
            await publish(each, former, "v0")
        for number in range(1, 40):
            wanted = {
                name: Endpoint(name, labels={"zone": dice.choice("ab")}, draining=dice.random() < 0.3)
                for name in dice.sample(names, dice.randint(0, 6))
            }
            changes: dict[str, Endpoint | None] = dict.fromkeys(former.keys() - wanted.keys())
            changes |= {name: each for name, each in wanted.items() if former.get(name) != each}
            assert await a.store.publish_changes(f"v{number - 1}", f"v{number}", changes)
            await publish(b, wanted, f"v{number}")
            former = wanted
            assert await what_is_published(by_changes) == await what_is_published(by_lists)
            # Between publications, requests arrive and endpoints are marked in both pools alike.
            target, mark, on = dice.choice(names), dice.choice(("drained", "down")), dice.random() < 0.5
            placed = []
            for each in (a, b):
                await each.store.mark_endpoint(target, mark, on)
                placed.append(name_of(await each.admit(f"r{number}", subset=(names[number % 6],))))
                await each.settle(f"r{number - 3}")
            assert placed[0] == placed[1]
        assert await what_is_published(by_changes) == await what_is_published(by_lists)
        for each in (a, b):
            await each.settle(*(f"r{number}" for number in range(40)))


async def test_a_change_to_another_version_of_the_endpoints_is_ignored(valkey_url: str, pool: str) -> None:
    async with running(valkey_url, pool, "a", endpoints=0) as (it, a):
        first, second = addresses(2)
        await publish(a, {first: Endpoint(first)}, "v1")
        before = await what_is_published(it)
        assert not await a.store.publish_changes("v0", "v2", {second: Endpoint(second), first: None})
        assert await what_is_published(it) == before


async def test_a_waiting_request_is_placed_when_a_change_adds_an_endpoint(valkey_url: str, pool: str) -> None:
    async with running(valkey_url, pool, "a", endpoints=0, queue_unready=1) as (it, a):
        (first,) = addresses(1)
        version = (await it.dump())["pool"]["endpoints_version"]
        assert name_of(await a.admit("waits")) == "queued"
        assert await a.store.publish_changes(version, "next", {first: Endpoint(first)})
        await it.until_queued(0)
        assert ("placed", "waits") in a.notifications
        assert name_of(await a.place("waits")) == "placed"
        await a.settle("waits")


async def test_replicas_with_equal_discovery_publish_changes_and_read_no_endpoint_list(
    valkey_url: str, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = addresses(4)
    async with running(valkey_url, pool, "a", "b", endpoints=3, joined={}) as (it, a, b):
        whole: list[object] = []
        for each in (a, b):
            await until(lambda each=each: len(each.cell.current.endpoints) == 3)

            async def listed(store: Store = each.store) -> tuple[Endpoint, ...]:
                whole.append("read")
                return await Store.endpoints(store)

            async def publish(*_: object, **__: object) -> None:
                whole.append("published")

            monkeypatch.setattr(each.store, "endpoints", listed)
            monkeypatch.setattr(each.store, "publish", publish)
        drains, labelled = Endpoint(names[0], draining=True), Endpoint(names[3], labels={"zone": "a"})
        wanted = (drains, Endpoint(names[2]), labelled)
        for each in (b, a):
            each.membership.discovered(wanted)
        for each in (a, b):
            await until(lambda each=each: each.cell.current.endpoints == wanted)
        assert whole == []
        await a.store.mark_endpoint(names[2], "down", True)
        for each in (a, b):
            await until(lambda each=each: each.cell.current.endpoints[1].down)
        assert whole == []
        # Replica b reads the published list of endpoints, since its own discovery still lacks the change.
        a.membership.discovered(wanted[:2])
        await until(lambda: len(b.cell.current.endpoints) == 2)
        assert whole == ["read"]
        assert b.cell.current.endpoints[1].down
        assert (await it.state()).ready_backends == 0


async def test_a_new_endpoint_opens_once_every_envoy_has_acknowledged_it(valkey_url: str, pool: str) -> None:
    known, new = map(Endpoint, addresses(2))
    async with running(valkey_url, pool, "a", "b", endpoints=1, joined={}) as (it, a, b):

        def newest(each: Replica) -> tuple[str, list[bool]]:
            current = each.cell.current
            return current.version, [endpoint.ready for endpoint in current.endpoints]

        for each in (a, b):  # replica b does not publish
            await until(lambda each=each: newest(each)[1] == [True])
            each.cell.acknowledge("envoy", newest(each)[0])
        for each in (a, b):
            each.membership.discovered((known, new))
        for each in (a, b):
            await until(lambda each=each: newest(each)[1] == [True, False])
        a.cell.acknowledge("envoy", newest(a)[0])

        async def is_told() -> bool:
            return newest(a)[0] in acknowledged(await it.state())

        await until(is_told)
        assert (await it.state()).ready_backends == 1
        b.cell.acknowledge("envoy", newest(b)[0])
        for each in (a, b):
            await until(lambda each=each: newest(each)[1] == [True, True])
        # After a flush the published endpoints do not count as new.
        await it.redis.flushall()

        async def all_ready() -> bool:
            return (await it.state()).ready_backends == 2

        await until(all_ready)
        assert not a.membership._publisher.awaits_envoys
