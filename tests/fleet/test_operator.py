"""In a running fleet an operator pauses, reconfigures and evicts, and the queue serves by priority."""

import asyncio
import re
from collections import Counter
from functools import partial
from typing import Any

import pytest
from admin_calls import paused
from fleet_load import at_rest, decisions, metric

from picker_fleet.domain.bands import LEAST_PRIORITY, MOST_PRIORITY
from picker_tools.audit.log import Entry

PRIORITIES = (-3, MOST_PRIORITY, 100, LEAST_PRIORITY, 7, 10)
ROOM = 100  # capacity of the queue, in requests
CONFIG = {
    "objectives": [
        {"name": "gold", "criticality": "Critical"},
        {"name": "scrap", "criticality": "Sheddable"},
        *({"name": f"p{each}", "priority": each} for each in PRIORITIES),
    ],
    "request_queue_controller": {"watermark_per_backend": 1},
    "fair_request_queue": {
        "total_capacity": ROOM, "flow_capacity": ROOM, "overload": "preempt", "guard_share": 0,
        "priority_bands": [{"priority": 7, "name": "seven", "weight": 30}],
    },
}  # fmt: skip
NAMES = {10: "Critical", 7: "seven", 0: "Default", -10: "Sheddable"}
DROPPED = "x-llm-d-request-dropped-reason"


@pytest.fixture(scope="module")
def here(shared_fleet: Any) -> Any:
    """A fleet for the operator's changes; every test leaves it unchanged."""
    quick = ("--endpoints", "1", "--sim-ttft", "10", "--sim-itl", "1")
    return shared_fleet("--no-restart", *quick, config=CONFIG)


async def logged(fleet: Any, since: int) -> list[Entry]:
    """Wait until every request has ended; return the decision log from entry `since` on."""
    await at_rest(fleet)
    return (await decisions(fleet))[since:]


def granted(log: list[Entry]) -> list[int]:
    return [entry.priority for entry in log if entry.event == "granted"]


async def test_an_operator_may_send_each_change_to_a_different_replica(here: Any) -> None:
    since = len(await decisions(here))
    async with paused(here) as send:
        asked = [send() for _ in range(6)]
        await here.until_state(queued=6)
        assert (await here.get("state"))["stock"] == 0
        ids = [entry.request for entry in (await decisions(here))[since:] if entry.event == "queued"]
        assert await here.post(f"requests/{ids[3]}/evict", replica=1) == {"id": ids[3], "result": "evicted"}
        done, _ = await asyncio.wait(asked, timeout=10, return_when=asyncio.FIRST_COMPLETED)
        (evicted,) = [task.result() for task in done]
        assert (evicted.status_code, evicted.headers[DROPPED]) == (503, "evicted-queue-pressure")
        changed = await here.patch({"request_queue_controller": {"watermark_per_backend": 3}}, replica=2)
        assert changed["changes"] == {"request_queue_controller": {"watermark_per_backend": 3.0}}
        for replica in range(3):
            config_there = await here.get("config", replica)
            assert config_there["config"]["request_queue_controller"]["watermark_per_backend"] == 3
            assert config_there["paused"] is True
        await here.post("resume", replica=1)
    assert sorted(task.result().status_code for task in asked) == [200] * 5 + [503]
    log = await logged(here, since)
    assert max(entry.stock for entry in log) == 3
    assert [entry.request for entry in log if entry.event == "evicted"] == [ids[3]]
    await here.patch({"request_queue_controller": {"watermark_per_backend": 1}})


async def test_the_client_of_a_preempted_request_is_answered_at_once(here: Any) -> None:
    since = len(await decisions(here))
    await here.patch({"fair_request_queue": {"total_capacity": 3, "flow_capacity": 3}})
    async with paused(here) as send:
        scrap = [send(objective="scrap") for _ in range(3)]
        await here.until_state(queued=3)
        gold = send(objective="gold")
        done, _ = await asyncio.wait(scrap, timeout=10, return_when=asyncio.FIRST_COMPLETED)
        (preempted,) = [task.result() for task in done]
        assert (preempted.status_code, preempted.headers[DROPPED]) == (503, "evicted-queue-pressure")
        assert int(preempted.headers["retry-after"]) >= 1
        assert preempted.json()["error"]
        await here.post("resume", replica=2)
    assert gold.result().status_code == 200
    assert sorted(task.result().status_code for task in scrap) == [200, 200, 503]
    assert granted(await logged(here, since))[0] == 10
    await here.patch({"fair_request_queue": {"total_capacity": ROOM, "flow_capacity": ROOM}})


async def metric_bands(here: Any) -> set[str]:
    """The bands whose queue length is on the metrics page."""
    return set(
        re.findall(r'^epp_band_queue_length{.*band="(\w+)"', (await here.admin("/metrics")).text, re.M)
    )


async def test_requests_are_served_by_the_priority_of_their_objective(here: Any) -> None:
    since = len(await decisions(here))
    async with paused(here) as send:
        # While dispatch is paused, two requests of each priority arrive in mixed order.
        asked = [send(objective=f"p{each}") for each in PRIORITIES * 2]
        asked.append(send(objective="an unknown objective"))
        await here.until_state(queued=len(asked))
        # Every replica reports the bands in use with their priorities, and filters lists by a band's name.
        expected = sorted((*PRIORITIES, 0, -10), reverse=True)
        state = await here.get("state", 1)
        assert [each["priority"] for each in state["bands"]] == expected
        names = [NAMES.get(each, str(each)) for each in expected]
        assert [each["band"] for each in state["bands"]] == names
        assert (await here.get("queue?band=seven", 2))["total"] == 2
        assert (await here.get(f"flows?band={LEAST_PRIORITY}"))["flows"][0]["band"] == str(LEAST_PRIORITY)

        length = partial(metric, here, "epp_band_queue_length", 0, band="100")
        await here.eventually(length, lambda count: count == 2, what="the queue length of band 100")
        await here.post("resume", replica=2)
    # All requests are served, the highest priority first.
    assert {task.result().status_code for task in asked} == {200}
    order = granted(await logged(here, since))
    assert order == sorted(order, reverse=True)
    assert Counter(order) == Counter((*PRIORITIES * 2, 0))

    # When a band that is not configured becomes empty, the band and its series disappear.
    configured = ["Critical", "seven", "Default", "Sheddable"]
    await here.until(
        "state",
        lambda state: [each["band"] for each in state["bands"]] == configured,
        what="only configured bands",
    )
    await here.eventually(
        lambda: metric_bands(here), lambda bands: bands == set(configured), what="only their series"
    )
