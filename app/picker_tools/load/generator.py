"""The load generator: an HTTP/1.1 client on the event loop, closed and open loops of requests, and a record
of each answer.

`picker load`, the fault suite, the long tests and the benches send their load by this module. The client
takes little CPU time, so that it does not slow a fleet on the same machine.

A closed loop has a fixed number of clients. Each client sends its next request after the last answer, so a
slow fleet gets less load. An open loop sends each request at a planned time, whatever the fleet answers.
"""

import asyncio
import itertools
import math
import random
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache, partial
from typing import Self, cast
from urllib.parse import urlsplit

import httptools
import orjson

PATH = "/v1/completions"
LONGEST_BODY_BYTES = 60_000  # Envoy can retry requests of up to this size at another replica
HANGS_S = 90.0  # the client hangs up if an answer takes more seconds
_CONNECT_S = 5.0
_SERVED_WITHIN_S = 120.0
_REFUSED_PAUSE_S = 0.05
_FLOWS = 6
_TEXT_BYTES = 300


@dataclass(frozen=True, slots=True)
class Request:
    """A request for a completion of `tokens` tokens. `pad_bytes` are added to the prompt; the client hangs up
    after `leaves_s` seconds (None: never).
    """

    prompt: str
    tokens: int
    streamed: bool = False
    pad_bytes: int = 0
    leaves_s: float | None = None
    headers: tuple[tuple[str, str], ...] = ()
    model: str = "llama"

    def body(self) -> bytes:
        prompt = self.prompt + "x" * self.pad_bytes
        tree = {"model": self.model, "prompt": prompt, "max_tokens": self.tokens, "stream": self.streamed}
        return orjson.dumps(tree)


@lru_cache(maxsize=16)  # some loops send the same few requests again and again
def _encode(request: Request, host: str) -> bytes:
    body = request.body()
    lines = "".join(f"{name}: {value}\r\n" for name, value in request.headers)
    head = (
        f"POST {PATH} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        f"{lines}content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Kind(StrEnum):
    """The outcome of a request as its client sees it."""

    SERVED = "served"  # the client got a whole answer
    REFUSED = "refused"  # the client got status 503 or 429
    FAILED = "failed"  # the client got an error or an incomplete answer, or timed out
    LEFT = "left"  # the client hung up


@dataclass(frozen=True, slots=True)
class Answer:
    """A request and its answer as the client saw them. The fields `sent_s` and `due_s` (the planned time) are
    readings of the monotonic clock. Other times are seconds from the sending of the request: `head_s` to the
    answer's headers, `first_s` to the first byte of its body (None: never), `took_s` to its end.

    The sender sets `source` and `number`. `status` is 0 if no answer began. `fault` says why an answer is not
    whole. `text` is the beginning of the body. The other fields come from the answer's headers and body;
    `reason` is the reason for a refusal.
    """

    request: Request
    source: str
    number: int
    due_s: float
    sent_s: float
    head_s: float | None
    first_s: float | None
    took_s: float
    status: int
    fault: str = ""
    left: bool = False
    tokens: int | None = None
    reason: str = ""
    retry_after: str = ""
    endpoint: str = ""
    request_id: str = ""
    text: str = ""

    @property
    def kind(self) -> Kind:
        if self.left:
            return Kind.LEFT
        if self.fault:
            return Kind.FAILED
        if self.status == 200:
            return Kind.SERVED
        return Kind.REFUSED if self.status in (429, 503) else Kind.FAILED

    @property
    def served(self) -> bool:
        return self.kind is Kind.SERVED

    @property
    def unserved(self) -> bool:
        """Whether the client waited and was not served."""
        return self.kind in (Kind.REFUSED, Kind.FAILED)

    @property
    def done_s(self) -> float:
        return self.sent_s + self.took_s

    @property
    def outcome(self) -> str:
        """The request's outcome in a few words, by which outcomes are counted."""
        if self.served or self.left:
            return self.kind.value
        return self.fault or f"{self.status} {self.reason or 'without a reason'}"

    def __str__(self) -> str:
        name, outcome = f"{self.source} #{self.number}", self.outcome
        return f"{name}: sent at {self.sent_s:.3f} s, {outcome} after {self.took_s:.3f} s"


_USAGE = re.compile(rb'"completion_tokens":\s*(\d+)')
_CHOICE, _NO_TEXT = re.compile(rb'"choices":\s*\[\{'), re.compile(rb'"text":\s*""')
_DONE = b"data: [DONE]"


class _Exchange:
    """An answer that is arriving. The event `over` is set when the answer has ended, whole or not."""

    def __init__(self) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sent_s = self.last_s = time.monotonic()
        self.head_s: float | None = None
        self.first_s: float | None = None
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.parts: list[bytes] = []
        self.fault = ""
        self.left = False

    def end(self, fault: str = "", *, left: bool = False) -> None:
        """End the exchange unless it has already ended. `left`: whether the client has hung up."""
        if not self.over.done():
            self.last_s = time.monotonic()
            self.fault, self.left = fault, left
            self.over.set_result(None)

    def header(self, name: bytes) -> str:
        return self.headers.get(name, b"").decode("latin-1")

    def answer(
        self, request: Request, source: str, number: int, due_s: float | None, *, exact: bool
    ) -> Answer:
        body = b"".join(self.parts)
        tokens, fault = None, self.fault
        if self.status == 200 and not fault and not self.left:
            tokens = _tokens(body, streamed=request.streamed)
            if request.streamed and not body.rstrip().endswith(_DONE):
                fault = "the stream ended without [DONE]"
            elif exact and tokens != request.tokens:
                fault = f"the answer has {tokens} of {request.tokens} tokens"
        sent_s = self.sent_s
        return Answer(
            request,
            source,
            number,
            sent_s if due_s is None else due_s,
            sent_s,
            None if self.head_s is None else self.head_s - sent_s,
            None if self.first_s is None else self.first_s - sent_s,
            self.last_s - sent_s,
            self.status,
            fault,
            self.left,
            tokens,
            self.header(b"x-llm-d-request-dropped-reason"),
            self.header(b"retry-after"),
            self.header(b"x-served-by"),
            self.header(b"x-picker-request-id"),
            body[:_TEXT_BYTES].decode(errors="replace"),
        )


def _tokens(body: bytes, *, streamed: bool) -> int | None:
    """The number of tokens in an answer: of a stream, its text events; else the count in `usage`."""
    if streamed:
        return len(_CHOICE.findall(body)) - len(_NO_TEXT.findall(body))
    usage = _USAGE.findall(body)
    return int(usage[-1]) if usage else None


class _Connection(asyncio.Protocol):
    """A connection of `client` that carries one request at a time."""

    def __init__(self, client: "Client") -> None:
        self._client = client
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._exchange: _Exchange | None = None
        self._began = self._whole = False  # (whether the answer has begun, whether it is complete)
        self._closing = False

    @property
    def reusable(self) -> bool:
        """Whether the next request may be sent on this connection, since the last answer is whole."""
        return self._whole and not self._closing

    def send(self, request: bytes, exchange: _Exchange) -> None:
        """Write `request` to the connection; the answer arrives in `exchange`."""
        self._exchange = exchange
        self._began = self._whole = False
        if self._transport is None or self._transport.is_closing():
            self.close("the connection was closed before the request was sent")
        else:
            self._transport.write(request)

    def hang_up(self) -> None:
        """Close the connection because the client hangs up."""
        self.close("", left=True)

    def close(
        self, fault: str = "the connection was closed without a whole answer", *, left: bool = False
    ) -> None:
        self._closing = True
        if self._exchange is not None:
            self._exchange.end(fault, left=left)
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports have other types

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as fault:
            self.close(f"the answer is not HTTP: {fault}")

    def connection_lost(self, _: Exception | None) -> None:
        self.close()

    def on_message_begin(self) -> None:
        if self._exchange is None or self._began:
            self._client.surplus_answers += 1
            self._closing = True
        self._began = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._exchange is not None and not self._whole:
            self._exchange.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if self._exchange is not None and not self._exchange.over.done():
            self._exchange.status = self._parser.get_status_code()
            self._exchange.head_s = time.monotonic()
            if not self._parser.should_keep_alive():
                self._closing = True

    def on_body(self, part: bytes) -> None:
        exchange = self._exchange
        if exchange is None or exchange.over.done():
            return
        if exchange.first_s is None:
            exchange.first_s = time.monotonic()
        exchange.parts.append(part)

    def on_message_complete(self) -> None:
        if self._exchange is not None and not self._whole:
            assert self._transport is not None
            self._whole = True
            # If Envoy answers before it has read the whole request, it closes the connection afterwards.
            self._closing |= bool(self._transport.get_write_buffer_size())
            self._exchange.end()


class Client:
    """An HTTP client of one `http://host:port`, with one connection per open request; a context manager.

    `keep`: reuse connections. `exact`: an answer with fewer or more tokens than requested is a fault, which
    only simulators rule out: other servers may end an answer early. Use a client on one event loop.
    """

    def __init__(self, url: str, *, keep: bool = True, exact: bool = True) -> None:
        parts = urlsplit(url)
        self._host, self._port, self.address = parts.hostname or "", parts.port or 80, parts.netloc
        self._keep, self._exact = keep, exact
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()
        self._hung_up = False
        self.surplus_answers = 0  # number of answers beyond one for each request

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.hang_up()

    def hang_up(self) -> None:
        """Close all connections. Open requests get the outcome LEFT: the client hung up."""
        self._hung_up = True
        for connection in list(self._all):
            connection.hang_up()

    async def send(
        self,
        request: Request,
        *,
        source: str = "",
        number: int = 0,
        due_s: float | None = None,
        within_s: float = HANGS_S,
    ) -> Answer:
        """Send `request` and read the whole answer. Raises no error but CancelledError.

        Closes the connection after `within_s` seconds, or when the client hangs up.
        """
        exchange = _Exchange()  # the time begins here, so it includes connecting
        await self._exchange(request, exchange, within_s)
        return exchange.answer(request, source, number, due_s, exact=self._exact)

    async def _exchange(self, request: Request, exchange: _Exchange, within_s: float) -> None:
        """Send `request` and wait for the end of `exchange`."""
        encoded = _encode(request, self.address)
        try:
            connection = self._idle_connection() or await self._connect()
        except (OSError, TimeoutError) as fault:
            exchange.end(f"no connection: {str(fault) or f'not within {_CONNECT_S:g} s'}")
            return
        loop = asyncio.get_running_loop()
        if request.leaves_s is None:
            timer = loop.call_later(within_s, exchange.end, f"no whole answer within {within_s:g} s")
        else:
            timer = loop.call_later(request.leaves_s, partial(exchange.end, left=True))
        try:
            if self._hung_up:  # `hang_up` was called while connecting
                exchange.end(left=True)
            else:
                connection.send(encoded, exchange)
            await exchange.over
        finally:
            timer.cancel()
            if connection.reusable and self._keep:
                self._idle.append(connection)
            else:
                connection.close()
                self._all.discard(connection)

    def _idle_connection(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
            self._all.discard(connection)
        return None

    async def _connect(self) -> _Connection:
        make = partial(_Connection, self)
        async with asyncio.timeout(_CONNECT_S):
            _, connection = await asyncio.get_running_loop().create_connection(make, self._host, self._port)
        self._all.add(connection)
        return connection


async def send_request(url: str, request: Request) -> Answer:
    """Send `request` on a new connection, used only for this request."""
    with Client(url) as client:
        return await client.send(request)


def flow_header(flow: str) -> tuple[tuple[str, str], ...]:
    return (("x-gateway-inference-fairness-id", flow),)


MakeRequest = Callable[[random.Random, int], Request]


def mixed_request(dice: random.Random, number: int) -> Request:
    """A random request of one of six flows for a short answer; half are streamed, a few have large bodies."""
    return Request(
        prompt=f"request {number} ",
        tokens=dice.choice((1, 3, 10, 30)),
        streamed=dice.random() < 0.5,
        pad_bytes=dice.choice((0, 0, 200, 2000, LONGEST_BODY_BYTES - 500 if dice.random() < 0.2 else 0)),
        headers=flow_header(f"flow-{dice.randrange(_FLOWS)}"),
    )


def requests_of_flows(flows: int) -> MakeRequest:
    """Returns a function that makes requests for one token, from each of `flows` flows in turn."""
    return lambda _, number: Request(f"request {number}", 1, headers=flow_header(f"flow-{number % flows}"))


@dataclass(frozen=True, slots=True)
class Planned:
    """A request of an open loop, due `at_s` seconds after the loop began."""

    at_s: float
    request: Request
    source: str = ""
    number: int = 0


def steady(per_s: float, make_request: MakeRequest) -> Iterator[Planned]:
    """An endless plan of `per_s` requests a second, evenly spaced."""
    dice = random.Random(1)
    for number in itertools.count(1):
        yield Planned((number - 1) / per_s, make_request(dice, number), number=number)


class Load:
    """Sends the requests of closed or open loops by one `Client`. `history` has the answers in order of end.

    `began_s` is the start time of the last loop by the monotonic clock.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self.history: list[Answer] = []
        self.sent = 0
        self.ended = Counter[Kind]()
        self.began_s = time.monotonic()

    @property
    def open(self) -> int:
        """The number of requests whose answers have not ended."""
        return self.sent - self.ended.total()

    @property
    def served(self) -> int:
        return self.ended[Kind.SERVED]

    @property
    def unserved(self) -> list[Answer]:
        """The answers that were refused or failed."""
        return [answer for answer in self.history if answer.unserved]

    @property
    def now_s(self) -> float:
        """Seconds since the load began."""
        return time.monotonic() - self.began_s

    @property
    def is_stopped(self) -> bool:
        return self._stopping.is_set()

    def finish(self) -> None:
        """Stop sending requests, so that the loops end when the last answer has ended."""
        self._stopping.set()

    def stop(self) -> None:
        """Stop sending requests, and hang up on all open requests."""
        self.finish()
        self._client.hang_up()

    async def wait_for_served(self, count: int) -> None:
        """Wait until `count` more requests have been served. Raises TimeoutError."""
        goal = self.served + count
        async with asyncio.timeout(_SERVED_WITHIN_S):
            await self.wait_until(lambda: self.served >= goal)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds; it is evaluated whenever a request has ended."""
        while not condition():
            await self._ended.wait()

    async def send_closed(
        self,
        clients: int,
        make_request: MakeRequest,
        *,
        seed: int = 1,
        requests: float = math.inf,
        pause_s: float = _REFUSED_PAUSE_S,
        think_s: float = 0.0,
    ) -> None:
        """Run a closed loop of `clients` clients until `requests` are answered or `finish` is called. Before
        its next request a client waits `think_s` seconds, or `pause_s` after an unserved request.
        """
        self.began_s, dice, numbers = time.monotonic(), random.Random(seed), itertools.count(1)

        async def client() -> None:
            while not self.is_stopped and (number := next(numbers)) <= requests:
                answer = await self._send(Planned(self.now_s, make_request(dice, number), number=number))
                if pause := pause_s if answer.unserved else think_s:
                    await asyncio.sleep(pause)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(clients):
                tasks.create_task(client())

    async def send_open(self, plan: Iterable[Planned]) -> None:
        """Run an open loop until `finish` is called: send each request of `plan` when due, or late."""
        self.began_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for planned in plan:
                if await self.stopped_within(planned.at_s - self.now_s):
                    return
                tasks.create_task(self._send(planned))

    async def stopped_within(self, seconds: float) -> bool:
        """Wait for `seconds`, or until `finish` is called. Returns whether `finish` was called."""
        if seconds > 0 and not self.is_stopped:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._stopping.wait()
        return self.is_stopped

    async def _send(self, planned: Planned) -> Answer:
        self.sent += 1
        due_s, source, number = self.began_s + planned.at_s, planned.source, planned.number
        answer = await self._client.send(planned.request, source=source, number=number, due_s=due_s)
        self.ended[answer.kind] += 1
        self.history.append(answer)
        self._ended.set()  # wakes all tasks that are waiting now
        self._ended.clear()
        return answer


def closed_loop(
    url: str,
    *,
    clients: int,
    seed: int = 1,
    make_request: MakeRequest = mixed_request,
    pause_s: float = _REFUSED_PAUSE_S,
    think_s: float = 0.0,
) -> AbstractAsyncContextManager[Load]:
    """Run `Load.send_closed`, with a new connection for each request, until the `with` block ends and each
    client has finished its last request.
    """
    return _during_block(
        Client(url, keep=False),
        lambda load: load.send_closed(clients, make_request, seed=seed, pause_s=pause_s, think_s=think_s),
    )


def open_loop(
    url: str, per_s: float, make_request: MakeRequest, *, keep: bool = False
) -> AbstractAsyncContextManager[Load]:
    """Send `per_s` requests a second until the `with` block ends, then wait until all are answered."""
    return _during_block(Client(url, keep=keep), lambda load: load.send_open(steady(per_s, make_request)))


@asynccontextmanager
async def _during_block(
    client: Client, loop: Callable[[Load], Coroutine[None, None, None]]
) -> AsyncIterator[Load]:
    with client:
        load = Load(client)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(loop(load))
            try:
                yield load
            finally:
                load.finish()


def quantile(values: Sequence[float], part: float) -> float:
    """The quantile `part` (0 to 1) of sorted `values` by nearest rank; NaN if `values` is empty."""
    if not values:
        return math.nan
    return values[max(0, math.ceil(part * len(values)) - 1)]


def quantiles(values: Iterable[float]) -> dict[str, float]:
    """The quantiles p50, p90, p95 and p99 and the maximum of `values`; empty if `values` is empty."""
    ordered = sorted(values)
    if not ordered:
        return {}
    found = {f"p{percent}": quantile(ordered, percent / 100) for percent in (50, 90, 95, 99)}
    return found | {"max": ordered[-1]}
