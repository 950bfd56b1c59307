"""`hostile_servers.py big|slow ADDRESS` is a model server whose metrics page is oversized (`big`) or arrives
one byte at a time (`slow`). The server answers requests with valid JSON that has no completion.
"""

import asyncio
import contextlib
import itertools
import sys

from model_servers import http_answer, read_request

from picker_fleet.domain.units import split_host_port

_ANSWERS = itertools.cycle(
    [
        http_answer(b'{"id":"x","choices":[],"usage":{"prompt_tokens":-1,"completion_tokens":1e99}}'),
        http_answer(b'{"usage":' * 1800 + b"1" + b"}" * 1800),
        http_answer(b"data: 1\n\n", kind="text/event-stream"),
        http_answer(b"[" + b"{}," * 21_000 + b"{}]"),
        http_answer(b"\n" * 1_000_000, kind="text/" + "x" * 20_000),
    ]
)
_LINE = b'vllm:num_requests_waiting{model_name="%06d"} 1e400\n'
_LONG_LINE = b'vllm:num_requests_running{model_name="%s"} 1\n' % ("\N{GRINNING FACE}" * 60_000).encode()
_PAGE_LINES, _LONG_LINES = 80_000, 20  # a page of 9 MB
_PAUSE_S = 0.05


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, slow: bool) -> None:
    with contextlib.suppress(OSError, EOFError, asyncio.IncompleteReadError):
        while True:
            request = await read_request(reader)
            if "/metrics" not in request.path:
                writer.write(next(_ANSWERS))
                await writer.drain()
            elif slow:
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
                for _ in range(1_000_000):
                    writer.write(b"#")
                    await writer.drain()
                    await asyncio.sleep(_PAUSE_S)
            else:
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + _LONG_LINE * _LONG_LINES)
                for number in range(_PAGE_LINES):
                    writer.write(_LINE % number)
                    await writer.drain()
                break
    writer.close()


async def _serve_until_killed(slow: bool, address: str) -> None:
    server = await asyncio.start_server(lambda *ends: _serve(*ends, slow), *split_host_port(address))
    await server.serve_forever()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve_until_killed(sys.argv[1] == "slow", sys.argv[2]))
