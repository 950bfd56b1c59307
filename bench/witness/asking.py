"""One request over a connection of its own, and what became of it as its client saw it."""

import asyncio
import json
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

_HANGS_S = 90.0  # no answer takes so long unless it hangs
_DONE = b"data: [DONE]"


@dataclass(frozen=True, slots=True)
class Wish:
    """What a client wants. `pad_bytes` make its prompt longer; it hangs up after `leaves_s` (None: never)."""

    prompt: str
    tokens: int
    streamed: bool = False
    pad_bytes: int = 0
    leaves_s: float | None = None
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Asked:
    """A request in its client's memory. Times are of its own monotonic clock.

    `status` is 0 if no answer began, `whole` says that the answer had everything it should have; `left` that
    the client hung up first. `request_id`, `endpoint`, `retry_after` and `reason` (why the picker refused it)
    are what the answer's headers say, if it has any.
    """

    wish: Wish
    sent_s: float
    done_s: float
    status: int
    whole: bool
    left: bool
    request_id: str
    endpoint: str
    retry_after: str
    fault: str
    reason: str = ""

    @property
    def served(self) -> bool:
        return self.status == 200 and self.whole

    @property
    def took_s(self) -> float:
        """From asking to the end of the answer."""
        return self.done_s - self.sent_s

    @property
    def failed(self) -> bool:
        """The client waited and was not served."""
        return not self.left and not self.served


async def ask(url: str, wish: Wish) -> Asked:
    """Send `wish` and read its answer to the end. Never raises but CancelledError: a fault is remembered."""
    sent_s = time.monotonic()
    received = bytearray()
    fault, left = "", False
    patience_s = _HANGS_S if wish.leaves_s is None else wish.leaves_s
    try:
        async with asyncio.timeout(patience_s):
            await _talk(url, wish, received)
    except TimeoutError:
        left = wish.leaves_s is not None
        fault = "" if left else "hangs"
    except OSError as broken:
        fault = f"{type(broken).__name__}: {broken}"
    status, headers, body, complete = _read(bytes(received))
    left = left and not complete  # it had meant to leave, and was answered before
    return Asked(
        wish,
        sent_s,
        time.monotonic(),
        status,
        complete and _is_whole(wish, body),
        left,
        headers.get("x-picker-request-id", ""),
        headers.get("x-served-by", ""),
        headers.get("retry-after", ""),
        fault or ("" if complete else "cut off") if not left else "",
        headers.get("x-llm-d-request-dropped-reason", ""),
    )


async def _talk(url: str, wish: Wish, received: bytearray) -> None:
    at = urlsplit(url)
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    try:
        writer.write(request_bytes(at.netloc, wish))
        while chunk := await reader.read(65536):
            received += chunk
    finally:
        writer.transport.abort()


def request_bytes(host: str, wish: Wish) -> bytes:
    """The request of `wish` as it goes over the wire; the connection ends with its answer."""
    body = json.dumps(
        {
            "model": "llama",
            "prompt": wish.prompt + "x" * wish.pad_bytes,
            "max_tokens": wish.tokens,
            "stream": wish.streamed,
        }
    ).encode()
    lines = [
        "POST /v1/completions HTTP/1.1",
        f"host: {host}",
        "content-type: application/json",
        "connection: close",
        *(f"{name}: {value}" for name, value in wish.headers),
        f"content-length: {len(body)}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def _read(received: bytes) -> tuple[int, dict[str, str], bytes, bool]:
    """Status (0: none), headers, body, and whether the answer came to its own end."""
    head, found, rest = received.partition(b"\r\n\r\n")
    if not found:
        return 0, {}, b"", False
    lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    status = int(lines[0].split()[1])
    if headers.get("transfer-encoding") == "chunked":
        body, complete = _unchunked(rest)
        return status, headers, body, complete
    return status, headers, rest, len(rest) == int(headers.get("content-length", -1))


def _unchunked(rest: bytes) -> tuple[bytes, bool]:
    pieces, at = [], 0
    while (line := rest.find(b"\r\n", at)) >= 0:
        size = int(rest[at:line].split(b";")[0], 16)
        if size == 0:
            return b"".join(pieces), True
        pieces.append(rest[line + 2 : line + 2 + size])
        at = line + 2 + size + 2
    return b"".join(pieces), False


def _is_whole(wish: Wish, body: bytes) -> bool:
    if wish.streamed:
        events = [part for part in body.split(b"\n\n") if part]
        texts = sum(b'"text":""' not in part and b'"choices":[{' in part for part in events[:-1])
        return bool(events) and events[-1] == _DONE and texts == wish.tokens
    try:
        return bool(json.loads(body)["usage"]["completion_tokens"] == wish.tokens)
    except (ValueError, KeyError, TypeError):
        return False
