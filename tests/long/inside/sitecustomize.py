"""Reports the number of objects in each Python process with this folder on PYTHONPATH, for long/soak.py.

On each connection to an abstract Unix socket, a thread runs a garbage collection and sends the number of
objects that the collector tracks.
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
