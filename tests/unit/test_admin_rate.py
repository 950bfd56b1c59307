"""Too many calls of the admin API are refused, of one client and not of the others."""

from types import SimpleNamespace
from typing import Any

import pytest
from admin_client import api, asking, problem

from picker_fleet.admin.protection import BURST_S, CHANGE_COST, RateLimit, Refused
from picker_fleet.config import parse


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def call(host: str = "10.0.0.1", method: str = "GET") -> Any:
    return SimpleNamespace(client=SimpleNamespace(host=host), method=method)


async def at_once(seconds: float) -> None:
    """For a sleep."""


async def passes(rate: RateLimit, request: Any) -> bool:
    try:
        await rate(request)
    except Refused as refusal:
        return refusal.code != "too_many_calls"
    return True


async def test_given_a_burst_when_it_is_over_then_calls_pass_at_the_rate() -> None:
    clock = Clock()
    rate = RateLimit(10, clock, at_once)
    assert [await passes(rate, call()) for _ in range(25)] == [True] * int(10 * BURST_S) + [False] * 5
    clock.now_s += 0.1
    assert [await passes(rate, call()) for _ in range(3)] == [True, False, False]


async def test_given_a_client_that_asks_too_much_when_another_asks_then_it_passes() -> None:
    rate = RateLimit(10, Clock(), at_once)
    while await passes(rate, call("10.0.0.1")):
        pass
    assert await passes(rate, call("10.0.0.2"))


async def test_given_changes_when_made_then_each_counts_as_ten_calls() -> None:
    rate = RateLimit(10, Clock(), at_once)
    assert await passes(rate, call(method="POST"))
    assert await passes(rate, call(method="PATCH"))
    assert not await passes(rate, call())
    # However low the rate, one can be made
    assert await passes(RateLimit(0.1, Clock(), at_once), call(method="POST"))
    assert CHANGE_COST == 10


async def test_given_a_change_too_many_when_refused_then_it_is_told_how_long_ten_calls_take() -> None:
    rate = RateLimit(2, Clock(), at_once)
    assert await passes(rate, call(method="POST"))
    with pytest.raises(Refused) as refusal:
        await rate(call(method="POST"))
    assert refusal.value.headers == {"retry-after": "5"}


async def test_given_addresses_without_end_when_they_ask_then_what_is_kept_of_them_is_bounded() -> None:
    rate = RateLimit(10, Clock(), at_once)
    for number in range(5000):
        await rate(call(f"client {number}"))
    assert len(rate._rates._left) <= 1024


@pytest.mark.parametrize("path", ["/api/v1/state", "/api/v1/flows", "/api/v1/config", "/api/v1/events"])
async def test_given_a_client_at_its_rate_when_it_calls_then_it_is_told_when_to_come_again(
    path: str,
) -> None:
    still = Clock()  # nothing is refilled
    app = api(
        settings=parse({"admin": {"rate": 1}}), rate_limit=lambda per_s: RateLimit(per_s, still, at_once)
    )
    async with asking(app) as client:
        while (await client.get("/api/v1/state")).status_code == 200:
            pass
        answer = await client.get(path)
        assert problem(answer, 429)["code"] == "too_many_calls"
        assert answer.headers["retry-after"] == "1"
        # And health and metrics are for whoever looks after the replica
        for spared in ("/healthz", "/readyz", "/metrics"):
            assert (await client.get(spared)).status_code == 200
