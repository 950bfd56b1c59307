"""The command `picker envoy-config`: prints the bootstrap configuration for an Envoy that the user runs."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path

from picker_fleet.domain import config
from picker_fleet.domain.allowlist import is_custom, trusted, trusted_name
from picker_fleet.domain.errors import ConfigError
from picker_fleet.domain.units import split_host_port
from picker_tools.arguments import whole_number
from picker_tools.local_fleet.bootstrap import PickerTls, build_bootstrap, to_yaml
from picker_tools.local_fleet.parts import MODES

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([A-Za-z0-9.-]+|\[[0-9a-f:]+\])(:[0-9]+)?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    about = "how Envoy calls the pickers (default: %(default)s)"
    add("--mode", choices=MODES, default="lean", help=about)
    add("--config", type=Path, metavar="FILE", help="the replicas' configuration")
    add("--listen", type=_host_port, default=("0.0.0.0", 8080), metavar="HOST:PORT", help="for clients")
    about = "address for clients of one pool; at --listen, a request's host names its pool"
    add("--pool-listen", type=_pool_listen, action="append", default=[], metavar="NAME=HOST:PORT", help=about)
    add("--envoy-admin", type=_host_port, default=("127.0.0.1", 9901), metavar="HOST:PORT")
    replicas = {
        "--picker": "a replica's gRPC address, or a name that resolves to all replicas; repeatable",
        "--picker-http": "a replica's address for mode http (default: http.listen of the configuration)",
        "--picker-admin": "a replica's admin API (default: admin.listen of the configuration)",
    }
    for flag, what in replicas.items():
        add(flag, type=_host_port, action="append", metavar="HOST:PORT", help=what)
    about = "address for operators: admin API and dashboard of any ready replica (default: no listener)"
    add("--admin-listen", type=_host_port, metavar="HOST:PORT", help=about)
    whose = {"ca": "authority of the replicas' certificates", "cert": "Envoy's certificate", "key": "its key"}
    for name, what in whose.items():
        about = f"if replicas speak TLS: {what}, as a path that Envoy reads"
        add(f"--picker-{name}", metavar="FILE", help=about)
    about = "steering headers that clients may set (default: none; Envoy removes them)"
    add("--trust-headers", type=_headers, action="extend", default=[], metavar="NAME,…", help=about)
    limits = {
        "--max-connections": (10_000, "maximum connections of all clients"),
        "--max-heap-mib": (1024, "Envoy refuses requests above this memory; less than its container has"),
    }
    for flag, (default, what) in limits.items():
        about = f"{what} (default: %(default)s)"
        add(flag, type=whole_number(1, 10_000_000), default=default, metavar="N", help=about)
    about = "requests a second that one client address may begin (default: any number)"
    add("--client-rate", type=whole_number(1, 1_000_000), metavar="N", help=about)
    about = "origin of web pages that may use this listener, `*` for any (default: none)"
    add("--cors", type=_origin, action="append", default=[], metavar="ORIGIN", help=about)
    add("--debug-headers", action="store_true", help="name the picked and the serving endpoint in answers")


def run(args: argparse.Namespace) -> int:
    """Print Envoy's bootstrap as YAML.

    Raises:
        ConfigError: the configuration cannot be used.
    """
    settings = config.load(args.config, os.environ)
    names = sorted(trusted(args.trust_headers) | set(filter(is_custom, args.trust_headers)))
    tls = PickerTls(args.picker_ca, args.picker_cert, args.picker_key)
    if (tls.cert is None) != (tls.key is None):
        raise ConfigError("--picker-cert and --picker-key belong together")
    used = [settings.extproc.tls]
    used += [settings.http.tls] if args.mode == "http" else []
    used += [settings.admin.tls] if args.admin_listen is not None else []
    speaks_tls = any(each is not None for each in used)
    if tls != PickerTls() and not speaks_tls:
        raise ConfigError("--picker-ca, --picker-cert: the replicas do not speak TLS; set extproc.tls")
    bootstrap = build_bootstrap(
        settings,
        mode=args.mode,
        listen=args.listen,
        pool_listens=_pool_listens(args, settings),
        admin=args.envoy_admin,
        pickers=args.picker or [_here(settings.extproc.listen)],
        http_pickers=_http_pickers(args, settings) if args.mode == "http" else (),
        admin_listen=args.admin_listen,
        admin_pickers=args.picker_admin or [_here(settings.admin.listen)],
        tls=tls,
        trusted=names,
        max_connections=args.max_connections,
        max_heap_bytes=args.max_heap_mib * 1024 * 1024,
        client_rate=args.client_rate,
        debug_headers=args.debug_headers,
        origins=args.cors,
    )
    unproven = _UNPROVEN if speaks_tls and tls.ca is None else ""
    sys.stdout.write(_warning(names) + unproven + to_yaml(bootstrap))
    return 0


_UNPROVEN = (
    "# WARNING: this Envoy accepts any certificate of the replicas; --picker-ca names the authority.\n"
)


def _warning(names: Sequence[str]) -> str:
    if not names:
        return ""
    return (
        "# WARNING: any client of this listener may set the headers below, and so choose its own share\n"
        "# and rank. Trust them only if all clients are trusted, or a gateway in front sets them.\n"
        f"# Trusted: {', '.join(names)}\n"
        "# The replicas use these headers only if extproc.trusted_headers names them too.\n"
    )


def _pool_listens(args: argparse.Namespace, settings: config.Settings) -> dict[str, tuple[str, int]]:
    listens = dict(args.pool_listen)
    unknown = sorted(listens.keys() - settings.pools.keys())
    if unknown:
        served = ", ".join(settings.pools) or "none"
        raise ConfigError(f"--pool-listen {unknown[0]}: the configuration has no such pool, only {served}")
    return listens


def _http_pickers(args: argparse.Namespace, settings: config.Settings) -> Sequence[tuple[str, int]]:
    if args.picker_http:
        found: list[tuple[str, int]] = args.picker_http
        return found
    if settings.http.listen is None:
        raise ConfigError("http.listen: mode http needs it, or --picker-http")
    return [_here(settings.http.listen)]


def _here(listen: str) -> tuple[str, int]:
    """The host and port by which this machine reaches a replica that listens at `listen`."""
    host, port = split_host_port(listen)
    try:
        everywhere = ip_address(host).is_unspecified
    except ValueError:
        everywhere = False
    return ("127.0.0.1" if everywhere else host), port


def _headers(text: str) -> list[str]:
    try:
        return [trusted_name(name) for name in text.split(",")]
    except ValueError as fault:
        raise argparse.ArgumentTypeError(str(fault)) from None


def _origin(text: str) -> str:
    if text == "*" or _ORIGIN.fullmatch(text):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is no origin; write https://app.example.org")


def _pool_listen(text: str) -> tuple[str, tuple[str, int]]:
    name, _, listen = text.partition("=")
    return name, _host_port(listen)


def _host_port(text: str) -> tuple[str, int]:
    try:
        host, port = split_host_port(text)
    except ValueError as fault:
        raise argparse.ArgumentTypeError(str(fault)) from None
    if not host or port > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no host:port")
    return host, port
