"""Servers that run the scripts: a real Valkey, and fakeredis."""

import contextlib
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import redis
from fake_struct import with_struct
from fakeredis import TcpFakeServer
from redis_servers import Server, redis_server

from picker_fleet.state.scripts import load_library
from picker_tools.local_fleet.network import LOOPBACK

REAL_SERVER = "PICKER_TEST_SERVER"  # names a server binary other than Valkey's, such as redis-server


def real_server(folder: Path) -> AbstractContextManager[Server]:
    """A Valkey server, or the server whose binary REAL_SERVER names."""
    return redis_server(folder, binary=os.environ.get(REAL_SERVER, ""))


@contextlib.contextmanager
def fakeredis() -> Iterator[str]:
    """Run a fakeredis server on TCP; yield its URL.

    The Lua library is loaded first, because fakeredis closes a connection after any error reply.
    """
    with TcpFakeServer((LOOPBACK, 0), server_type="valkey") as server:
        # fakeredis writes a reply in small pieces: Nagle's algorithm would delay every second piece by 40 ms.
        prompt = {"disable_nagle_algorithm": True}
        server.RequestHandlerClass = type("Prompt", (server.RequestHandlerClass,), prompt)
        thread = threading.Thread(target=server.serve_forever, name="fakeredis")
        thread.start()
        try:
            port: int = server.server_address[1]
            with redis.Redis(LOOPBACK, port) as client:
                client.function_load(with_struct(load_library()).source)
            yield f"redis://{LOOPBACK}:{port}/0"
        finally:
            server.shutdown()
            thread.join()
