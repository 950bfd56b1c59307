"""Clients and queries shared by the tests of whole fleets."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from picker_tools.audit.log import Entry
from picker_tools.load.generator import Answer, Load, Request, send_request


async def complete(url: str, prompt: str, tokens: int, *, streamed: bool = False) -> Answer:
    """Request a completion of `tokens` tokens; an answer with fewer tokens does not count as served."""
    return await send_request(url, Request(prompt, tokens, streamed))


async def completed(url: str, count: int, tokens: int = 2) -> list[Answer]:
    """The answers to `count` parallel requests; asserts that all are served."""
    answers = await asyncio.gather(*(complete(url, f"prompt {i}", tokens) for i in range(count)))
    assert [answer for answer in answers if not answer.served] == []
    return answers


async def served_by(url: str, count: int) -> set[str]:
    """The endpoints that serve `count` parallel requests; asserts that all are served."""
    return {answer.endpoint for answer in await completed(url, count)}


def one_token(_: object, number: int) -> Request:
    """Make a request for one token; for the loops of picker_tools.load.generator."""
    return Request(f"request {number}", 1)


async def answered(load: Load, more: int) -> None:
    """Wait until `more` further requests of `load` have been answered or have failed; raise TimeoutError
    after a minute."""
    goal = len(load.history) + more
    async with asyncio.timeout(60):
        await load.wait_until(lambda: len(load.history) >= goal)


class Caller:
    """A client on a raw connection, which the client can close at any moment."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer

    @classmethod
    async def ask(cls, url: str, tokens: int, *, header: str = "content-type: application/json") -> "Caller":
        """Send a request for a streamed answer, but do not wait for the answer."""
        at = urlsplit(url)
        reader, writer = await asyncio.open_connection(at.hostname, at.port)
        body = json.dumps({"model": "llama", "prompt": "hi", "max_tokens": tokens, "stream": True})
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {at.netloc}\r\n{header}\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
        await writer.drain()
        return cls(reader, writer)

    async def first_bytes(self) -> bytes:
        """Read the beginning of the answer."""
        async with asyncio.timeout(30):
            return await self.reader.read(64)

    async def read_to_end(self) -> None:
        """Read the rest of the answer."""
        async with asyncio.timeout(60):
            while b"[DONE]" not in (part := await self.reader.read(65536)):
                assert part

    async def leave(self) -> None:
        """Close the connection without reading the rest."""
        self._writer.transport.abort()


async def exchange(url: str, data: bytes) -> bytes:
    """Send `data` on a new connection; return the bytes received until the peer closes or resets it."""
    at = urlsplit(url)
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    received = b""
    try:
        writer.write(data)
        async with asyncio.timeout(30):
            while part := await reader.read(65536):
                received += part
    except ConnectionResetError:
        pass
    finally:
        writer.transport.abort()
    return received


async def post_while_reading(url: str, body: bytes, workload: bytes = b"{}") -> tuple[int, bytes]:
    """Post `body` and read the answer meanwhile (httpx sends all first); return the answer's status and
    body."""
    at = urlsplit(url)
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {at.netloc}\r\ncontent-type: application/json\r\n"
    rest = f"\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    writer.write(head.encode() + b"x-workload-context: " + workload + rest + body)
    try:
        async with asyncio.timeout(30):
            lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
            length = next(int(line.split(":")[1]) for line in lines if line.startswith("content-length:"))
            return int(lines[0].split()[1]), await reader.readexactly(length)
    finally:
        writer.transport.abort()


async def at_rest(fleet: Any, replica: int = 0, within_s: float = 15.0) -> dict[str, Any]:
    """Wait until no counter and no record shows a queued or running request; return the state."""

    async def look() -> tuple[dict[str, Any], int]:
        return await fleet.get("state", replica), await records(fleet)

    def rests(found: tuple[dict[str, Any], int]) -> bool:
        return not any(counts(found[0])) and not found[1]

    found: tuple[dict[str, Any], int] = await fleet.eventually(look, rests, within_s=within_s, what="at rest")
    return found[0]


def counts(state: dict[str, Any]) -> list[float]:
    """All counters of a state: stock, queue, leases, and requests in flight at each endpoint."""
    return [state["stock"], state["queued"], state["leases"], *state["in_flight"].values()]


async def records(fleet: Any) -> int:
    """Number of request records in the shared state."""
    async with fleet.redis() as client:
        return int(await client.hlen("epp:{default}:requests"))


async def decisions(fleet: Any) -> list[Entry]:
    """The entries of the decision log so far."""
    async with fleet.redis() as client:
        return [Entry.parse(raw) for _, raw in await client.xrange("epp:{default}:log")]


async def explanation(fleet: Any) -> tuple[int, dict[str, Any]]:
    """The replica that placed the latest request without queueing it, and how this replica explains the
    choice of the endpoint."""
    *_, entry = [entry for entry in await decisions(fleet) if entry.event == "bypassed"]
    replicas = range(len(fleet.state["replicas"]))
    replies = [await fleet.admin(f"/api/v1/requests/{entry.request}", replica) for replica in replicas]
    known = [reply.json()["explanation"] if reply.status_code == 200 else None for reply in replies]
    ((replica, explained),) = [(at, found) for at, found in enumerate(known) if found is not None]
    return replica, explained


async def fresh(read: Callable[[], Awaitable[str]]) -> str:
    """A metrics page rendered after this call: a page is cached for a second, and successive pages differ."""
    page = await read()
    while (next_page := await read()) == page:
        pass
    return next_page


async def metric(fleet: Any, name: str, *replicas: int, **labels: str) -> float:
    """The sum of a metric's series with these labels, over `replicas` (default: all); at most 1 s old."""
    asked = replicas or range(len(fleet.state["replicas"]))
    pages = [(await fleet.admin("/metrics", replica)).text for replica in asked]
    return sum(total(page, name, **labels) for page in pages)


def total(page: str, name: str, **labels: str) -> float:
    """The sum of a metric's series with these labels, on one metrics page."""
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    lines = [line for line in page.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(each in line for each in wanted))
