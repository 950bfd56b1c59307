"""The floor of the calls: a server that has its answer ready. Prints its address, and ends with its stdin."""

import asyncio
import sys

from picker_tools.local_fleet.network import LOOPBACK

_BODY = b'{"requests": "' + b"x" * 65_000 + b'"}'  # as long as a page of 200 requests
_ANSWER = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(_BODY) + _BODY
)


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(_ANSWER)
            await writer.drain()
    except (OSError, asyncio.IncompleteReadError):
        writer.close()


async def _main() -> None:
    listener = await asyncio.start_server(_serve, LOOPBACK, 0)
    print(f"http://{LOOPBACK}:{listener.sockets[0].getsockname()[1]}", flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_main())
