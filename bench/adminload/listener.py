"""Clients of the event stream, a process: `python -m bench.adminload.listener HOST PORT COUNT`.

Says `heard` once each has had an event, and reads on until it is ended.
"""

import asyncio
import sys

_ASK = b"GET /api/v1/events HTTP/1.1\r\nhost: bench\r\n\r\n"
_READ_BYTES = 65536
_HEARD_S = 30.0


async def _listen(host: str, port: int, heard: asyncio.Event) -> None:
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(_ASK)
    async with asyncio.timeout(_HEARD_S):
        await reader.readuntil(b"event: snapshot")
    heard.set()
    while await reader.read(_READ_BYTES):
        pass
    writer.close()


async def _main(host: str, port: int, count: int) -> None:
    heard = [asyncio.Event() for _ in range(count)]
    async with asyncio.TaskGroup() as tasks:
        for each in heard:
            tasks.create_task(_listen(host, port, each))
        for each in heard:
            await each.wait()
        print("heard", flush=True)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
