"""The command `picker sim`: runs one simulated model server on one port until SIGTERM or SIGINT."""

import argparse
import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Generator

import uvicorn
import uvloop

from picker_fleet.domain.budgets import allow_many_files
from picker_fleet.domain.errors import PickerError, StartupError
from picker_tools.arguments import decimal, milliseconds, port, whole_number
from picker_tools.simulator.engine import Limits
from picker_tools.simulator.server import ModelServer, Profile

DRAIN_S = 2
# Longer than Envoy keeps idle upstream connections (1 h), so that Envoy never reuses a closing connection.
KEEP_ALIVE_S = 2 * 3600
_BACKLOG = 4096
_SHARE = decimal("share", 1, zero=True)
_COUNT = whole_number(1, 1_000_000_000)


class _Server(uvicorn.Server):
    """A uvicorn server that `stop` ends. Uvicorn's own signal handlers would re-raise the signal at exit."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    def stop(self) -> None:
        self.force_exit = self.should_exit  # a second signal stops the server at once
        self.should_exit = True


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens at `host` and `port`; port 0 is any free port.

    Raises:
        StartupError: the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as fault:
        raise StartupError(f"cannot listen on {host}:{port}: {fault}") from fault


async def serve(listener: socket.socket, profile: Profile) -> None:
    """Serve as `profile` says until SIGTERM or SIGINT; print `listening on URL` once clients can connect."""
    allow_many_files()
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
    # The socket already listens, so a client may connect as soon as this line is printed.
    host, port = listener.getsockname()[:2]
    print(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
    await server.serve(sockets=[listener])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    own, limits = Profile(), Limits()
    add = parser.add_argument
    add("--port", type=port, required=True, help="0: any free port")
    add("--host", default="127.0.0.1")
    add("--model", default=own.model, metavar="NAME", help="base model (default: %(default)s)")
    add("--ttft", type=milliseconds, default=own.ttft_ms, metavar="MS", help="admission to first token")
    add("--itl", type=milliseconds, default=own.itl_ms, metavar="MS", help="token to token")
    about = "run in steps that take this many times the measured time; --ttft and --itl are then unused"
    add("--slowdown", type=decimal("number", 1000), metavar="FACTOR", help=about)
    add("--max-num-seqs", type=_COUNT, default=limits.max_num_seqs, metavar="N", help="maximum batch size")
    add("--kv-blocks", type=_COUNT, default=limits.kv_blocks, metavar="N", help="blocks of the KV cache")
    about = "speed of KV cache transfers in 10^9 bytes a second (default: %(default)s)"
    add(
        "--kv-bandwidth",
        type=decimal("number", 1e6),
        default=own.kv_bandwidth_gb_s,
        metavar="GB/S",
        help=about,
    )
    add("--loras", type=_names, default=(), metavar="A,B", help="adapters; requests name them as models")
    add("--max-loras", type=_COUNT, default=None, metavar="N", help="adapters run at once (default: all)")
    add(
        "--failure-rate",
        type=_SHARE,
        default=own.failure_rate,
        metavar="P",
        help="share of requests answered 500, 0 to 1",
    )
    add("--seed", type=int, default=own.seed, metavar="N", help="seed of words and failures")


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT and return 0; return 1 with a reason on stderr if it cannot start."""
    try:
        profile = profile_of(args)
        with bind(args.host, args.port) as listener:
            uvloop.run(serve(listener, profile))
    except PickerError as fault:
        print(f"picker sim: {fault}", file=sys.stderr)
        return 1
    return 0


def profile_of(args: argparse.Namespace) -> Profile:
    return Profile(
        model=args.model,
        loras=args.loras,
        ttft_ms=args.ttft,
        itl_ms=args.itl,
        slowdown=args.slowdown,
        limits=Limits(
            max_num_seqs=args.max_num_seqs,
            kv_blocks=args.kv_blocks,
            max_loras=args.max_loras or max(1, len(args.loras)),
        ),
        kv_bandwidth_gb_s=args.kv_bandwidth,
        failure_rate=args.failure_rate,
        seed=args.seed,
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for part in text.split(",") if (name := part.strip()))
