"""A model server that means harm: `python -m bench.hostile.server big|slow`.

`big` has a metrics page without end, `slow` one that comes a byte at a time, and both answer requests so that
they are whole and useless.
"""

import asyncio
import contextlib
import sys

_ANSWER = b'{"id":"x","choices":[],"usage":{"prompt_tokens":-1,"completion_tokens":1e99}}'
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
_LINE = b'vllm:num_requests_waiting{model_name="%06d"} 1e400\n'
_PAGE_LINES = 80_000  # 4 MiB
_PAUSE_S = 0.05


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, slow: bool) -> None:
    with contextlib.suppress(OSError, EOFError, asyncio.IncompleteReadError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            if b"/metrics" not in head.split(b"\r\n", 1)[0]:
                await _answer(reader, writer, head)
            elif slow:
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
                for _ in range(1_000_000):
                    writer.write(b"#")
                    await writer.drain()
                    await asyncio.sleep(_PAUSE_S)
            else:
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
                for number in range(_PAGE_LINES):
                    writer.write(_LINE % number)
                    await writer.drain()
                break
    writer.close()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    left = int(lengths[0].split(b":")[1]) if lengths else 0
    while left > 0:
        part = await reader.read(min(left, 65536))
        if not part:
            raise EOFError
        left -= len(part)
    writer.write(_HEAD % len(_ANSWER))
    writer.write(_ANSWER)
    await writer.drain()


async def _main(slow: bool) -> None:
    server = await asyncio.start_server(lambda *ends: _serve(*ends, slow), "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    print(f"listening on http://{host}:{port}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main(sys.argv[1] == "slow"))
