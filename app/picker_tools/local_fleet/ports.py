"""TCP ports of this machine's loopback."""

import errno
import socket
from collections.abc import Mapping

from picker_fleet.errors import StartupError

LOOPBACK = "127.0.0.1"


def free_port() -> int:
    """A port nobody listens on now. Another process may take it before it is used: be ready to retry."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def ensure_free(wanted: Mapping[int, str]) -> None:
    """Check that each port of `wanted` can be listened on; its value says for what, and by which option.

    Asked here and not left to the parts: Envoy shares its port with any other Envoy that is there.

    Raises:
        StartupError: one is in use, or not allowed; one line a port.
    """
    faults = []
    for port, purpose in wanted.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOOPBACK, port))
            except OSError as fault:
                in_use = fault.errno == errno.EADDRINUSE
                why = "is in use" if in_use else f"cannot be used: {fault.strerror}"
                faults.append(f"port {port} {why}; it is wanted for {purpose}")
    if faults:
        raise StartupError("\n".join(faults))
