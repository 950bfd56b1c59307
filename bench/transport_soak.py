"""Every kind of stream for a while on the native transport, plain and by TLS: `python -m
bench.transport_soak`.

One process serves exchanges whose gate places, refuses or lets wait; this one is its peers. They ask, leave
amid a message, reset, cut connections and begin new ones. What the server has is read in pauses; objects,
blocks, the C heap in use and files must not grow. Writes bench/results/transport-soak.md.
"""

import argparse
import asyncio
import json
import logging
import random
import ssl
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import hpack
import psutil
import uvloop

from bench.rig.machine import describe_machine
from bench.rig.process_figures import ProcessFigures, environment, read_figures
from picker_fleet.config import parse
from picker_fleet.extproc.certificates import Certificates
from picker_fleet.extproc.context import UploadDeadlines
from picker_fleet.extproc.exchange import ExchangeService
from picker_fleet.extproc.http2 import (
    CANCEL,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
)
from picker_fleet.extproc.native import NativeTransport
from picker_fleet.sections import Tls

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit"))
from extproc_client import Counted, ScriptedGate, body, exchange_context, headers

PATH = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
RESULT = Path(__file__).parent / "results" / "transport-soak.md"
_FIELDS = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", PATH),
    (":authority", "picker"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
)
_READ_EVERY_S = 20.0
_WARM = 0.2  # of the run, which is left out
_GROWTH = 0.02
_STREAMS = 40  # of a connection, then a new one


async def serve() -> None:
    """Serve on a plain and on a TLS port, which are printed, until the process is killed."""
    clock = asyncio.get_running_loop().time
    gate = ScriptedGate()
    settings = parse({})
    context = exchange_context(gate, Counted(), settings, clock)
    uploads = UploadDeadlines(clock, settings.extproc.body_timeout)
    service = ExchangeService(context, uploads)
    ports = []
    for certificates in (None, Certificates(Tls(), "extproc.tls", "h2")):
        transport = NativeTransport(
            {PATH: service.process}, {service.process: service.bodies}, 1024 * 1024, certificates
        )
        ports.append(await transport.start("127.0.0.1:0"))
    print(json.dumps(ports), flush=True)
    while True:  # what the gate and the counters of the tests keep is none of the transport's
        await asyncio.sleep(0.5)
        for kept in (gate.admitted, gate.ages_s, gate.withdrawn, gate.cancelled, gate.settled, gate.reported):
            kept.clear()
        context.metrics.answers.clear()  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Reading:
    """Of the server: after so many seconds its memory, what is inside, its files, and the streams that were
    opened."""

    at_s: float
    bytes: int
    figures: ProcessFigures
    files: int
    streams: int

    @property
    def used_bytes(self) -> int:
        """Of the C heap, without what its allocator keeps for the next allocations."""
        return self.figures.c_heap_bytes - self.figures.c_free_bytes


class Peers:
    """Connections of every kind, one after the other."""

    def __init__(self, ports: tuple[int, int], seed: int) -> None:
        self._ports = ports
        self._random = random.Random(seed)
        self.done: Counter[str] = Counter()
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._tls.check_hostname, self._tls.verify_mode = False, ssl.CERT_NONE
        self._tls.set_alpn_protocols(["h2"])

    async def connection(self) -> None:
        """One connection with some streams; it ends well, or is cut."""
        secure = self._random.random() < 0.3
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self._ports[secure], ssl=self._tls if secure else None
        )
        self.done["TLS connections" if secure else "connections"] += 1
        encoder = hpack.Encoder()
        windows = struct.pack(">HL", 4, 2**30)
        writer.write(
            PREFACE + frame(SETTINGS, 0, 0, windows) + frame(WINDOW_UPDATE, 0, 0, (2**30).to_bytes(4, "big"))
        )
        try:
            for number in range(_STREAMS):
                await self._stream(reader, writer, encoder, 1 + 2 * number)
            if self._random.random() < 0.3:
                writer.write(frame(DATA, 0, 1 + 2 * _STREAMS, b"\0" * 100))  # of no stream
                await asyncio.wait_for(reader.read(), 30)
                self.done["connections that broke the protocol"] += 1
        finally:
            writer.transport.abort()

    async def _stream(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, encoder: hpack.Encoder, stream: int
    ) -> None:
        size = self._random.choice((10, 300, 20_000, 200_000))
        ask = json.dumps({"model": "m", "prompt": "x" * size}).encode()
        chunks = [body(ask[at : at + 60_000], ended=False) for at in range(0, len(ask), 60_000)]
        messages = b"".join(
            b"\0" + len(part).to_bytes(4, "big") + part
            for part in (each.SerializeToString() for each in (headers("lean"), *chunks, body()))
        )
        kind = self._random.choice(
            ("answered", "answered", "reset", "cut amid a message", "an unknown method")
        )
        fields = [*_FIELDS]
        if kind == "an unknown method":
            fields[2] = (":path", "/no/method")
        writer.write(frame(HEADERS, END_HEADERS, stream, encoder.encode(fields)))
        sent = messages if kind != "cut amid a message" else messages[: len(messages) // 2]
        if kind != "an unknown method":
            for at in range(0, len(sent), 16_000):
                writer.write(frame(DATA, 0, stream, sent[at : at + 16_000]))
        if kind in ("reset", "cut amid a message"):
            writer.write(frame(RST_STREAM, 0, stream, CANCEL.to_bytes(4, "big")))
        await writer.drain()
        if kind in ("answered", "an unknown method"):
            await asyncio.wait_for(self._end_of(reader, stream), 30)
        self.done[f"streams: {kind}"] += 1

    async def _end_of(self, reader: asyncio.StreamReader, stream: int) -> None:
        while True:
            head = await reader.readexactly(9)
            await reader.readexactly(int.from_bytes(head[:3], "big"))
            if head[3] == GOAWAY:
                raise ConnectionError("the server ended the connection")
            if head[3] == HEADERS and head[4] & END_STREAM and int.from_bytes(head[5:], "big") == stream:
                return


async def soak(seconds: float, rate: float) -> list[Reading]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.transport_soak", "--serve"),
        stdout=asyncio.subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    try:
        plain, secure = json.loads(await process.stdout.readline())
        peers, server = Peers((plain, secure), 1), psutil.Process(process.pid)
        readings: list[Reading] = []
        began_s = read_s = time.monotonic()
        running: set[asyncio.Task[None]] = set()
        while (now_s := time.monotonic()) - began_s < seconds:
            running.add(asyncio.create_task(peers.connection()))
            await asyncio.sleep(1 / rate)
            for task in [task for task in running if task.done()]:
                running.discard(task)
                await task
            if now_s - read_s >= _READ_EVERY_S:
                await asyncio.gather(*running)
                running.clear()
                await asyncio.sleep(1.0)
                read_s = time.monotonic()
                streams = sum(count for name, count in peers.done.items() if name.startswith("streams"))
                figures = await asyncio.to_thread(read_figures, process.pid)
                readings.append(
                    Reading(read_s - began_s, server.memory_info().rss, figures, server.num_fds(), streams)
                )
                print(readings[-1], flush=True)
        await asyncio.gather(*running)
        _write(readings, peers.done)
        return readings
    finally:
        process.kill()
        await process.wait()


_SIZES: Mapping[str, Callable[[Reading], int]] = {
    "objects": lambda each: each.figures.objects,
    "blocks": lambda each: each.figures.blocks,
    "C heap in use": lambda each: each.used_bytes,
    "open files": lambda each: each.files,
}


def _growth(readings: list[Reading], size: Callable[[Reading], int]) -> float:
    """By what part the median of the last third is above that of the first, the start left out."""
    warm = readings[int(len(readings) * _WARM) :]
    third = max(len(warm) // 3, 1)
    first, last = (median(map(size, part)) for part in (warm[:third], warm[-third:]))
    return last / first - 1


def _is_flat(readings: list[Reading]) -> bool:
    return all(_growth(readings, size) <= _GROWTH for size in _SIZES.values())


def _write(readings: list[Reading], done: Counter[str]) -> None:
    mib = 1024 * 1024
    here = describe_machine("bench.transport_soak", sys.argv[1:])
    grew = ", ".join(f"{name} {_growth(readings, size):+.1%}" for name, size in _SIZES.items())
    lines = [
        f"# The native transport, for {readings[-1].at_s / 60:.0f} minutes",
        "",
        "One process serves exchanges, plain and by TLS. Its peers ask, reset, stop amid messages,",
        "break the protocol, and begin new connections. All is read in pauses, in which no connection is",
        "open. Growth is that of the median from the first third to the last, a fifth left out at the start;",
        f"{_GROWTH:.0%} is allowed. Objects are of Python's garbage collector, blocks of its allocator.",
        "",
        f"`{here.command}`, {here.date}, {here.cores} cores, {here.system}, load {here.load:.1f}, "
        f"Python {here.versions['python']}, uvloop {here.versions['uvloop']}.",
        "",
        f"**{'Flat' if _is_flat(readings) else 'It grew'}**: {grew}; resident memory "
        f"{_growth(readings, lambda each: each.bytes):+.1%}.",
        "",
        "| what | count |",
        "|---|---|",
        *(f"| {name} | {count} |" for name, count in sorted(done.items())),
        "",
        "| after | resident MiB | C heap in use | free in it | objects | blocks | files | streams |",
        "|---|---|---|---|---|---|---|---|",
        *(
            f"| {each.at_s:.0f} s | {each.bytes / mib:.1f} | {each.used_bytes / mib:.2f} | "
            f"{each.figures.c_free_bytes / mib:.2f} | {each.figures.objects} | {each.figures.blocks} | "
            f"{each.files} | {each.streams} |"
            for each in readings
        ),
        "",
    ]
    RESULT.write_text("\n".join(lines))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=4.0, help="connections a second")
    args = parser.parse_args()
    if args.serve:
        logging.disable()
        uvloop.run(serve())
        return 0
    return 0 if _is_flat(uvloop.run(soak(args.minutes * 60, args.rate))) else 1


if __name__ == "__main__":
    raise SystemExit(main())
