"""A replica that gets many damaged messages does not crash or leak, and answers each stream (G10)."""

import asyncio
import random
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
from case_fleet import config, ready, rests
from envoy.data.accesslog.v3.accesslog_pb2 import HTTPAccessLogEntry
from envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsMessage
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingResponse
from fault_case import Case
from mutation import end, end_of_check, entries, exchange, requests

from picker_fleet.domain.units import split_host_port
from picker_fleet.ingress.ext_proc import accesslog
from picker_fleet.ingress.ext_proc.server import SERVICE
from picker_tools.load.generator import closed_loop

STREAMS = 40
HANGS_S = 60.0
SEED = 20
MOST_GROWTH = 40 * 1024 * 1024
LEAVES_S = 0.5  # the client of an incomplete request leaves before the replica's timeout answers
TRUE_ENDS = 0.7  # share of placed requests whose end is reported; leases end the other requests


KINDS = {
    "lean": "ext_proc messages, headers, bodies and access-log entries",
    "http": "checks and access-log entries",
}


async def test_a_replica_survives_damaged_messages(faulty: Callable[..., Any], case: Case) -> None:
    count = case.size(2000, 100_000)
    case.describe(f"{count} mutated {KINDS[case.mode]}")
    # Warm up a replica. The bound is large, since a request whose end is lost counts until its lease ends.
    here = faulty("--sim-ttft", "5", "--sim-itl", "1", config=config(per_endpoint=2000))
    replica = here.state["replicas"][0]
    async with grpc.aio.insecure_channel(replica["grpc"]) as channel:
        fuzz = HttpFuzz(channel, replica["http"]) if case.mode == "http" else GrpcFuzz(channel)
        await fuzz.run(count // 5)
        process = here.replica(0)
        before = process.memory_info().rss
        # Send the replica messages that no Envoy sends.
        await fuzz.run(count)
    # Every stream is answered or closed.
    case.report(f"{fuzz.sent} messages in {fuzz.streams} streams: {dict(sorted(fuzz.ends.items()))}")
    assert fuzz.ends["hangs"] == 0
    # The replica has not restarted, is ready, uses little more memory, and has logged no unexpected error.
    growth = process.memory_info().rss - before
    case.report(f"memory of the replica {growth / 2**20:+.1f} MiB after the first fifth")
    assert here.state["replicas"][0]["pid"] == process.pid
    await ready(here)
    assert growth < MOST_GROWTH
    unforeseen = _errors(here)
    case.report(f"{len(unforeseen)} unforeseen errors in its log")
    assert unforeseen == []
    # The replica serves other requests, and then every count of requests is 0.
    async with closed_loop(here.url, clients=10) as load:
        await load.wait_for_served(30)
    assert load.unserved == []
    await rests(here)


class Fuzz(ABC):
    """Sends damaged messages on many streams; one stream in five is an access-log stream.

    Counts messages (`sent`), `streams`, and streams' `ends` by status; `hangs` are unanswered streams.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._reports = channel.stream_unary(f"/{accesslog.SERVICE}/StreamAccessLogs")
        self._placed: dict[str, HTTPAccessLogEntry] = {}  # by request: valid end entries, not yet sent
        self.dice = random.Random(SEED)
        self.sent = 0
        self.streams = 0
        self.ends: Counter[str] = Counter()

    async def run(self, count: int) -> None:
        """Send `count` further damaged messages."""
        goal = self.sent + count

        async def talk() -> None:
            while self.sent < goal:
                self.streams += 1
                await (self.ask() if self.dice.random() < 0.8 else self._report())

        async with asyncio.TaskGroup() as tasks:
            for _ in range(STREAMS):
                tasks.create_task(talk())

    @abstractmethod
    async def ask(self) -> None:
        """Send damaged requests on one new stream or connection, and read the answers."""

    def placed(self, name: str, end: HTTPAccessLogEntry) -> None:
        """Note that request `name` was placed; usually a later access-log stream sends its `end`."""
        if self.dice.random() < TRUE_ENDS:
            self._placed[name] = end

    async def _report(self) -> None:
        mine, self._placed = self._placed, {}
        messages = [entries(self.dice, [*mine]) for _ in range(self.dice.randrange(1, 4))]
        truth = StreamAccessLogsMessage()
        truth.http_logs.log_entry.extend(mine.values())
        self.sent += len(messages) + 1
        async with self.patience():
            await self._reports(iter([*messages, truth.SerializeToString()]))
            self.ends["reported"] += 1

    @asynccontextmanager
    async def patience(self) -> AsyncIterator[None]:
        """Count a failed gRPC call by its status, and a call without an answer as `hangs`."""
        try:
            async with asyncio.timeout(HANGS_S):
                yield
        except grpc.aio.AioRpcError as fault:
            self.ends[fault.code().name] += 1
        except TimeoutError:
            self.ends["hangs"] += 1


class HttpFuzz(Fuzz):
    """Fuzzes the port of mode `http` at `address`."""

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        super().__init__(channel)
        self._host, self._port = split_host_port(address)

    async def ask(self) -> None:
        sent = requests(self.dice, f"fuzz-{self.streams}")
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            for data, is_whole in sent:
                self.sent += 1
                writer.write(data)
                if not await self._answer(reader, HANGS_S if is_whole else LEAVES_S, is_whole):
                    return
        finally:
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, patience_s: float, is_whole: bool) -> bool:
        """Read one HTTP answer. False if the connection carries no further request."""
        try:
            async with asyncio.timeout(patience_s):
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head)
                assert length is not None
                await reader.readexactly(int(length[1]))
        except TimeoutError:
            self.ends["hangs" if is_whole else "left"] += 1
            return False
        except (asyncio.IncompleteReadError, ConnectionError):
            self.ends["closed"] += 1
            return False
        self.ends[head.split()[1].decode()] += 1
        if found := re.search(rb"request-id: (\S+)\r\nx-picker-accounting-token: ([^\r]+)", head):
            name, token = (part.decode() for part in found.groups())
            self.placed(name, end_of_check(name, token))
        return b"connection: close" not in head


class GrpcFuzz(Fuzz):
    """Fuzzes ext_proc streams."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        super().__init__(channel)
        self._exchanges = channel.stream_stream(f"/{SERVICE}/Process")

    async def ask(self) -> None:
        name = f"fuzz-{self.streams}"
        messages = exchange(self.dice, name)
        self.sent += len(messages)
        call = self._exchanges()
        async with self.patience():
            # The replica may answer before it gets the last message.
            with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
                for message in messages:
                    await call.write(message)
                await call.done_writing()
            while (answer := await call.read()) is not grpc.aio.EOF:
                self._remember_placed(answer)
            self.ends[(await call.code()).name] += 1
        call.cancel()

    def _remember_placed(self, answer: bytes) -> None:
        """If the answer places a request, note its id for the access log."""
        said = ProcessingResponse.FromString(answer)
        name = said.dynamic_metadata.fields["picker"].struct_value.fields["id"].string_value
        if name:
            self.placed(name, end(name))


def _errors(here: Any) -> list[str]:
    """Lines of the replica's log that have level ERROR or lack the format of a log line."""
    found = re.search(r"logs in (\S+);", here.output)
    assert found is not None
    log = (Path(found[1]) / "replica-1.log").read_text(encoding="utf-8", errors="replace")
    own = r'{"ready"|\d{4}-\d\d-\S+Z (?!ERROR)'
    return [line for line in log.splitlines() if not re.match(own, line)]
