"""From headers, filter metadata and metrics pages to endpoints or a refusal, through the gRPC services of a
real replica: each case of `picking_table.TABLE` is a line of the protocol or of docs/picking.md."""

import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
from picking_case import Case
from picking_stage import Stage, staged
from picking_table import GROUPS, TABLE
from picking_talk import Played
from script_backends import url_of, valkey

CHUNK_BYTES, WHOLE_BYTES = 62_000, 512 * 1024


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with valkey(tmp_path_factory.mktemp("valkey")) as port:
        yield url_of(port)


class Stages:
    """The replica of the group at hand: cases come group by group."""

    def __init__(self, redis_url: str, folders: pytest.TempPathFactory) -> None:
        self._redis_url = redis_url
        self._folders = folders
        self._group = ""
        self._open = contextlib.AsyncExitStack()
        self._stage: Stage | None = None

    async def of(self, group: str) -> Stage:
        if self._stage is None or group != self._group:
            await self.aclose()
            self._group = group
            ready = staged(self._redis_url, GROUPS[group], self._folders.mktemp("stage"), group)
            self._stage = await self._open.enter_async_context(ready)
        return self._stage

    async def aclose(self) -> None:
        await self._open.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stages(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stages]:
    async with contextlib.aclosing(Stages(redis_url, tmp_path_factory)) as all_of_them:
        yield all_of_them


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in TABLE])
async def test_a_request_goes_where_it_should(stages: Stages, case: Case) -> None:
    stage = await stages.of(case.group)
    # Given the case's model servers, and what was asked before
    want = case.want
    counted = await stage.tokens() if want.tokens is not None else (0, 0)
    # When it is asked
    played, before, held = await stage.play(case)
    # Then each answer is the one it must have
    for each in played:
        _check(case, each)
    if isinstance(want.model, tuple):
        assert {json.loads(each.sent)["model"] for each in played} == set(want.model)
    if want.same:
        assert {each.picked[0] for each in before} == {played[0].picked[0]}
    if want.queued:
        assert played[0].picked[0] == held[0].picked[0]
    if want.tokens is not None:
        now = await stage.tokens()
        assert (now[0] - counted[0], now[1] - counted[1]) == want.tokens


def _check(case: Case, played: Played) -> None:
    want, ask = case.want, case.ask
    assert (played.status, played.reason) == (want.status, want.reason), played
    if want.status != 200:
        assert want.says in played.says
        assert bool(played.retry_after) == (want.status == 503)
        return
    assert played.picked[0] in want.to, played.picked
    assert not want.order or played.picked == want.order
    assert played.header == played.told
    assert want.accounting_token.items() <= played.accounting_token.items()
    assert bool(played.accounting_token) == (not ask.get)
    assert not want.reply or played.reply == want.reply
    if not ask.get and ask.mode != "headers":
        _check_body(case, played)


def _check_body(case: Case, played: Played) -> None:
    """It goes on as it came but for the model, in one piece or chunks that Envoy takes, its length right."""
    assert played.whole == (case.ask.mode == "lean" and len(played.sent) <= WHOLE_BYTES)
    assert played.whole or all(len(chunk) <= CHUNK_BYTES for chunk in played.chunks)
    if not case.want.model:
        assert played.sent == case.ask.raw
        assert played.content_length is None
        return
    assert played.content_length == str(len(played.sent))
    came: dict[str, Any] = json.loads(case.ask.raw)
    went: dict[str, Any] = json.loads(played.sent)
    names = (case.want.model,) if isinstance(case.want.model, str) else case.want.model
    assert went.pop("model") in names
    came.pop("model")
    assert went == came
