"""The server that runs the scripts."""

import os
from contextlib import AbstractContextManager
from pathlib import Path

from redis_servers import Server, redis_server

REAL_SERVER = "PICKER_TEST_SERVER"  # names a server binary other than Valkey's, such as redis-server


def real_server(folder: Path) -> AbstractContextManager[Server]:
    """A Valkey server, or the server whose binary REAL_SERVER names."""
    return redis_server(folder, binary=os.environ.get(REAL_SERVER, ""))
