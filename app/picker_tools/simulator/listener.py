"""Serving on one socket until SIGTERM or SIGINT; what is in flight then is cut after `DRAIN_S`."""

import asyncio
import contextlib
import resource
import signal
import socket
from collections.abc import Generator

import uvicorn

from picker_fleet.errors import StartupError
from picker_tools.simulator.profile import Profile
from picker_tools.simulator.server import ModelServer

DRAIN_S = 2
# Longer than Envoy keeps an idle upstream connection (1 h), so that it never reuses one being closed.
KEEP_ALIVE_S = 2 * 3600
_BACKLOG = 4096


class _Server(uvicorn.Server):
    """Uvicorn, ended by `stop` and not by handlers of its own, which raise the signal again at the end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    def stop(self) -> None:
        self.force_exit = self.should_exit  # the second signal does not wait
        self.should_exit = True


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 is any free one.

    Raises:
        StartupError: the address can't be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as fault:
        raise StartupError(f"cannot listen on {host}:{port}: {fault}") from fault


async def serve(listener: socket.socket, profile: Profile) -> None:
    """Serve `profile` until a signal; prints `listening on URL` once requests are taken."""
    _allow_many_files()
    config = uvicorn.Config(
        ModelServer(profile),
        http="httptools",
        ws="none",
        lifespan="off",
        backlog=_BACKLOG,
        log_config=None,
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=DRAIN_S,
    )
    server = _Server(config)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    # The socket listens already: whoever reads the line and connects is taken by the loop's first turn.
    host, port = listener.getsockname()[:2]
    print(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
    await server.serve(sockets=[listener])


def _allow_many_files() -> None:
    """Thousands of connections need as many descriptors as the system grants."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
