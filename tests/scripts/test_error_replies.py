"""Tests of a replica's reaction to each kind of error reply of Redis that docs/errors.md lists.

Real servers give the errors that a test can provoke; a proxy gives the other errors."""

import asyncio
import contextlib
import logging
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from decision_ledger import events_of
from metrics_page import samples
from proxy import proxy_to
from redis.asyncio import Redis
from redis.exceptions import RedisError
from redis_servers import LOOPBACK, Server
from script_fleet import Fleet, Replica, addresses, ask, ended, running, until

from picker_fleet.admission.failover import FailoverState
from picker_fleet.domain.errors import ScriptFailed, WritesRefused
from picker_fleet.state.error_replies import meaning_of
from picker_fleet.state.replies import name_of

SENT_AGAIN = ("READONLY", "NOPERM")  # two errors, of the two kinds after which a call is sent again
REFUSING = {  # error reply -> its kind; the commands that provoke and end the error on a real server
    "OOM": ("full", "CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0"),
    "NOPERM": ("denied", "ACL SETUSER picker -fcall", "ACL SETUSER picker +@all"),
    "NOPERM within a script": ("denied", "ACL SETUSER picker -hmget", "ACL SETUSER picker +@all"),
    "BUSY": ("denied", "", ""),  # the test runs an endless script on another connection
    "READONLY": ("elsewhere", f"REPLICAOF {LOOPBACK} 1", "REPLICAOF NO ONE"),
    "NOREPLICAS": ("elsewhere", "CONFIG SET min-replicas-to-write 1", "CONFIG SET min-replicas-to-write 0"),
}


class Watched:
    """A replica with failover, one request in flight and one request waiting."""

    def __init__(self, fleet: Fleet, replica: Replica) -> None:
        self.fleet, self.replica = fleet, replica
        self.gate = replica.gate
        replica.fails_over()
        self.waiting: asyncio.Task[Any]

    async def begin(self) -> None:
        self.gate.failover.update_peers({"a": {"degraded": False}})
        self.gate.failover.heartbeat_answered(await self.replica.beat())
        await self.gate.admit(ask("runs"), stream_owned=False)
        self.waiting = asyncio.create_task(self.gate.admit(ask("waits"), stream_owned=False))
        await self.fleet.until_queued(1)

    def errors(self, kind: str, script: str = "admit") -> float:
        return samples(self.replica.metrics)["epp_redis_errors_total", f"kind={kind}", f"script={script}"]

    async def ends(self) -> None:
        """Assert that the waiting request has kept its position; end all requests; wait for zero counts."""
        first, *others = events_of(await self.fleet.log(), "waits")
        # Redis queued the request once; an admission repeated on a new connection only adopted the request.
        assert first == "queued"
        assert set(others) <= {"adopted"}
        self.gate.settle(ended("runs"))
        await until(lambda: self.waiting.done() or self.replica.beat())
        await self.waiting
        self.gate.settle(ended("waits"))
        await until(self.fleet.at_rest)


@contextlib.asynccontextmanager
async def watched(url: str, pool: str, through: str = "", **settings: Any) -> AsyncIterator[Watched]:
    """Open a `Watched` whose replica connects to the URL `through`, or else to `url`."""
    settings = {"listening": True, **settings}
    async with running(url, pool, "a", upper_per=1, through={"a": through or url}, **settings) as (fleet, a):
        it = Watched(fleet, a)
        await it.begin()
        try:
            yield it
        finally:
            await given_up(it.waiting)


async def given_up(task: "asyncio.Task[Any]") -> None:
    task.cancel()
    await asyncio.wait((task,))


@contextlib.asynccontextmanager
async def arriving(it: Watched, name: str, flow: str = "flow") -> AsyncIterator[None]:
    """Send a request within the block, and cancel the request afterwards."""
    task = asyncio.create_task(it.gate.admit(ask(name, flow=flow), stream_owned=False))
    yield
    await given_up(task)


WRAPPED = {
    "-READONLY You can't write against a read only replica.": "elsewhere",
    "ERR Error running script (call to f_1a): @user_script:7: @user_script: 7: -READONLY ": "elsewhere",
    "ERR Error running script (call to f_1, on @user_script:7): @user_script:7: LOADING Redis": "elsewhere",
    "ERR user_function:12: MOVED 3999 127.0.0.1:6381": "elsewhere",
    "Error running function: CLUSTERDOWN The cluster is down": "elsewhere",
    "ERR: OOM command not allowed when used memory > 'maxmemory'.": "full",
    "ERR user_function:3: ERR ACL failure in script": "denied",
    "ERR unknown command 'FCALL', with args beginning with: 'READONLY x'": "denied",
    "ERR user_function:3: bad argument 'READONLY You'": "item",
    "WRONGTYPE READONLY Operation against a key": "item",
}


@pytest.mark.parametrize("error", WRAPPED)
def test_an_error_reply_is_classified_by_its_code_and_never_by_a_clients_text(error: str) -> None:
    assert meaning_of(error).value == WRAPPED[error]


@pytest.mark.parametrize("error", SENT_AGAIN)
async def test_a_call_is_repeated_after_a_temporary_server_error(
    valkey_url: str, pool: str, error: str
) -> None:
    async with proxy_to(valkey_url) as between, watched(valkey_url, pool, between.url) as it:
        between.refuse(f"{error} for a moment", times=1)
        async with arriving(it, "new", "other"):
            await it.fleet.until_queued(2)
            assert it.gate.failover.state is FailoverState.SHARED
        await it.ends()


@contextlib.asynccontextmanager
async def refusing(redis: Redis, why: str) -> AsyncIterator[None]:
    _, cause, cure = REFUSING[why]
    await redis.execute_command(*cause.split())
    yield
    await redis.execute_command(*cure.split())


@contextlib.asynccontextmanager
async def unsaved(redis: Redis, folder: Path) -> AsyncIterator[None]:
    """Within the block the server cannot save its RDB file."""

    async def failed() -> bool:
        return (await redis.info("persistence"))["rdb_last_bgsave_status"] == "err"

    shutil.rmtree(folder)
    await redis.config_set("save", "3600 1")
    await redis.bgsave()
    await until(failed)
    yield
    await redis.config_set("save", "")


@pytest.mark.parametrize("why", ["OOM", "MISCONF"])
async def test_while_redis_refuses_writes_only_new_requests_fail(server: Server, pool: str, why: str) -> None:
    async with watched(server.url, pool) as it:
        async with refusing(it.fleet.redis, why) if why == "OOM" else unsaved(it.fleet.redis, server.folder):
            for number in range(3):
                with pytest.raises(WritesRefused, match=why) as refused:
                    await it.gate.admit(ask(f"new{number}"), stream_owned=False)
                assert (refused.value.status, refused.value.retry_after_s) == (503, 1)
            assert it.gate.failover.state is FailoverState.SHARED
            assert it.errors("full") == 3
            assert it.errors("full", "cancel") == 0
        await it.ends()


async def test_a_script_error_fails_only_the_request_that_causes_it(
    valkey_url: str, pool: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "picker_fleet.state.batching")
    async with watched(valkey_url, pool) as it:
        # The key of a flow queue holds a string instead of a sorted set.
        name, flow = "ba\nd" + "x" * 300, "bad"
        await it.fleet.redis.set(it.fleet.keys.prefix + "queue:1:bad", "text")
        for _ in range(20):
            with pytest.raises(ScriptFailed) as refused:
                await it.gate.admit(ask(name, flow=flow), stream_owned=False)
            assert refused.value.status == 500
        assert it.gate.failover.state is FailoverState.SHARED
        assert it.errors("item") == 20
        async with arriving(it, "other"):
            await until(lambda: it.replica.gate.queue.waiting == 2)
            assert it.gate.failover.state is FailoverState.SHARED
        lines = [record.getMessage() for record in caplog.records if "admit" in record.getMessage()]
        assert 1 <= len(lines) <= 20
        assert "'ba\\ndxxx" in lines[0]
        assert "(flow 'bad'" in lines[0]
        assert all(line.isprintable() and len(line) < 900 for line in lines)
        await it.fleet.redis.delete(it.fleet.keys.prefix + "queue:1:bad")
        await it.ends()


@contextlib.asynccontextmanager
async def busy(redis: Redis) -> AsyncIterator[None]:
    """Within the block, another client's script runs endlessly."""
    await redis.config_set("busy-reply-threshold", 1)
    running_on = asyncio.create_task(redis.eval("while true do end", 0))

    async def is_busy() -> bool:
        try:
            await redis.ping()
        except RedisError as fault:
            return "BUSY" in str(fault)
        return False

    await until(is_busy)
    yield
    await redis.script_kill()
    with contextlib.suppress(RedisError):
        await running_on
    await redis.config_set("busy-reply-threshold", 5000)


@pytest.mark.parametrize("why", [why for why, (kind, *_) in REFUSING.items() if kind != "full"])
async def test_a_lasting_error_of_a_real_server_makes_the_replica_fail_over(
    server: Server, pool: str, why: str
) -> None:
    async with Redis.from_url(server.url) as redis:
        await redis.execute_command("ACL", "SETUSER", "picker", "on", ">secret", "~*", "&*", "+@all")
        user = server.url.replace("//", "//picker:secret@")
        async with watched(server.url, pool, user, listening=False) as it:
            async with busy(redis) if why == "BUSY" else refusing(redis, why):
                async with arriving(it, "new"):
                    await until(lambda: it.gate.failover.state is FailoverState.LOCAL)
                    assert it.errors(REFUSING[why][0]) >= 1
                await given_up(it.waiting)
            # The connection recovers as soon as the server recovers.
            await until(lambda: it.replica.store.fault is None)
            verdict = await it.replica.admit("next", candidates=addresses(1)[0])
            assert name_of(verdict) in ("placed", "queued")
