"""Counts the objects inside each Python process that starts with this folder on PYTHONPATH (long/soak.py).

A thread answers each connection to an abstract Unix socket with the number of objects that the garbage
collector tracks, after a collection.
"""

import contextlib
import gc
import os
import socket
import threading


def _serve(listening: socket.socket) -> None:
    while True:
        connection, _ = listening.accept()
        gc.collect()
        with connection, contextlib.suppress(OSError):
            connection.sendall(b"%d" % len(gc.get_objects()))


with contextlib.suppress(OSError):
    _listening = socket.socket(socket.AF_UNIX)
    _listening.bind(f"\0picker-soak-{os.getpid()}")
    _listening.listen()
    threading.Thread(target=_serve, args=(_listening,), daemon=True).start()
