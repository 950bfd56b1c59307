"""TLS of the gRPC port on both transports: client authentication, and reloading of certificates."""

import asyncio
import contextlib
import logging
import shutil
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import grpc
import pytest
import uvloop
from extproc_client import serving_on
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tables import cases
from tls_files import Pair, authority, signed

from picker_fleet.admission import budget_transfer
from picker_fleet.admission.budget_transfer import GrpcPeers
from picker_fleet.domain.errors import StartupError
from picker_fleet.domain.sections import Tls
from picker_fleet.grpc import certificates as tls_port
from picker_fleet.grpc.certificates import Certificates
from picker_fleet.grpc.transport import Handler, Health
from picker_fleet.state.accounting_token import Keyring

PATIENT_S = 30.0

pytestmark = pytest.mark.usefixtures("transport")


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return authority(tmp_path_factory.mktemp("ours"), "ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return authority(tmp_path_factory.mktemp("theirs"), "theirs")


@pytest.fixture
def server(tmp_path: Path, ours: Pair) -> Pair:
    return signed(tmp_path, "picker", ours)


def certificates(server: Pair | None, client_ca: Path | None = None) -> Certificates:
    files = {"cert": server.cert, "key": server.key} if server is not None else {}
    return Certificates(Tls(**files, client_ca=client_ca), "extproc.tls", "h2")


@asynccontextmanager
async def serving(made: Certificates, more: Mapping[str, Handler] = {}) -> AsyncIterator[int]:
    """Serve the health service and the handlers `more` over TLS on the chosen transport; yields the port."""
    health = Health()
    health.set(("",), True)
    async with serving_on({**health.handlers(), **more}, made) as address:
        yield int(address.rpartition(":")[2])


def client_credentials(root: Path, own: Pair | None) -> grpc.ChannelCredentials:
    pair = (own.key.read_bytes(), own.cert.read_bytes()) if own else ()
    return grpc.ssl_channel_credentials(root.read_bytes(), *pair)


@asynccontextmanager
async def channel(port: int, root: Path, own: Pair | None = None) -> AsyncIterator[Any]:
    """A stub of the health service for a client that trusts `root` and has the certificate `own`."""
    credentials = client_credentials(root, own)
    options = (("grpc.use_local_subchannel_pool", 1),)  # two channels must share no connection
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options) as opened:
        yield health_pb2_grpc.HealthStub(opened)


async def healthy(stub: Any) -> bool:
    # `wait_for_ready` repeats a handshake that timed out on a busy machine.
    answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENT_S, wait_for_ready=True)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def gets_in(port: int, root: Path, own: Pair | None = None) -> None:
    async with channel(port, root, own) as stub:
        assert await healthy(stub)


async def refused(port: int, root: Path, own: Pair | None = None) -> None:
    async with channel(port, root, own) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as fault:
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENT_S)
    assert fault.value.code() is grpc.StatusCode.UNAVAILABLE


def presented(port: int, newest: ssl.TLSVersion = ssl.TLSVersion.MAXIMUM_SUPPORTED) -> bytes:
    """The certificate, unverified, that the port presents to a client of TLS versions up to `newest`."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    context.maximum_version = newest
    plain = socket.create_connection(("127.0.0.1", port), timeout=PATIENT_S)
    with context.wrap_socket(plain) as secured:
        assert secured.selected_alpn_protocol() == "h2"
        return secured.getpeercert(binary_form=True) or b""


def put(source: Path, target: Path) -> None:
    """Replace `target` by a copy of `source` as operators do: atomically, under the same name."""
    shutil.copy(source, target.with_suffix(".new")).replace(target)


def replace(old: Pair, new: Pair) -> None:
    put(new.cert, old.cert)
    put(new.key, old.key)


async def test_new_connections_use_a_new_certificate_and_old_connections_stay_open(
    server: Pair, ours: Pair, theirs: Pair, tmp_path: Path
) -> None:
    made = certificates(server)
    renewed = signed(tmp_path, "renewed", theirs)
    async with serving(made) as port, channel(port, ours.cert) as before:
        assert await healthy(before)
        watch = before.Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        replace(server, renewed)
        assert made.reload()
        assert not made.reload()
        await gets_in(port, theirs.cert)
        await refused(port, ours.cert)
        assert await healthy(before)  # the old connection still works
        assert not watch.done()


async def test_only_clients_with_a_certificate_of_the_current_authority_are_accepted(
    server: Pair, ours: Pair, theirs: Pair, tmp_path: Path
) -> None:
    trusted = tmp_path / "client-ca.crt"
    shutil.copy(ours.cert, trusted)
    made = certificates(server, trusted)
    old, new = signed(tmp_path, "old", ours), signed(tmp_path, "new", theirs)
    async with serving(made) as port:
        await gets_in(port, ours.cert, old)
        await refused(port, ours.cert, new)
        await refused(port, ours.cert)
        put(theirs.cert, trusted)
        assert made.reload()
        await gets_in(port, ours.cert, new)
        await refused(port, ours.cert, old)


DAMAGE: dict[str, tuple[Callable[[Pair, Pair], object], str]] = {
    "the certificate is empty": (lambda server, other: server.cert.write_text(""), "PEM"),
    "the key is no PEM": (lambda server, other: server.key.write_text("no key"), "PEM"),
    "the key is another's": (
        lambda server, other: shutil.copy(other.key, server.key),
        "the key is not the certificate's",
    ),
    "the certificate is gone": (lambda server, other: server.cert.unlink(), "No such file"),
}


@cases("damage, why", DAMAGE)
async def test_unusable_certificate_files_leave_the_former_certificate_in_use(
    server: Pair, ours: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Any, why: str
) -> None:
    made = certificates(server)
    renewed = signed(tmp_path, "renewed", ours)
    async with serving(made) as port:
        damage(server, renewed)
        with caplog.at_level(logging.ERROR):
            assert not made.reload()
            assert not made.reload()
        [line] = [record.getMessage() for record in caplog.records if record.name.endswith("certificates")]
        assert "extproc.tls: the former certificate stays in use" in line
        assert why in line
        await gets_in(port, ours.cert)
        replace(server, renewed)
        assert made.reload()
        await gets_in(port, ours.cert)


def test_an_expired_certificate_is_logged_once(ours: Pair, tmp_path: Path, caplog: Any) -> None:
    made = certificates(signed(tmp_path, "picker", ours, days=0))
    made.reload()
    made.reload()
    assert sum("extproc.tls: the certificate has expired" in line for line in caplog.messages) == 1


async def test_without_certificate_files_the_replica_signs_a_certificate_itself() -> None:
    made = certificates(None)
    assert made.context.minimum_version is ssl.TLSVersion.TLSv1_2
    async with serving(made) as port:
        shown = await asyncio.to_thread(presented, port)
        assert shown
        assert shown == await asyncio.to_thread(presented, port, ssl.TLSVersion.TLSv1_2)


async def test_a_plain_text_client_of_the_tls_port_is_refused_before_it_costs_a_handshake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turn = Mock()
    monkeypatch.setattr(tls_port._Handshakes, "turn", turn)
    async with serving(certificates(None)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 9)
        async with asyncio.timeout(PATIENT_S):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        writer.close()
    turn.assert_not_called()


def test_unusable_certificate_files_prevent_the_start(server: Pair, ours: Pair, tmp_path: Path) -> None:
    for damaged, why in (
        (Tls(cert=server.cert, key=ours.key), "the key is not the certificate's"),
        (Tls(cert=server.cert, key=tmp_path / "none"), "none: No such file"),
        (Tls(cert=server.cert, key=server.key, client_ca=server.key), "client_ca .* holds no certificate"),
    ):
        with pytest.raises(StartupError, match=f"extproc.tls: .*{why}"):
            Certificates(damaged, "extproc.tls", "h2")


@pytest.mark.parametrize("files", ["self-signed", "signed", "clients too"])
async def test_replicas_ask_each_other_for_budget_over_tls(server: Pair, ours: Pair, files: str) -> None:
    own, client_ca = server if files != "self-signed" else None, ours.cert if files == "clients too" else None
    made, keys, address = certificates(own, client_ca), Keyring(), ""
    handlers = budget_transfer.handlers("p", AsyncMock(return_value=2.0), keys, lambda: address)
    async with serving(made, handlers) as port:
        address = f"127.0.0.1:{port}"
        peers = GrpcPeers("p", keys, made)
        assert await peers.ask(address, 1.0, 5.0) == 2.0
        # The fleet has not signed this call.
        assert await GrpcPeers("p", Keyring(), made).ask(address, 1.0, 5.0) == 0.0
        assert await GrpcPeers("p", keys).ask(address, 1.0, 5.0) is None  # this client speaks plain text
    assert await peers.ask(address, 1.0, 5.0) is None


class Echo(asyncio.Protocol):
    """A protocol that sends all received data back."""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_unfinished_tls_handshakes_are_limited_and_lock_out_no_client(
    run: Callable[[Any], Any], server: Pair, ours: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_port, "_HANDSHAKES", 8)

    async def play() -> None:
        listening = await tls_port.serve(Echo, "127.0.0.1:0", certificates(server))
        port = listening.sockets[0].getsockname()[1]
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        for _, writer in silent[::2]:
            writer.write(b"\x16\x03\x01\x02\x00\x01\x00")  # the beginning of a ClientHello
        async with asyncio.timeout(PATIENT_S):
            for reader, _ in silent[:12]:
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
            trusting = ssl.create_default_context(cafile=str(ours.cert))
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
            writer.write(b"hello")
            assert await reader.readexactly(5) == b"hello"
        for _, each in [*silent, (reader, writer)]:
            each.transport.abort()
        listening.close()

    run(play())


async def test_a_flood_of_tls_handshakes_keeps_no_other_address_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_port, "_HANDSHAKES", 8)
    listening = await tls_port.serve(Echo, "127.0.0.1:0", certificates(None))
    port = listening.sockets[0].getsockname()[1]
    other, kept = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
    flood = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
    async with asyncio.timeout(PATIENT_S):
        for reader, _ in flood[:12]:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
    assert not other.at_eof()
    for _, each in [*flood, (other, kept)]:
        each.transport.abort()
    listening.close()


async def test_tls_handshakes_of_a_flooding_address_start_slowly_and_of_other_addresses_at_once() -> None:
    handshakes = tls_port._Handshakes()
    flood = [handshakes.turn("127.0.0.2") for _ in range(100)]
    async with asyncio.timeout(PATIENT_S):
        await handshakes.turn("127.0.0.1")
    assert sum(turn.done() for turn in flood) <= tls_port._STARTS_AT_ONCE + 5


async def test_tls_handshakes_of_a_lasting_flood_start_at_a_lower_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tls_port, "_MOST_SAVED", 20.0)
    monkeypatch.setattr(tls_port, "_LASTING_PER_S", 0.1)
    handshakes = tls_port._Handshakes()
    flood = [handshakes.turn("127.0.0.2") for _ in range(100)]
    async with asyncio.timeout(PATIENT_S):
        await flood[19]
    await asyncio.sleep(0.1)  # five times as long as the pace alone would need for the next handshake
    assert sum(turn.done() for turn in flood) == 20


def test_a_tls_handshake_that_is_aborted_leaves_no_connection(
    server: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_port, "_HANDSHAKES", 8)
    monkeypatch.setattr(tls_port, "_STARTS_PER_S", 10_000.0)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="x").do_handshake()
    hello, made = outgoing.read(), [0]

    def make() -> Echo:
        made[0] += 1
        return Echo()

    async def play() -> None:
        listening = await tls_port.serve(make, "127.0.0.1:0", certificates(server))
        port = listening.sockets[0].getsockname()[1]
        flood = []
        async with asyncio.timeout(PATIENT_S):
            for _ in range(20):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(hello)
                assert await reader.read(1)  # the server waits for the client's part
                flood.append((reader, writer))
            for reader, _ in flood[:12]:
                with contextlib.suppress(ConnectionError):
                    while await reader.read(1 << 16):
                        pass
        for _, writer in flood:
            writer.transport.abort()
        listening.close()

    uvloop.run(play())
    assert made == [0]
