"""While all wake-ups are lost, every request is still served, at nearly the same throughput.

Periods with and without wake-ups alternate on a fleet, so that a busy machine slows both alike. The short
form requires half of the throughput in the better of two turns; heartbeats alone reach a third.
"""

from collections.abc import Callable
from statistics import mean
from typing import Any

import pytest
from counted_fleet import all_at_rest, counted
from fault_case import FULL, Case
from fleet_load import one_token
from proxy import Proxy

from picker_tools.load.generator import Answer, Load, closed_loop, quantile

SERVERS, EACH = 2, 2
BOUND = SERVERS * EACH
CLIENTS = 16
HEARTBEAT_S = 1.0  # `leases.heartbeat`
LEAST_RATIO = 0.9  # minimum throughput without wake-ups / with wake-ups, for answers of 1 s
SHORT_RATIO = 0.5
# Service time in seconds → number of rounds in one period; in a round the full pool gives BOUND answers.
ROUNDS = {1.0: 10, 0.2: 40, 0.02: 150}


@pytest.mark.parametrize("service_s", ROUNDS if FULL else [0.1])
async def test_throughput_holds_while_every_wake_up_is_lost(
    faulty: Callable[..., Any], case: Case, between: Proxy, service_s: float
) -> None:
    turns = case.size(2, 4)
    count = BOUND * (ROUNDS[service_s] if FULL else 5)
    case.describe(f"every wake-up dropped, answers of {service_s * 1000:.0f} ms, pool full")
    size = {"servers": SERVERS, "each": EACH, "service_s": service_s}
    async with counted(faulty, between.url, **size) as (here, servers):
        # The clients outnumber the bound, so requests wait.
        async with closed_loop(here.url, clients=CLIENTS, make_request=one_token) as load:
            await load.wait_for_served(2 * CLIENTS)
            with_wakeups: list[Stretch] = []
            without_wakeups: list[Stretch] = []
            for _ in range(turns):
                # Wake-ups are delivered in one period and dropped in the next.
                between.drop_messages = False
                with_wakeups.append(await _stretch(load, count))
                between.drop_messages = True
                without_wakeups.append(await _stretch(load, count))
        case.report(f"{between.dropped} wake-ups dropped")
        assert between.dropped > 0
        assert load.unserved == []
        assert servers.peak == BOUND
        with_s, without_s = (mean(map(_pace_s, each)) for each in (with_wakeups, without_wakeups))
        case.report(f"{1 / with_s:.1f} answers a second with wake-ups, {1 / without_s:.1f} without")
        ratio = with_s / without_s
        each = [_pace_s(a) / _pace_s(b) for a, b in zip(with_wakeups, without_wakeups, strict=True)]
        case.report(f"ratio {ratio:.2f} (turn by turn {', '.join(f'{one:.2f}' for one in each)})")
        assert ratio >= LEAST_RATIO or service_s < 1 or not FULL
        assert max(each) >= SHORT_RATIO
        # Without wake-ups requests wait less than a heartbeat longer.
        waits, longer = _waits(with_wakeups, service_s), _waits(without_wakeups, service_s)
        extra = [quantile(longer, share) - quantile(waits, share) for share in (0.5, 0.99)]
        case.report(
            f"requests wait longer by {extra[0] * 1000:.0f} ms (median), {extra[1] * 1000:.0f} ms (p99)"
        )
        assert (max(extra) if FULL else extra[0]) <= HEARTBEAT_S
        await all_at_rest(here, servers)
        await case.check(here, load.history)


Stretch = list[Answer]  # consecutive answers


async def _stretch(load: Load, count: int) -> Stretch:
    """The next `count` answers and the answer before them, once all requests of the last period have
    ended."""
    await load.wait_for_served(2 * CLIENTS)
    first = len(load.history)
    await load.wait_for_served(count)
    return load.history[first - 1 : first + count]


def _pace_s(stretch: Stretch) -> float:
    return (stretch[-1].done_s - stretch[0].done_s) / (len(stretch) - 1)


def _waits(stretches: list[Stretch], service_s: float) -> list[float]:
    return sorted(record.took_s - service_s for stretch in stretches for record in stretch[1:])
