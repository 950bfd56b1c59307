"""The TLS certificate of a port (`extproc.tls`, `http.tls`), reloaded when the certificate's files change.

`serve.py` makes a `Certificates` for each TLS port. The replica checks the files every `RELOAD_S` seconds:
file notifications do not follow symbolic links, which Kubernetes uses for Secrets. New connections get the
new certificate; open connections keep the old one. If new files are unusable, the replica logs this once and
keeps its certificate. Without files the replica signs its own certificate, which clients cannot verify.
"""

import asyncio
import logging
import os
import ssl
import subprocess
import tempfile
import time
from _ssl import _test_decode_cert  # type: ignore[attr-defined]
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import grpc

from picker_fleet.domain.errors import StartupError
from picker_fleet.domain.sections import Tls
from picker_fleet.domain.units import split_host_port
from picker_fleet.grpc.connections import ByAddress

RELOAD_S: Final = 2.0
HANDSHAKE_S: Final = 10.0  # limit of a client's TLS handshake, in seconds
SHUTDOWN_S: Final = 5.0
_HANDSHAKE_RECORD = 22  # the first byte of a TLS connection (RFC 8446, section 5.1)
_HANDSHAKES = 256  # maximum concurrent TLS handshakes on a port
_STARTS_PER_S, _STARTS_AT_ONCE = 300.0, 8  # how many TLS handshakes of a port start in a second, and at once
_LASTING_PER_S, _MOST_SAVED = 60.0, 600.0  # how many start in a second in the long run; most unused starts
MAX_TLS_CONNECTIONS: Final = 1024  # maximum TLS connections on a port; each may take 256 KiB of memory
_BACKLOG = 1024
_OPENSSL_S = 30.0
_SELF_SIGNED = (
    *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
    *("-days", "3650", "-subj", "/CN=picker", "-addext", "subjectAltName=DNS:picker,DNS:localhost"),
    *("-keyout", "/dev/stdout", "-out", "/dev/stdout"),
)

_log = logging.getLogger(__name__)


class _Files(NamedTuple):
    """The contents of a port's certificate files; `client_ca` is empty if clients need no certificate."""

    cert: bytes
    key: bytes
    client_ca: bytes


class Certificates:
    """A port's certificate and key, for TLS by asyncio (`context`) and by grpcio (`grpc_credentials`).

    New files replace `context`, so read this attribute for each handshake. `name` is the section of the
    configuration; `protocol` is the protocol name that ALPN offers.
    """

    def __init__(self, tls: Tls, name: str, protocol: str) -> None:
        """Raises StartupError: the files cannot be used."""
        self._tls, self._name, self._protocol, self._expires_s = tls, name, protocol, float("inf")
        self._seen = self._look()
        try:
            self._files = self._read(None)
            self.context = self._context_of(self._files)
        except (OSError, ssl.SSLError, ValueError) as fault:
            raise StartupError(f"{name}: {_reason(fault)}") from fault
        if tls.cert is None:
            _log.warning("%s has no certificate: using a self-signed one, which clients cannot verify", name)
        self.version = 1

    def client_context(self) -> ssl.SSLContext:
        """A TLS context for calls to other replicas: it accepts any certificate and presents its own."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols([self._protocol])
        with _as_file(self._files.cert + b"\n" + self._files.key) as path:
            context.load_cert_chain(path)
        return context

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Credentials for grpcio; each handshake uses the current certificate."""
        fetched = 0

        def fetch() -> Any:  # grpcio calls this function for each handshake, in a thread of its own
            nonlocal fetched
            if fetched == self.version:
                return None  # the certificate is unchanged
            fetched = self.version
            return self._grpc_configuration()

        first = self._grpc_configuration()
        return grpc.dynamic_ssl_server_credentials(first, fetch, self._tls.client_ca is not None)

    def reload(self) -> bool:
        """Read changed files; log an expired certificate once. Returns whether new files are now in use."""
        if time.time() > self._expires_s:
            _log.error("%s: the certificate has expired: clients that verify it refuse it", self._name)
            self._expires_s = float("inf")
        if (seen := self._look()) == self._seen:
            return False
        self._seen = seen
        try:
            files = self._read(self._files)
            context = self._context_of(files)
        except (OSError, ssl.SSLError, ValueError) as fault:
            _log.error("%s: the former certificate stays in use: %s", self._name, _reason(fault))
            return False
        self._files, self.context = files, context
        self.version += 1
        _log.info("%s: a new certificate is in use", self._name)
        return True

    async def run(self) -> None:
        """Reload changed certificate files, until cancelled."""
        while True:
            await asyncio.sleep(RELOAD_S)
            self.reload()

    def _look(self) -> tuple[object, ...]:
        """The time, inode and size of each file, or its error; the result differs if a file has changed."""
        found: list[object] = []
        for path in (self._tls.cert, self._tls.key, self._tls.client_ca):
            try:
                about = os.stat(path) if path is not None else None
            except OSError as fault:
                found.append(fault.errno)
            else:
                found.append(about and (about.st_mtime_ns, about.st_ino, about.st_size))
        return tuple(found)

    def _read(self, former: _Files | None) -> _Files:
        tls = self._tls
        client_ca = tls.client_ca.read_bytes() if tls.client_ca is not None else b""
        if tls.cert is not None and tls.key is not None:
            return _Files(tls.cert.read_bytes(), tls.key.read_bytes(), client_ca)
        if former is not None:  # keep the self-signed certificate
            return former._replace(client_ca=client_ca)
        both = _self_signed()
        return _Files(both, both, client_ca)

    def _context_of(self, files: _Files) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # Forbid TLS sessions that resume: their clients would not be checked against the current client CA.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
        context.set_alpn_protocols([self._protocol])
        if self._tls.client_ca is not None:
            try:
                context.load_verify_locations(cadata=files.client_ca.decode("ascii"))
            except (ValueError, ssl.SSLError) as fault:
                raise ValueError(f"client_ca {self._tls.client_ca} holds no certificate in PEM") from fault
            context.verify_mode = ssl.CERT_REQUIRED
        with _as_file(files.cert + b"\n" + files.key) as path:
            context.load_cert_chain(path, password=_no_password)
            self._expires_s = ssl.cert_time_to_seconds(str(_test_decode_cert(path)["notAfter"]))
        return context

    def _grpc_configuration(self) -> Any:
        files = self._files
        return grpc.ssl_server_certificate_configuration(
            [(files.key, files.cert)], root_certificates=files.client_ca or None
        )


async def serve(
    protocol: Callable[[], asyncio.Protocol], listen: str, certificates: Certificates | None
) -> asyncio.Server:
    """Serve `protocol` at `listen`, with TLS if there are certificates.

    Raises:
        OSError: the address cannot be bound.
    """
    host, port = split_host_port(listen)
    made = protocol if certificates is None else partial(handshakes(certificates), protocol)
    return await asyncio.get_running_loop().create_server(made, host.strip("[]"), port, backlog=_BACKLOG)


def address_of(transport: asyncio.BaseTransport) -> str:
    """The IP address of a connection's peer; '' if it is unknown."""
    peer = transport.get_extra_info("peername")
    return str(peer[0]) if isinstance(peer, tuple) else ""


def handshakes(certificates: Certificates) -> Callable[[Callable[[], asyncio.Protocol]], asyncio.Protocol]:
    """Limits the TLS handshakes of a port. Call the result for each new connection, with a factory of the
    protocol that takes over the connection after its handshake."""
    port = _Handshakes()
    return lambda protocol: _Handshake(protocol, certificates, port)


class _Handshakes:
    """The TLS handshakes of a port, which take memory and about 1 ms of CPU before a client is authenticated.

    Of more than `_HANDSHAKES` handshakes, the oldest one of the address that has most is aborted. At most
    `_STARTS_PER_S` start in a second, the addresses in turn: a flood from one address keeps no other out.
    A gateway opens many connections at once, but seldom; a flood gets `_LASTING_PER_S`.
    """

    def __init__(self) -> None:
        self._under_way: OrderedDict[_Handshake, None] = OrderedDict()
        self._by_address = ByAddress()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._next_s = 0.0  # the time at which the next handshake may start
        self._saved, self._saved_s = _MOST_SAVED, 0.0  # how many may start, at the time `_saved_s`
        self._timer: asyncio.TimerHandle | None = None

    def opened(self, handshake: "_Handshake") -> None:
        self._under_way[handshake] = None
        self._by_address[handshake.address] += 1
        if len(self._under_way) > _HANDSHAKES:
            most = max(self._by_address, key=self._by_address.__getitem__)
            oldest = next(each for each in self._under_way if each.address == most)
            self.closed(oldest)
            oldest.abort()

    def closed(self, handshake: "_Handshake") -> None:
        if handshake in self._under_way:
            del self._under_way[handshake]
            self._by_address.remove(handshake.address)

    def turn(self, address: str) -> asyncio.Future[None]:
        """A future that gets its result when a handshake with `address` may start. The caller may set the
        result earlier if no handshake will start."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(address, deque()).append(turn)
        if self._timer is None:
            self._start()
        return turn

    def _start(self) -> None:
        self._timer, loop = None, asyncio.get_running_loop()
        now_s = loop.time()
        self._next_s = max(self._next_s, now_s - _STARTS_AT_ONCE / _STARTS_PER_S)
        self._saved = min(self._saved + (now_s - self._saved_s) * _LASTING_PER_S, _MOST_SAVED)
        self._saved_s = now_s
        while self._waiting and self._next_s <= now_s and self._saved >= 1:
            address, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[address] = turns
            if not turn.done():
                turn.set_result(None)
                self._next_s += 1 / _STARTS_PER_S
                self._saved -= 1
        if self._waiting:
            wait_s = max(self._next_s - now_s, (1 - self._saved) / _LASTING_PER_S)
            self._timer = loop.call_later(wait_s, self._start)


class _Handshake(asyncio.Protocol):
    """Handles a new connection until its TLS handshake ends; then the protocol made by `protocol` takes over.
    `port` has the port's other handshakes."""

    def __init__(
        self, protocol: Callable[[], asyncio.Protocol], certificates: Certificates, port: _Handshakes
    ) -> None:
        self._protocol, self._certificates, self._port = protocol, certificates, port
        self._early = bytearray()  # before TLS reads: raw bytes; afterwards: decrypted bytes for `protocol`
        self._came = asyncio.Event()
        self._turn: asyncio.Future[None] | None = None
        self._lost = False
        self.address = ""  # the client's address, '' if unknown
        self._transport: Any = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.address = address_of(transport)
        self._port.opened(self)
        self._task = asyncio.get_running_loop().create_task(self._agree())

    def abort(self) -> None:
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if not self._came.is_set():
            if data[0] != _HANDSHAKE_RECORD:
                self._transport.abort()  # no TLS: end the connection before it costs a handshake
                return
            self._transport.pause_reading()
            self._came.set()
        self._early += data

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._came.set()
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(None)

    async def _agree(self) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await self._came.wait()
                if not self._lost:
                    self._turn = self._port.turn(self.address)
                    await self._turn
                transport = None if self._lost else await self._start_tls()
        except (OSError, ssl.SSLError):
            transport = None
        finally:
            self._port.closed(self)
        if transport is None or transport.is_closing():  # the handshake failed, or was aborted at its end
            self._transport.abort()
            return
        protocol = self._protocol()
        protocol.connection_made(transport)
        transport.set_protocol(protocol)
        if self._early:
            protocol.data_received(bytes(self._early))
        if self._lost:
            protocol.connection_lost(None)

    async def _start_tls(self) -> Any:
        first, self._early = bytes(self._early), bytearray()
        starting = asyncio.create_task(
            asyncio.get_running_loop().start_tls(
                self._transport,
                self,
                self._certificates.context,
                server_side=True,
                ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=SHUTDOWN_S,
            )
        )
        try:
            # TLS reads the connection after two steps of the event loop: give it bytes that arrived before.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            reader = self._transport.get_protocol()
            if reader is not self and not starting.done():
                reader.get_buffer(len(first))[: len(first)] = first
                reader.buffer_updated(len(first))
            return await starting
        finally:
            starting.cancel()


def _no_password() -> bytes:
    raise ValueError("the key is encrypted; use a key without a password")


def _reason(fault: Exception) -> str:
    if isinstance(fault, ssl.SSLError):
        if fault.reason == "KEY_VALUES_MISMATCH":
            return "the key is not the certificate's"
        return f"cert and key hold no certificate and key in PEM: {fault.reason or fault}"
    if isinstance(fault, OSError) and fault.filename is not None:
        return f"{fault.filename}: {fault.strerror}"
    return str(fault)


@contextmanager
def _as_file(text: bytes) -> Iterator[str]:
    """The path of a file with `text`, which contains a private key; the file is in memory if possible."""
    if hasattr(os, "memfd_create"):
        number = os.memfd_create("certificate")
        try:
            os.write(number, text)
            yield f"/proc/self/fd/{number}"
        finally:
            os.close(number)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "certificate"
        path.touch(mode=0o600)
        path.write_bytes(text)
        yield str(path)


def _self_signed() -> bytes:
    """A new certificate and its key in one PEM text, made by the program openssl."""
    try:
        return subprocess.run(_SELF_SIGNED, capture_output=True, timeout=_OPENSSL_S, check=True).stdout
    except FileNotFoundError:
        raise ValueError("without cert and key, the replica needs the program openssl") from None
    except subprocess.SubprocessError as fault:
        raise ValueError(f"openssl could not sign a certificate: {fault}") from None
