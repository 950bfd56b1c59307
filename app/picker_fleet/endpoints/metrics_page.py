"""One endpoint's metrics page: the connection that fetches it, and the few series that matter of its text.

scraper.py is the caller. The HTTP/1.1 client is our own, since a general one costs several times the CPU of
everything else in a scrape: every request has the same bytes, and the response's headers are not needed.

A vLLM page has hundreds of lines, of which five are needed, ten times a second an endpoint. So the page is
not parsed: the wanted names are searched for, and only the lines that they begin are read. On those lines the
result is that of a full parser. Format: Prometheus' text exposition format 0.0.4.
"""

import asyncio
import itertools
import math
import re
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import httptools

from picker_fleet.endpoints.readings import NONE, EndpointMetrics
from picker_fleet.errors import PickerError
from picker_fleet.sections import Engine
from picker_fleet.state.primary import raise_if_cancelled
from picker_fleet.units import split_host_port

_LABEL = re.compile(rb'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\\n]|\\[^\n])*+)"[ \t]*(?:,|$)')
_SAMPLE = re.compile(
    # No part gives back what it took: a hostile line is refused in one pass.
    rb"(?:[ \t]*+\{(?P<labels>(?:[^\"{}\n]|\"(?:[^\"\\\n]|\\[^\n])*+\")*+)\}[ \t]*+|[ \t]++)"
    rb"(?P<value>[^ \t\r\n]++)(?:[ \t]++[-+0-9.eE]++)?[ \t]*+\r?$"
)
_ESCAPE = re.compile(r'\\([\\n"])')
_ESCAPED = {"\\": "\\", "n": "\n", '"': '"'}
_NAME_GOES_ON = frozenset(bytes((mark,)) for mark in (string.ascii_letters + string.digits + "_:").encode())
_BLANK = b" \t"
_MOST_SERIES = 1000  # of one name
_MOST_MENTIONS = 4000  # of one name, where it begins no line or a longer name
_MOST_LINE_BYTES = 64 * 1024
_MOST_DIGITS = 9
_OVERSHOOT = 1.05  # a share may pass 1 by rounding; what is far above is something else


class BadPage(PickerError):
    """A page that cannot be believed; the message says why in one line."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of the page: the text between its braces and its value, which may be NaN or infinite."""

    label_text: bytes
    value: float

    def labels(self) -> dict[str, str]:
        """Label values with escapes resolved.

        Raises:
            BadPage: not `name="value"` pairs.
        """
        found: dict[str, str] = {}
        at, text = 0, self.label_text.strip(_BLANK)
        while at < len(text):
            match = _LABEL.match(text, at)
            if match is None:
                raise BadPage(f"labels {text[:60]!r} are no name=value pairs")
            value = match[2].decode("utf-8", "replace")
            if "\\" in value:
                value = _ESCAPE.sub(lambda escape: _ESCAPED[escape[1]], value)
            found[match[1].decode()] = value
            at = match.end()
        return found


def read(page: bytes, engine: Engine, scraped_ms: int) -> EndpointMetrics:
    """What `page` says in the names of `engine`. Several series of a name: counts add up, utilisation is the
    highest. A last line without its line feed is cut off and does not count.

    Raises:
        BadPage: a wanted line is malformed, or there is none of them at all.
    """
    waiting = _samples(page, engine.waiting)
    running = _samples(page, engine.running)
    utilisation = _samples(page, engine.kv_utilisation)
    adapters = _samples(page, engine.adapters)
    if not (waiting or running or utilisation):
        raise BadPage(f"the page has none of the series of {engine.name}")
    max_adapters, active, queued = _adapters(adapters)
    return EndpointMetrics(
        scraped_ms=scraped_ms,
        waiting=_sum(waiting, engine.part_label),
        running=_sum(running, engine.part_label),
        kv_utilisation=_highest(utilisation),
        max_adapters=max_adapters,
        active_adapters=active,
        waiting_adapters=queued,
    )


def samples(page: bytes, name: bytes) -> Iterator[Sample]:
    """Every sample of the series `name`, in the page's order.

    Raises:
        BadPage: a line that begins with `name` is no sample, or the page names it without end.
    """
    after = mentions = 0
    while (start := page.find(name, after)) >= 0:
        mentions += 1
        if mentions > _MOST_MENTIONS:
            raise BadPage(f"{name.decode()} is mentioned more than {_MOST_MENTIONS} times")
        after = start + len(name)
        line_start = page.rfind(b"\n", 0, start) + 1
        line_end = page.find(b"\n", after)
        if line_end < 0:
            return
        if page[after : after + 1] in _NAME_GOES_ON or page[line_start:start].strip(_BLANK):
            after = line_end  # a line that begins otherwise is no sample of it, however often it names it
            continue
        if line_end - after > _MOST_LINE_BYTES:
            raise BadPage(f"{name.decode()} has a line of more than {_MOST_LINE_BYTES} bytes")
        line = page[after:line_end]
        match = _SAMPLE.match(line)
        if match is None:
            raise BadPage(f"{name.decode()} is followed by {line[:60]!r}")
        yield Sample(match["labels"] or b"", _value(name, match["value"]))
        after = line_end


def _samples(page: bytes, names: tuple[str, ...]) -> list[Sample]:
    for name in names:
        found = list(itertools.islice(samples(page, name.encode()), _MOST_SERIES + 1))
        if len(found) > _MOST_SERIES:
            raise BadPage(f"{name} has more than {_MOST_SERIES} series")
        if found:
            return found
    return []


def _value(name: bytes, text: bytes) -> float:
    try:
        if b"_" in text:  # legal in Python's numbers only
            raise ValueError
        return float(text)
    except ValueError:
        raise BadPage(f"{name.decode()} has the value {text[:60]!r}") from None


def _sum(found: list[Sample], part_label: str | None) -> float | None:
    """The total of the known values, None if there is none. Of equal series the last counts."""
    if len(found) > 1:
        by_labels = {frozenset((labels := one.labels()).items()): (one, labels) for one in found}
        kept = [one for one, labels in by_labels.values() if not (part_label and labels.get(part_label))]
        found = kept or [one for one, _ in by_labels.values()]
    known = [one.value for one in found if 0 <= one.value < math.inf]
    return sum(known) if known else None


def _highest(found: list[Sample]) -> float | None:
    """The highest share, at most 1; None if none of the values is a share."""
    known = [one.value for one in found if 0 <= one.value <= _OVERSHOOT]
    return min(max(known), 1.0) if known else None


def _adapters(found: list[Sample]) -> tuple[int | None, frozenset[str], frozenset[str]]:
    """vLLM leaves old label sets on its page; the value is a time, and the latest is what holds."""
    dated = [one for one in found if math.isfinite(one.value)]
    if not dated:
        return None, NONE, NONE
    labels = max(dated, key=lambda one: one.value).labels()
    most = labels.get("max_lora", "")
    return (
        int(most) if most.isascii() and most.isdecimal() and len(most) <= _MOST_DIGITS else None,
        _names(labels.get("running_lora_adapters", "")),
        _names(labels.get("waiting_lora_adapters", "")),
    )


def _names(listed: str) -> frozenset[str]:
    return frozenset(name for part in listed.split(",") if (name := part.strip())) if listed else NONE


MAX_PAGE_BYTES = 512 * 1024  # a vLLM page has 53 KB


class FetchError(PickerError):
    """There is no page; `kind` is `connection`, `status` or `page`, and the message says more."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class _ClosedUnused(FetchError):
    """A connection that was kept alive ended before a byte of the answer came: its idle time was over."""


class Connection:
    """Asks `address` (`ip:port`) for its page at `path`, or for a sign of life at `probe_path`, one question
    after the other. One event loop.

    It connects when first asked, and again after whatever ended the connection. `close` is final. `lost` is
    set when the server has ended the connection between two questions.
    """

    def __init__(
        self, address: str, path: str, *, probe_path: str = "/health", max_page_bytes: int = MAX_PAGE_BYTES
    ) -> None:
        self._host, self._port = split_host_port(address)
        self._max_page_bytes = max_page_bytes
        self._exchange: _Exchange | None = None
        self.unreached = 0  # attempts to connect, in a row, that have not succeeded
        self.unanswered = 0  # questions, in a row, that not one byte came back to
        self.lost = asyncio.Event()
        # Compressing a page takes longer than sending it: none is asked for.
        headers = f"Host: {address}\r\nAccept: text/plain\r\nUser-Agent: picker\r\n\r\n"
        self._page = f"GET {path} HTTP/1.1\r\n{headers}".encode("ascii")
        self._probe = f"GET {probe_path} HTTP/1.1\r\n{headers}".encode("ascii")

    async def fetch(self) -> bytes:
        """The page. Waits without end for it: the deadline is the caller's.

        Raises:
            FetchError: no connection, an answer other than 200, or a page too large or cut short.
        """
        status, page = await self._question(self._page)
        if status != 200:
            self.close()
            raise FetchError("status", f"answered {status}")
        return page

    async def probe(self) -> None:
        """Wait, without end, for any answer: it shows that the server still runs.

        Raises:
            FetchError: no connection, or an answer too large or cut short.
        """
        await self._question(self._probe)

    async def _question(self, request: bytes) -> tuple[int, bytes]:
        """Status and body of the answer."""
        self.unanswered += 1
        try:
            exchange = self._exchange
            if exchange is not None and exchange.usable:
                try:
                    return await self._ask(exchange, request)
                except _ClosedUnused:
                    pass  # the server may close an idle connection at any time: that is no fault of its own
            return await self._ask(await self._connect(), request)
        except BaseException as fault:
            if isinstance(fault, FetchError) or (self._exchange is not None and self._exchange.some_came):
                self.unanswered = 0
            # What is still to come on this connection belongs to nobody.
            self.close()
            raise

    def close(self) -> None:
        """End the connection, if there is one. Idempotent."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.abort()

    async def _ask(self, exchange: "_Exchange", request: bytes) -> tuple[int, bytes]:
        answer = await exchange.ask(request)
        self.unanswered = 0
        return answer

    async def _connect(self) -> "_Exchange":
        self.close()
        loop = asyncio.get_running_loop()
        made = _Exchange(loop, self._max_page_bytes, self.lost.set)
        # Known before it is connected, so that a cancellation on the way cannot leave it open.
        self._exchange = made
        self.unreached += 1
        try:
            await loop.create_connection(lambda: made, self._host, self._port)
        except OSError as fault:
            raise_if_cancelled()
            raise FetchError("connection", f"no connection: {fault.strerror or fault}") from None
        raise_if_cancelled()
        self.unreached = 0
        return made


class _Exchange(asyncio.Protocol):
    """The bytes of one connection: a question out, an answer in."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, max_page_bytes: int, on_idle_loss: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._on_idle_loss = on_idle_loss
        self._max_page_bytes = max_page_bytes
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._aborted = False
        self._used = False
        self._begin()

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing() and self._answer is None

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        transport = self._transport
        if transport is None:
            raise FetchError("connection", "the connection closed at once")
        self._answer = self._loop.create_future()
        transport.write(request)
        return await self._answer

    def abort(self) -> None:
        self._aborted = True
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._aborted:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self.some_came = True
        try:
            if self._answer is None:
                raise httptools.HttpParserError("bytes that nobody asked for")
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as fault:
            self._fail(FetchError("page", f"no HTTP answer: {fault}"))

    def connection_lost(self, fault: Exception | None) -> None:
        self._transport = None
        if self._used and self._answer is None and not self._aborted:
            self._on_idle_loss()
        if self._until_close and self._in_body and fault is None:
            # Without a length the end of the connection is the end of the page.
            self.on_message_complete()
        elif not self.some_came and self._used:
            self._fail(_ClosedUnused("connection", "closed while idle"))
        else:
            self._fail(FetchError("connection", "the connection closed before the page was complete"))

    # The parser's calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._until_close = False

    def on_headers_complete(self) -> None:
        self._in_body = True

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if self._size > self._max_page_bytes:
            self._fail(FetchError("page", f"the page has more than {self._max_page_bytes} bytes"))
        else:
            self._parts.append(body)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self._begin()
            return
        page = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        keep = self._transport is not None and self._parser.should_keep_alive()
        self._begin()
        self._used = True
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_result((status, page))
        if not keep:
            self.abort()

    def _begin(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0
        self.some_came = False
        self._in_body = False
        self._until_close = True

    def _fail(self, fault: FetchError) -> None:
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_exception(fault)
        self.abort()
