"""The processes of the bench that are no part of the product.

`python -m bench.large_pool.child servers PORT COUNT`: model servers at COUNT addresses, all on one port, in
one process; prints a line once they listen. `… replica serve …` is `picker serve` without scraping.
"""

import asyncio
import sys
from typing import cast

import uvloop

from picker_fleet import cli
from picker_fleet.endpoints.scraping import ScrapingTask

_HEADERS_END = b"\r\n\r\n"
_PAGE = b"""vllm:num_requests_running{model_name="llama"} 1.0
vllm:num_requests_waiting{model_name="llama"} 0.0
vllm:kv_cache_usage_perc{model_name="llama"} 0.25
"""
_ANSWER = b'{"choices":[{"text":"hi"}],"usage":{"prompt_tokens":9,"completion_tokens":1,"total_tokens":10}}'


def address(number: int) -> str:
    """The loopback address of server `number`."""
    return f"127.1.{number // 250}.{number % 250 + 1}"


class _Server(asyncio.Protocol):
    """Answers each request at once, a metrics page for a GET and a completion for a POST."""

    def __init__(self) -> None:
        self._got = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._got += data
        while (end := self._got.find(_HEADERS_END)) >= 0:
            head, rest = self._got[:end].lower(), self._got[end + len(_HEADERS_END) :]
            if b"transfer-encoding: chunked" in head:
                end_of_body = rest.find(b"0\r\n\r\n")
                if end_of_body < 0:
                    return
                self._got = rest[end_of_body + 5 :]
            else:
                _, _, length = head.partition(b"content-length:")
                size = int(length.split(b"\r\n")[0] or 0)
                if len(rest) < size:
                    return
                self._got = rest[size:]
            body, kind = (_PAGE, b"text/plain") if head.startswith(b"get") else (_ANSWER, b"application/json")
            lines = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n" % (kind, len(body))
            self._transport.write(lines + body)


async def _serve(port: int, count: int) -> None:
    loop = asyncio.get_running_loop()
    for number in range(count):
        await loop.create_server(_Server, address(number), port, backlog=16)
    print("listening", flush=True)
    await asyncio.Event().wait()


async def _no_scraping(_: ScrapingTask) -> None:
    await asyncio.Event().wait()


def main() -> int:
    what, *arguments = sys.argv[1:]
    if what == "servers":
        uvloop.run(_serve(*map(int, arguments)))
        return 0
    ScrapingTask.run = _no_scraping  # type: ignore[method-assign]
    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
