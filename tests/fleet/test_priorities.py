"""Objectives of any priority, through Envoy: served in its order, by weight, and seen by operators."""

import asyncio
from collections import Counter
from typing import Any

from admin_calls import ask, get, patch, post, queue_length
from decision_ledger import Ledger
from fleet_load import PATIENT, at_rest, decisions

from picker_fleet.bands import LEAST_PRIORITY, MOST_PRIORITY

PRIORITIES = (-3, MOST_PRIORITY, 100, LEAST_PRIORITY, 7, 10)
CONFIG = {
    "decision_log": {"enabled": True},
    "objectives": [{"name": f"p{each}", "priority": each} for each in PRIORITIES],
    "fair_request_queue": {
        "guard_share": 0,
        "priority_bands": [{"priority": 7, "name": "seven", "weight": 30}],
    },
}
NAMES = {10: "Critical", 7: "seven", 0: "Default", -10: "Sheddable"}


def granted(log: list[Any]) -> list[int]:
    return [entry.priority for entry in log if entry.event == "granted"]


async def metric_bands(here: Any, replica: int = 0) -> dict[str, float]:
    """The gauge of queued requests, by its label."""
    text = (await here.admin("/metrics", replica)).text
    lines = [line for line in text.splitlines() if line.startswith("epp_band_queue_length{")]
    return {line.split('band="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


async def test_objectives_of_any_priority_are_served_in_its_order(fleet: Any) -> None:
    here = fleet("--no-restart", "--endpoints", "1", "--sim-ttft", "10", "--sim-itl", "1", config=CONFIG)
    await patch(here, {"request_queue_controller": {"watermark_per_backend": 1}})
    await post(here, "pause", replica=0)
    async with here.client(**PATIENT) as client, asyncio.TaskGroup() as tasks:
        # Two requests of each priority come in any order while nothing is dispatched.
        asked = [tasks.create_task(ask(client, objective=f"p{each}")) for each in (*PRIORITIES, *PRIORITIES)]
        asked.append(tasks.create_task(ask(client, objective="nobody has made this one")))
        await queue_length(here, len(asked))
        # Each replica shows the bands in use with their priorities, and the lists by their names.
        expected = sorted((*PRIORITIES, 0, -10), reverse=True)
        state = await get(here, "state", 1)
        assert [each["priority"] for each in state["bands"]] == expected
        names = [NAMES.get(each, str(each)) for each in expected]
        assert [each["band"] for each in state["bands"]] == names
        assert (await get(here, "queue?band=seven", 2))["total"] == 2
        assert (await get(here, f"flows?band={LEAST_PRIORITY}"))["flows"][0]["band"] == str(LEAST_PRIORITY)

        async def shown() -> bool:
            return (await metric_bands(here)).get("100") == 2

        await here.eventually(shown, what="the metric of a band that was made")
        await post(here, "resume", replica=2)
    # All are answered, the highest first.
    assert {task.result().status_code for task in asked} == {200}
    await at_rest(here)
    log = await decisions(here)
    Ledger.replay(log)
    order = granted(log)
    assert order == sorted(order, reverse=True)
    assert Counter(order) == Counter((*PRIORITIES, *PRIORITIES, 0))

    # Bands that are not configured go, and their series too.
    async def collected() -> bool:
        bands = (await get(here, "state"))["bands"]
        return [each["band"] for each in bands] == ["Critical", "seven", "Default", "Sheddable"]

    await here.eventually(collected, what="collected bands")

    async def gone() -> bool:
        return set(await metric_bands(here)) == set(NAMES.values())

    await here.eventually(gone, what="the series of collected bands to go")


async def test_bands_share_by_weights_that_change_while_requests_wait(fleet: Any) -> None:
    here = fleet("--no-restart", "--endpoints", "1", "--sim-ttft", "10", "--sim-itl", "1", config=CONFIG)
    await patch(here, {"request_queue_controller": {"watermark_per_backend": 1}})
    await post(here, "pause", replica=0)
    priorities = (100, 7, -3)  # with weights 70, 30 and 10
    async with here.client(**PATIENT) as client, asyncio.TaskGroup() as tasks:
        asked = [
            tasks.create_task(ask(client, objective=f"p{each}")) for _ in range(16) for each in priorities
        ]
        await queue_length(here, len(asked))
        await patch(here, {"fair_request_queue": {"band_policy": "weighted", "band_weights": {"seven": 70}}})

        async def in_force() -> bool:
            bands = (await get(here, "state", 1))["bands"]
            weights = {each["priority"]: each["weight"] for each in bands}
            return [weights[each] for each in priorities] == [70, 70, 10]

        await here.eventually(in_force, what="the weights on another replica")
        await post(here, "resume", replica=1)
    assert {task.result().status_code for task in asked} == {200}
    await at_rest(here)
    log = await decisions(here)
    Ledger.replay(log)
    first = Counter(granted(log)[:15])
    assert [first[each] for each in priorities] == [7, 7, 1]
