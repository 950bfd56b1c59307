"""Headers, filter metadata and metrics pages in, endpoints or a refusal out, on a real replica.

Each case of `picking_table.TABLE` is a line of docs/protocol.md or docs/picking.md.
"""

import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
from picking_case import Case
from picking_replica import Outcome, PickingReplica, picking_replica
from picking_table import GROUPS, TABLE
from script_backends import url_of, valkey

CHUNK_BYTES, ONE_MESSAGE_BYTES = 62_000, 512 * 1024


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with valkey(tmp_path_factory.mktemp("valkey")) as port:
        yield url_of(port)


class Replicas:
    """The replica of the current group: cases come group by group."""

    def __init__(self, redis_url: str, folders: pytest.TempPathFactory) -> None:
        self._redis_url = redis_url
        self._folders = folders
        self._group = ""
        self._open = contextlib.AsyncExitStack()
        self._replica: PickingReplica | None = None

    async def of(self, group: str) -> PickingReplica:
        if self._replica is None or group != self._group:
            await self.aclose()
            self._group = group
            started = picking_replica(self._redis_url, GROUPS[group], self._folders.mktemp("replica"), group)
            self._replica = await self._open.enter_async_context(started)
        return self._replica

    async def aclose(self) -> None:
        await self._open.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replicas(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Replicas]:
    async with contextlib.aclosing(Replicas(redis_url, tmp_path_factory)) as all_of_them:
        yield all_of_them


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in TABLE])
async def test_a_request_goes_to_the_expected_endpoints_or_is_refused(replicas: Replicas, case: Case) -> None:
    replica, expected = await replicas.of(case.group), case.expected
    counted = await replica.usage() if expected.usage is not None else (0, 0)
    outcomes, running = await replica.run(case)
    for outcome in outcomes:
        _check(case, outcome)
    if expected.models:
        assert {json.loads(each.forwarded)["model"] for each in outcomes} == set(expected.models)
    if expected.queued:
        assert outcomes[0].picked[0] == running[0].picked[0]
    if expected.usage is not None:
        now = await replica.usage()
        assert (now[0] - counted[0], now[1] - counted[1]) == expected.usage


def _check(case: Case, outcome: Outcome) -> None:
    expected, request = case.expected, case.request
    assert (outcome.status, outcome.reason) == (expected.status, expected.reason), outcome
    if expected.status != 200:
        assert expected.message in outcome.message
        assert bool(outcome.retry_after) == (expected.status == 503)
        return
    assert outcome.picked == expected.order or outcome.picked[0] in expected.any_of, outcome.picked
    assert outcome.header == outcome.metadata
    assert expected.token.items() <= outcome.token.items()
    assert bool(outcome.token) == (not request.get)
    assert not expected.reply or outcome.reply == expected.reply
    if not request.get and request.mode != "headers":
        _check_body(case, outcome)


def _check_body(case: Case, outcome: Outcome) -> None:
    """It is unchanged but for the model; it comes in one message or in chunks that Envoy takes."""
    in_one = case.request.mode == "lean" and len(outcome.forwarded) <= ONE_MESSAGE_BYTES
    assert outcome.one_message == in_one
    assert in_one or all(len(chunk) <= CHUNK_BYTES for chunk in outcome.chunks)
    if not case.expected.models:
        assert outcome.forwarded == case.request.raw
        assert outcome.content_length is None
        return
    assert outcome.content_length == str(len(outcome.forwarded))
    received: dict[str, Any] = json.loads(case.request.raw)
    forwarded: dict[str, Any] = json.loads(outcome.forwarded)
    assert forwarded.pop("model") in case.expected.models
    received.pop("model")
    assert forwarded == received
