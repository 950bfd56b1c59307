"""Shows what is inside each Python process that starts with this folder on PYTHONPATH
(bench/rig/process_figures.py).

A thread answers each connection to an abstract Unix socket with a JSON object: objects that the garbage
collector tracks, blocks of Python's allocator, and bytes that the C library's has and does not use.
"""

import contextlib
import ctypes
import gc
import json
import os
import socket
import sys
import tempfile
import threading
import xml.etree.ElementTree as ElementTree


def _c_free_bytes() -> int:
    """Bytes that the C library's allocator has from the system and does not use."""
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    with tempfile.NamedTemporaryFile() as file:
        stream = ctypes.c_void_p(libc.fopen(file.name.encode(), b"w"))
        libc.malloc_info(0, stream)
        libc.fclose(stream)
        root = ElementTree.fromstring(file.read())
    sizes = {each.get("type"): int(each.get("size", 0)) for each in root.findall("total")}
    return sizes.get("fast", 0) + sizes.get("rest", 0)


def _figures() -> dict[str, int]:
    gc.collect()
    return {
        "objects": len(gc.get_objects()),
        "blocks": sys.getallocatedblocks(),
        "c_free_bytes": _c_free_bytes(),
    }


def _serve(listening: socket.socket) -> None:
    while True:
        connection, _ = listening.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(json.dumps(_figures()).encode())


def _start() -> None:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"\0bench-inside-{os.getpid()}")
    listening.listen()
    threading.Thread(target=_serve, args=(listening,), daemon=True).start()


with contextlib.suppress(OSError):
    _start()
