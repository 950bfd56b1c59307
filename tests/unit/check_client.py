"""Envoy's side of the mode `http` in tests: check requests, and HTTP/1.1 connections that carry checks."""

import asyncio
import contextlib
import json
from dataclasses import dataclass

BODY = b'{"model": "llama", "prompt": "hi"}'
PATIENT_S = 30.0


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> str:
        code: str = json.loads(self.body)["error"]["code"]
        return code


class Connection:
    """A connection from Envoy to the picker, driven by the test."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, *chunks: bytes) -> None:
        for chunk in chunks:
            self._writer.write(chunk)

    async def reply(self) -> Reply:
        async with asyncio.timeout(PATIENT_S):
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.strip().split("\r\n")
            headers = dict(line.split(": ", 1) for line in lines)
            body = await self._reader.readexactly(int(headers["content-length"]))
        return Reply(int(first.split()[1]), headers, body)

    async def ended(self) -> bytes:
        """Read until the server closes the connection; b"" if it resets the connection."""
        async with asyncio.timeout(PATIENT_S):
            with contextlib.suppress(ConnectionError):
                return await self._reader.read()
        return b""

    def send_end(self) -> None:
        self._writer.write_eof()

    def leave(self) -> None:
        self._writer.close()

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


def check(path: str = "/v1/completions", body: bytes = BODY, method: str = "POST", **headers: str) -> bytes:
    """The bytes of Envoy's check request with the whole body; `_` in the name of a header stands for `-`."""
    own = {"content-length": str(len(body)), "x-request-id": "req-1"}
    return head(f"{method} /check{path}", own, headers) + body


def head(line: str, own: dict[str, str], more: dict[str, str]) -> bytes:
    """The bytes of a request line and its headers; a header with an empty value is left out."""
    named = own | {name.replace("_", "-"): value for name, value in more.items()}
    lines = "".join(f"{name}: {value}\r\n" for name, value in named.items() if value)
    return f"{line} HTTP/1.1\r\nhost: pool\r\n{lines}\r\n".encode()
