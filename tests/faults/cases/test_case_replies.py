"""Replies to script calls are lost repeatedly, after Redis ran the script: no request counts twice (G6)."""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from counted_fleet import all_at_rest, counted, departures, refused_with_retry_after
from fault_case import FULL, Case
from proxy import proxy
from redis_servers import debian, redis_server

from picker_tools.load.generator import closed_loop, requests_of_flows

SERVERS, EACH = 2, 3
BOUND = SERVERS * EACH
CLIENTS = 24
SERVICE_S = 0.02
BETWEEN = 3  # maximum number of answers to clients between two lost replies
SPARED = 20  # replies that each new connection delivers first, so that a retry's reply is not lost
FORMS = {"valkey": SPARED, "redis_7": SPARED, "in_a_row": 0} if FULL else {"valkey": SPARED}


@pytest.mark.parametrize("form", FORMS)
async def test_lost_replies_to_script_calls_count_no_request_twice(
    faulty: Callable[..., Any], case: Case, tmp_path: Path, form: str
) -> None:
    losses, dice = case.size(30, 300), random.Random(8)
    how = {"valkey": "Valkey", "redis_7": "Redis 7", "in_a_row": "also replies to retries are lost"}[form]
    case.describe(f"{losses} replies lost after the script ran, three replicas, {how}")
    binary = debian("redis-server") if form == "redis_7" else ""
    with redis_server(tmp_path / "redis", binary=binary) as redis:
        async with (
            proxy(redis.port) as between,
            counted(faulty, between.url, servers=SERVERS, each=EACH, service_s=SERVICE_S) as (here, servers),
        ):
            between.spared = FORMS[form]
            # Three replicas reach Redis through one proxy, and the load fills the pool.
            async with closed_loop(here.url, clients=CLIENTS, make_request=requests_of_flows(4)) as load:
                await load.wait_for_served(2 * CLIENTS)
                for _ in range(losses):
                    # The proxy drops the reply to a script call of any replica, and resets the connection.
                    between.lose_script_replies += 1
                    await here.eventually(
                        lambda: between.lose_script_replies == 0, within_s=30, what="a lost reply"
                    )
                    await load.wait_for_served(dice.randint(1, BETWEEN))
                await load.wait_for_served(2 * CLIENTS)
            # No client gets an error other than 503; requests on the model servers never exceed the bound.
            case.report(f"{between.lost} replies lost, {between.connections} connections made")
            assert between.lost == losses
            refused = refused_with_retry_after(load.history)
            case.report(f"{len(refused)} of {len(load.history)} requests refused (503), no other error")
            alone = await departures(here)
            case.report(f"replicas failed over {alone} times")
            case.report(f"highest in flight {servers.peak} of {BOUND}")
            # If one replica fails over alone, its local budget adds to the bound that other replicas share.
            assert BOUND <= servers.peak <= (2 * BOUND if form == "in_a_row" else BOUND)
            # Every count of requests returns to 0, and each request starts once and ends once.
            since = time.monotonic()
            await all_at_rest(here, servers)
            case.report(f"all counts 0 after {time.monotonic() - since:.1f} s")
            # If the replies to a call and its retry are lost, the replica serves without Redis for a while.
            await case.check(here, load.history, served_without_redis=form == "in_a_row")
