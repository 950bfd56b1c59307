"""A fleet serves with TLS to Redis, and reports a wrong certificate with a clear error."""

import asyncio
import os
import ssl
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from background import running as background
from redis.exceptions import ConnectionError as RedisConnectionError
from redis_servers import LOOPBACK, Server, debian, redis_server
from script_fleet import Replica, running, until
from tls_files import Pair, authority

from picker_fleet.state.primary import client
from picker_fleet.state.replies import name_of


@pytest.fixture
def vouched(tmp_path: Path) -> Pair:
    return authority(tmp_path, "certificate")


@pytest.fixture
def secure(tmp_path: Path, vouched: Pair) -> Iterator[Server]:
    """A Redis server that accepts TLS only, from clients with a trusted certificate."""
    with redis_server(tmp_path / "redis", binary=debian("redis-server"), tls=vouched) as server:
        yield server


def url_of(server: Server, own: Pair) -> str:
    files = f"ssl_ca_certs={own.cert}&ssl_certfile={own.cert}&ssl_keyfile={own.key}"
    return f"rediss://{LOOPBACK}:{server.port}/0?{files}"


async def until_fault(url: str, pool: str, error: str) -> None:
    """Wait until a replica connected to `url` reports the text `error` as its fault."""
    replica = Replica(url, pool, "a", silence_s=2.0)
    async with background(replica.store.run()):
        await until(lambda: error in (replica.store.fault or ""))


@pytest.mark.parametrize("case", ["unknown authority", "no certificate", "no such file"])
async def test_a_replica_reports_why_tls_to_redis_failed(
    secure: Server, vouched: Pair, pool: str, tmp_path: Path, case: str
) -> None:
    other = await asyncio.to_thread(authority, tmp_path, "other")
    url, error = {
        "unknown authority": (url_of(secure, other), "certificate verify failed"),
        "no certificate": (
            f"rediss://{LOOPBACK}:{secure.port}?ssl_ca_certs={vouched.cert}", "certificate required"
        ),
        "no such file": (f"rediss://{LOOPBACK}:{secure.port}?ssl_ca_certs=/nowhere", "No such file"),
    }[case]  # fmt: skip
    await until_fault(url, pool, error)


async def test_connections_share_one_tls_context_until_a_file_changes(
    secure: Server, vouched: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Making a context blocks the event loop for up to 0.1 s, also while Redis refuses connections.
    made = Mock(wraps=ssl.create_default_context)
    monkeypatch.setattr(ssl, "create_default_context", made)

    async def connect() -> None:
        async with client(url_of(secure, vouched), "key") as redis:
            await redis.ping()

    for _ in range(3):
        await connect()
    assert made.call_count == 1
    secure.kill()
    for _ in range(3):
        with pytest.raises(RedisConnectionError):
            await connect()
    assert made.call_count == 1
    # A new certificate is read for the next connection.
    await asyncio.to_thread(secure.revive)
    os.utime(vouched.cert, (1, 1))
    made.reset_mock()
    await connect()
    await connect()
    assert made.call_count == 1


async def test_a_host_name_that_the_certificate_lacks_is_refused_unless_the_check_is_off(
    secure: Server, vouched: Pair, pool: str
) -> None:
    # The certificate names an IP address, but the URL has a host name.
    named = url_of(secure, vouched).replace(LOOPBACK, "localhost")
    await until_fault(named, pool, "ostname mismatch")
    # With the option ssl_check_hostname off, the replica serves requests.
    unchecked = named + "&ssl_check_hostname=false"
    async with running(unchecked, pool, "b") as it:
        assert name_of(await it.replicas[0].admit("r")) == "placed"
