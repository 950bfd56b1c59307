"""The Redis users in docs/redis.md have exactly the permissions that picker replicas and operators need."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import redis
from every_function import use_everything
from redis.exceptions import NoPermissionError
from redis_servers import LOOPBACK, Server
from script_fleet import running, until

import picker_fleet
from picker_fleet.cli import main
from picker_fleet.state.keys import Keys
from picker_fleet.state.replies import name_of
from picker_fleet.state.scripts import load_library
from picker_fleet.state.server_check import ServerCheck

PROJECT = Path(picker_fleet.__file__).parents[2]
LINES = re.findall(r"^user (\w+) on >PASSWORD (.+)$", (PROJECT / "docs/redis.md").read_text(), re.MULTILINE)
PICKER, LOADER, AUDITOR, SENTINEL = LINES
SECRET = "p@ss"


@pytest.fixture
def restricted(redis7: Server) -> str:
    """Redis URL of the documented picker user; the loader user has loaded the function library."""
    for name, rules in (PICKER, LOADER, AUDITOR):
        redis7.ask("ACL", "SETUSER", name, "reset", "on", f">{SECRET}", *rules.split())
    redis7.ask("FUNCTION", "FLUSH")
    redis7.ask("ACL", "LOG", "RESET")
    urls = [f"redis://{name}:p%40ss@{LOOPBACK}:{redis7.port}/0" for name, _ in (LOADER, PICKER)]
    assert main(["functions", "load", "--redis", urls[0]]) == 0
    return urls[1]


def of_the_scripts() -> set[str]:
    """Commands that the Lua scripts call."""
    source = "".join(file.read_text() for file in PROJECT.glob("lua/**/*.lua"))
    writers = "defer_write|write_now|write_values|drop_stray"
    calls = re.findall(rf"(?:redis\.call|read(?:er|_stored)?|{writers})\('([A-Z]+)'", source)
    return {name.lower() for name in calls}


def denied(server: Server) -> list[Any]:
    return [entry[entry.index(b"object") + 1] for entry in server.ask("ACL", "LOG")]


def test_the_documented_picker_user_may_run_exactly_the_commands_in_use() -> None:
    allowed = {word[1:] for word in PICKER[1].split() if word.startswith("+")}
    besides = {
        *("fcall", "info", "ping", "select", "cluster|slots", "subscribe", "xread", "xrevrange"),
        *("hset", "hdel", "hgetall", "time", "publish", "xadd", "del"),
    }
    assert of_the_scripts() | besides == allowed


async def test_the_picker_user_may_call_every_function(redis7: Server, restricted: str, pool: str) -> None:
    redis7.ask("CONFIG", "RESETSTAT")
    async with running(redis7.url, pool, "a", "b", through={"a": restricted}, silence_s=5.0) as it:
        # Redis denies none of the replica's commands.
        await use_everything(it, it.replicas[0].store)
        assert denied(redis7) == []
    # `use_everything` ran every command that the scripts call.
    ran = {line.removeprefix("cmdstat_") for line in redis7.info("commandstats")}
    assert of_the_scripts() <= ran


async def test_a_replica_that_may_not_store_the_queue_snapshot_reads_every_flow_queue(
    redis7: Server, restricted: str, pool: str
) -> None:
    # The picker user has the permissions that an earlier version of docs/redis.md listed.
    redis7.ask("ACL", "SETUSER", PICKER[0], "-get", "-set", "-pttl")
    through = {"a": restricted}
    async with running(redis7.url, pool, "a", "b", through=through, silence_s=5.0, upper_per=1) as it:
        a, b = it.replicas
        assert name_of(await b.admit("runs")) == "placed"
        for number in range(9):
            await b.admit(f"q{number}", flow=f"f{number}")
        # The replica still reads all flow queues.
        found = await a.store.queue_snapshots.read(100)
        assert len(found.page.queues) == 9
        assert denied(redis7) == [b"set"]


@pytest.mark.parametrize(
    "command",
    [
        ("FLUSHALL",), ("FLUSHDB",), ("KEYS", "*"), ("CONFIG", "GET", "*"), ("FUNCTION", "FLUSH"),
        ("FUNCTION", "LOAD", "REPLACE", "#!lua name=other"),
        ("EVAL", "return 1", "0"), ("SHUTDOWN",), ("ACL", "LIST"), ("SAVE",),
        ("CLIENT", "KILL", "TYPE", "normal"), ("SCRIPT", "FLUSH"), ("CLUSTER", "RESET"), ("MONITOR",),
        ("HGETALL", "another:key"), ("PUBLISH", "another", "text"), ("DEL", "session:1"),
    ],
)  # fmt: skip
def test_the_documented_picker_user_may_use_no_other_commands_and_keys(
    redis7: Server, restricted: str, command: tuple[str, ...]
) -> None:
    with redis.Redis.from_url(restricted, protocol=2) as client, pytest.raises(NoPermissionError):
        client.execute_command(*command)


async def test_a_replica_that_may_load_functions_reloads_a_changed_library(redis7: Server, pool: str) -> None:
    async with running(redis7.url, pool, "a") as it:
        store = it.replicas[0].store
        redis7.ask("FUNCTION", "LOAD", "REPLACE", f"{load_library().source}-- changed\n")
        assert not await store.library_is_intact()
        check = ServerCheck(store, lambda: "", lambda _: None)
        running_check = asyncio.create_task(check.run())
        await until(lambda: "library_changed" in check.faults)
        running_check.cancel()
        assert await store.library_is_intact()


def test_the_documented_auditor_user_may_not_write(redis7: Server, restricted: str) -> None:
    url = restricted.replace(PICKER[0], AUDITOR[0], 1)
    with redis.Redis.from_url(url, protocol=2) as client:
        for command in (("XADD", Keys.of("p").log, "*", "a", "b"), ("HSET", Keys.of("p").pool, "a", "b")):
            with pytest.raises(NoPermissionError):
                client.execute_command(*command)
