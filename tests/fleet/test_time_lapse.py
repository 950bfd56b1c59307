"""Simulates three minutes of a fleet, within seconds. `make long ARGS=time-lapse` simulates a week."""

import asyncio
import logging
from collections.abc import Iterator

import pytest
import redis
from redis_servers import Server
from time_lapse import BOUND, HOUR_S, SERVICE_S, TimeLapseLoop, at_rest, fleet, light_load, time_lapse

SWEPT_OFTEN = {"request_queue_controller": {"expiry_cleanup_interval": "100ms"}}


@pytest.fixture
def lapse(valkey: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[TimeLapseLoop]:
    with time_lapse(valkey.url, monkeypatch) as loop:
        yield loop


@pytest.mark.parametrize(("mode", "replicas"), [("lean", 3), ("standard", 1)])
def test_a_fleet_serves_a_light_load_long_after_its_queue_has_emptied(
    mode: str, replicas: int, valkey: Server, lapse: TimeLapseLoop, caplog: pytest.LogCaptureFixture
) -> None:
    async def life() -> None:
        async with fleet(valkey.url, mode, replicas, SWEPT_OFTEN) as some:
            await some.burst(3 * BOUND, SERVICE_S)
            # If each of 1200 sweeps halved the estimated drain rate, divisions by the rate would overflow.
            await light_load(some, 2 * 60.0, every_s=12.0)
            assert (await some.replicas[0].pool.store.state(60.0)).drain_rate == 0
            with redis.Redis.from_url(valkey.url) as client:
                await at_rest(some, client)

    lapse.run_until_complete(asyncio.wait_for(life(), HOUR_S))
    failures = [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]
    assert [record.getMessage() for record in failures] == []
