"""Clients that attack a fleet, run as a separate process.

`hostile_attacks.py TARGET ONLY` runs the attacks whose names contain ONLY on TARGET (a `Target` as
JSON) until stdin ends, then prints one line of JSON that counts outcomes: a status code, or `ended` where the
fleet closed the connection. Each attack repeats at a rate that one attacker on the same machine can sustain.
"""

import asyncio
import itertools
import json
import random
import struct
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import NamedTuple

import grpc
import hpack
from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.service.accesslog.v3 import als_pb2

from picker_fleet.admission.budget_transfer import SERVICE as SHARES
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
from picker_fleet.ingress.ext_proc.accesslog import SERVICE as ACCESS_LOG
from picker_fleet.ingress.ext_proc.server import PROCESS

MODEL = "llama"  # served by the honest model servers
TRAP = "trap"  # served by the hostile model servers
HONEST, ATTACKER = "an-honest-key-1f0c9a", "an-attackers-key-77be02"


class Target(NamedTuple):
    """Addresses as host:port: Envoy's listener, and the replicas' gRPC and admin ports."""

    envoy: str
    grpc: tuple[str, ...]
    admin: tuple[str, ...]


_BODY_BYTES = 8 * 1024 * 1024 - 4096
_PATIENCE_S = 40.0  # seconds: longer than the fleet may take to answer or to close the connection
_LEAVES_S = 0.3

ENDED = "ended"
Try = Callable[[Target, int], Awaitable[str]]


class Attack(NamedTuple):
    """`at_once` loops that each start `attempt` every `every_s`, or later while the previous one runs."""

    name: str
    attempt: Try
    every_s: float
    at_once: int = 1


# Connections


@asynccontextmanager
async def _connected(address: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = address.rsplit(":", 1)
    async with asyncio.timeout(_PATIENCE_S):
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            yield reader, writer
        finally:
            writer.transport.abort()


async def _status(reader: asyncio.StreamReader) -> str:
    line = await reader.readline()
    return line.split(b" ", 2)[1].decode() if line.startswith(b"HTTP/1.1 ") else ENDED


def _request(
    path: str, body: bytes, *headers: tuple[str, str], method: str = "POST", key: str = ATTACKER
) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: fleet", "connection: close", f"authorization: Bearer {key}"]
    lines += [f"{name}: {value}" for name, value in headers]
    lines += ["content-type: application/json", f"content-length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode() + body


async def _status_of(address: str, request: bytes) -> str:
    async with _connected(address) as (reader, writer):
        writer.write(request)
        return await _status(reader)


def _ask(model: str = MODEL, **fields: object) -> bytes:
    return json.dumps({"model": model, "prompt": "x", "max_tokens": 1, **fields}).encode()


# Bodies


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
    )


async def _body(target: Target, number: int) -> str:
    bodies = _bodies()
    path = "/v1/chat/completions" if number % len(bodies) == 3 else "/v1/completions"
    async with _connected(target.envoy) as (reader, writer):
        writer.write(_request(path, bodies[number % len(bodies)]))
        return await _status(reader)


async def _stall(target: Target, number: int) -> str:
    """Send half of a large body and stop."""
    whole = _request("/v1/completions", _bodies()[5])
    async with _connected(target.envoy) as (reader, writer):
        writer.write(whole[: len(whole) // 2])
        return await _status(reader)


async def _claim(target: Target, number: int) -> str:
    """Ask for more tokens than the model can answer, or for its maximum, then disconnect."""
    body = _ask(max_tokens=(10 ** (6 + number % 13), 4000)[number % 2], stream=True)
    async with _connected(target.envoy) as (reader, writer):
        writer.write(_request("/v1/completions", body))
        try:
            async with asyncio.timeout(_LEAVES_S):
                status = await _status(reader)
                await reader.read()
                return status
        except TimeoutError:
            return "left"


# Attacks by requests that are never finished

_HALVES = (
    b"",
    b"POST /v1/completions HTTP/1.1\r\nhost: fleet\r\nx-half: ",
    _request("/v1/completions", _ask())[:-10],
    b"GET /api/v1/state HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n\r\n",
    b"GET /api/v1/events HTTP/1.1\r\nhost: localhost\r\n\r\n",  # the answer has no end
)


def _envoy(target: Target, number: int) -> str:
    return target.envoy


def _admin(target: Target, number: int) -> str:
    return target.admin[number % len(target.admin)]


async def _half(address: Callable[[Target, int], str], target: Target, number: int) -> str:
    async with _connected(address(target, number)) as (reader, writer):
        writer.write(_HALVES[number % len(_HALVES)])
        try:
            async with asyncio.timeout(_PATIENCE_S / 2):
                await reader.read()
        except TimeoutError:
            return "held"
        return ENDED


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
_NO_WINDOW = frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 0))
_RESETS, _RESETS_AT_ONCE, _RESETS_PER_S = 480, 10, 4000.0  # Envoy closes a connection at 500 resets


async def _reset(target: Target, number: int) -> str:
    """Begin requests, and reset each in the same write or 2 ms later, or all by the connection's end."""
    cancel = CANCEL.to_bytes(4, "big")
    asking, clock = _asking(), asyncio.get_running_loop().time
    async with _connected(target.envoy) as (_, writer):
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
            await asyncio.sleep(max(0.0, begun_s + done / _RESETS_PER_S - clock()))
    return "reset"


async def _leave(target: Target, number: int) -> str:
    """Send an HTTP/1.1 request and disconnect 20 ms later."""
    async with _connected(target.envoy) as (_, writer):
        writer.write(_request("/v1/completions", _ask(max_tokens=400)))
        await asyncio.sleep(0.02)
    return "left"


async def _half_streams(target: Target, number: int) -> str:
    """Begin a thousand requests on one connection and finish none."""
    asking = _asking()
    async with _connected(target.envoy) as (reader, writer):
        begun = [asking.begin() for _ in range(1000)]
        writer.write(_HELLO + b"".join(head + frame(DATA, 0, stream, b"{") for stream, head in begun))
        return await _until_ended(reader)


async def _unread(target: Target, number: int) -> str:
    """Ask for an answer, but allow none of its bytes; leave a little later."""
    stream, head = _asking().begin()
    async with _connected(target.envoy) as (reader, writer):
        writer.write(_HELLO + _NO_WINDOW + head + frame(DATA, END_STREAM, stream, _ask()))
        return await _until_ended(reader, within_s=3.0)


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


_NOT_HTTP = (
    _request("/v1/completions", _ask(), ("content-length", "5")),
    _request("/v1/completions", _ask(), *((f"x-{number}", "1") for number in range(120))),
    b"\x16\x03\x01\r\n\r\n",
)


async def _unreadable(target: Target, number: int) -> str:
    """Send a malformed request that Envoy itself refuses."""
    return await _status_of(target.envoy, _NOT_HTTP[number % len(_NOT_HTTP)])


# Attacks by messages to the replicas' gRPC port that only Envoy and replicas should send


def _grpc(target: Target, number: int) -> str:
    return target.grpc[number % len(target.grpc)]


_CALLING = (("content-type", "application/grpc"), ("te", "trailers"))


async def _silent_streams(target: Target, number: int) -> str:
    """Open 20 000 ext_proc streams and send no message."""
    calling = _Frames(PROCESS, *_CALLING)
    async with _connected(_grpc(target, number)) as (reader, writer):
        writer.write(_HELLO + b"".join(calling.begin()[1] for _ in range(20_000)))
        return await _until_ended(reader)


_IDLE = (
    frame(PING, 0, 0, b"x" * 8),
    frame(PRIORITY, 0, 1, b"\0\0\0\3\0"),
    frame(WINDOW_UPDATE, 0, 0, b"\0\0\0\1"),
    frame(DATA, 0, 1),
    frame(CONTINUATION, 0, 3),
    frame(99, 0, 0),
    frame(GOAWAY, 0, 0, b"\0" * 8),
    frame(SETTINGS, 0, 0, struct.pack(">HL", 4, 1)),
)


async def _idle_frames(target: Target, number: int) -> str:
    """Send frames without content until the replica closes the connection."""
    kind = _IDLE[number % len(_IDLE)]
    async with _connected(_grpc(target, number)) as (reader, writer):
        writer.write(_HELLO + _Frames(PROCESS, *_CALLING).begin()[1])
        if kind[3] == CONTINUATION:
            writer.write(frame(HEADERS, 0, 3))
        ended = asyncio.create_task(_until_ended(reader))
        while not ended.done():
            writer.write(kind * 10_000)
            await writer.drain()
            await asyncio.sleep(0.01)
        return await ended


async def _idle_connection(target: Target, number: int) -> str:
    async with _connected(_grpc(target, number)) as (reader, _):
        return await _until_ended(reader)


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
    return message.SerializeToString()


async def _forge(target: Target, number: int) -> str:
    address = _grpc(target, number)
    async with asyncio.timeout(_PATIENCE_S), grpc.aio.insecure_channel(address) as channel:
        try:
            match number % 3:
                case 0:
                    log = channel.stream_unary(f"/{ACCESS_LOG}/StreamAccessLogs")
                    await log(iter([_forged(number), _forged(number + 1)]))
                case 1:
                    question = {"pool": "default", "least": 1, "most": 1e12, "nonce": "x", "signature": "é"}
                    ask = channel.unary_unary(f"/{SHARES}/Ask")
                    answer = json.loads(await ask(json.dumps(question).encode()))
                    return f"given {answer['given']:g}"
                case _:
                    log = channel.stream_unary(f"/{ACCESS_LOG}/StreamAccessLogs")
                    await log(iter([bytes([number % 256]) * 5000]))
        except grpc.aio.AioRpcError as refused:
            return refused.code().name
    return "taken"


# Names and headers

_SIGNS = (":", "{", "}", "|", "\t", "%", "é", "\\", "'", '"', " ", "..", "/", "\u2028")


async def _name(target: Target, number: int) -> str:
    dice = random.Random(number)
    name = "".join(dice.choice((*_SIGNS, "a", "llama", "8b")) for _ in range(dice.randint(1, 40)))
    workload = json.dumps({"workload_id": name, "criticality": dice.choice((1, 5, 9, -1, 1e9, "x"))})
    body = _ask(model=dice.choice((MODEL, name or "x")))
    return await _status_of(target.envoy, _request("/v1/completions", body, ("x-workload-context", workload)))


_STEERING = (
    *(f"x-{vendor}-inference-fairness-id" for vendor in ("gateway", "llm-d")),
    *(f"x-{vendor}-inference-objective" for vendor in ("gateway", "llm-d")),
    *(f"x-{vendor}-model-name-rewrite" for vendor in ("gateway", "llm-d")),
    *(f"x-gateway-destination-endpoint{end}" for end in ("", "-subset", "-served")),
    *("x-request-id", "x-session-token"),
)


async def _steer(target: Target, number: int) -> str:
    values = (HONEST, "gold", MODEL, "127.0.0.1:1", f"invented-{number}")
    headers = [(name, values[(number + place) % len(values)]) for place, name in enumerate(_STEERING)]
    headers.append(("x-llm-d-inference-ttl", ("1ms", "1e9", "-1", "NaN")[number % 4]))
    return await _status_of(target.envoy, _request("/v1/completions", _ask(), *headers))


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


async def _path(target: Target, number: int) -> str:
    method, path = _PATHS[number % len(_PATHS)]
    key = (ATTACKER, "a-guessed-key")[number % 2]
    return await _status_of(target.envoy, _request(path, b"{}", method=method, key=key))


# The admin port

_READS = (*("/metrics",) * 3, "/openapi.json", "/docs", "/healthz", "/api/v1/state", "/none")


async def _read(target: Target, number: int) -> str:
    path = _READS[number % len(_READS)]
    host = ("localhost", "rebound.example", "[")[number % 3]
    request = f"GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode()
    async with _connected(_admin(target, number)) as (reader, writer):
        writer.write(request)
        status = await _status(reader)
        while await reader.read(1 << 20):
            pass
        return status


ATTACKS = (
    Attack("hostile bodies of 8 MiB", _body, 1.0),
    Attack("large bodies that stop half-way", _stall, 2.0, at_once=12),
    Attack("claims of 4000 to 10¹⁸ tokens, then leaving", _claim, 0.5),
    Attack("half-sent requests at Envoy", partial(_half, _envoy), 2.0, at_once=300),
    Attack("half-sent requests at the admin ports", partial(_half, _admin), 2.0, at_once=500),
    Attack("requests that are begun and reset", _reset, 0.0),
    Attack("clients that leave at once", _leave, 0.1, at_once=150),
    Attack("half-sent streams at Envoy", _half_streams, 2.0, at_once=22),
    Attack("answers that nobody reads", _unread, 0.0, at_once=12),
    Attack("requests that Envoy cannot read", _unreadable, 0.1),
    Attack("silent streams at the gRPC ports", _silent_streams, 5.0),
    Attack("frames that carry nothing", _idle_frames, 0.5),
    Attack("idle connections to the gRPC ports", _idle_connection, 2.0, at_once=500),
    Attack("forged access logs, accounting tokens and shares", _forge, 0.1),
    Attack("names with separators", _name, 0.2),
    Attack("spoofed steering headers", _steer, 0.2),
    Attack("paths that are not inference, guessed keys", _path, 0.1),
    Attack("readers of the admin ports", _read, 0.0, at_once=8),
)
_LEAST_PAUSE_S = 0.05  # pause between two attempts of one loop: stands for network latency


async def _repeat(attack: Attack, target: Target, numbers: Iterator[int], outcomes: Counter[str]) -> None:
    clock = asyncio.get_running_loop().time
    while True:
        begun_s = clock()
        try:
            outcome = await attack.attempt(target, next(numbers))
        except (OSError, asyncio.IncompleteReadError):
            outcome = ENDED
        except TimeoutError:
            outcome = "no answer"
        except asyncio.CancelledError:
            outcomes["under way"] += 1
            raise
        outcomes[outcome] += 1
        await asyncio.sleep(max(_LEAST_PAUSE_S, begun_s + attack.every_s - clock()))


async def _attack_until_eof(target: Target, only: str) -> None:
    attacks = [attack for attack in ATTACKS if only in attack.name]
    outcomes: dict[str, Counter[str]] = {attack.name: Counter() for attack in attacks}
    attacking = []
    for attack in attacks:
        numbers = itertools.count()
        for _ in range(attack.at_once):
            repeating = _repeat(attack, target, numbers, outcomes[attack.name])
            attacking.append(asyncio.create_task(repeating))
    print("attacking", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for task in attacking:
        task.cancel()
    for fault in await asyncio.gather(*attacking, return_exceptions=True):
        assert isinstance(fault, asyncio.CancelledError), fault
    print(json.dumps(outcomes))


if __name__ == "__main__":
    envoy, grpc_ports, admin = json.loads(sys.argv[1])
    asyncio.run(_attack_until_eof(Target(envoy, tuple(grpc_ports), tuple(admin)), sys.argv[2]))
