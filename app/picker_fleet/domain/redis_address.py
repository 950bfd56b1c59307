"""The URL of a Redis: one server, a Unix socket, Sentinels, or a Cluster (docs/redis.md)."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from picker_fleet.domain.units import can_be_looked_up

Kind = Literal["server", "socket", "sentinel", "cluster"]

_KINDS: Mapping[str, Kind] = {
    "redis": "server", "rediss": "server", "unix": "socket",
    "redis+sentinel": "sentinel", "redis+cluster": "cluster",
}  # fmt: skip
_PORTS: Mapping[Kind, int] = {"server": 6379, "sentinel": 26379, "cluster": 6379}
_TLS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname", "ssl_cert_reqs")
_ANY = ("username", "password", "db")
_OWN: Mapping[Kind, tuple[str, ...]] = {
    "server": _ANY,
    "socket": _ANY,
    "sentinel": (*_ANY, "ssl", "sentinel_username", "sentinel_password", "sentinel_ssl"),
    "cluster": (*_ANY, "ssl"),
}
_OPTION_NAME = re.compile(r"[a-z_]{1,40}")
_FLAGS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_DEMANDS = ("none", "optional", "required")


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed URL. `nodes` has the address of the server, of the Sentinels, or of nodes of the Cluster.
    `tls`: redis-py's options for checking certificates; None without TLS."""

    kind: Kind
    nodes: tuple[tuple[str, int], ...] = ()
    path: str = ""
    service: str = ""
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: Mapping[str, str | bool] | None = None
    sentinel_username: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)
    sentinel_tls: bool = False

    @classmethod
    def parse(cls, url: str) -> "Address":
        """Parse `url`. Raises ValueError, whose message contains neither the user nor the password."""
        scheme, separator, _ = url.partition("://")
        kind = _KINDS.get(scheme)
        if kind is None or not separator:
            raise ValueError(f"must begin with one of {', '.join(f'{each}://' for each in _KINDS)}")
        try:
            parts = urlsplit(url)
        except ValueError:  # the message of urlsplit's error may contain the password
            raise ValueError("is not a URL: its host has characters that it may not have") from None
        if parts.fragment:
            raise ValueError("a # must be written %23")
        if kind != "socket" and "@" in parts.path:
            raise ValueError("a / in user or password must be written %2F")
        options = _options(parts.query, kind, encrypted=scheme == "rediss")
        credentials, _, hosts = parts.netloc.rpartition("@")
        username, _, password = (unquote(part) for part in credentials.partition(":"))
        path, service, db = _path(parts, kind, options)
        encrypted = scheme == "rediss" or _flag(options, "ssl", False)
        return cls(
            kind,
            nodes=() if kind == "socket" else _nodes(hosts, kind),
            path=path,
            service=service,
            db=db,
            username=username or options.get("username") or None,
            password=password or options.get("password") or None,
            tls=_tls_options(options) if encrypted else None,
            sentinel_username=options.get("sentinel_username"),
            sentinel_password=options.get("sentinel_password"),
            sentinel_tls=_flag(options, "sentinel_ssl", encrypted),
        )


def redis_url(url: str) -> str:
    """Return `url` if it is valid. Raises ValueError as `Address.parse` does."""
    Address.parse(url)
    return url


def _options(query: str, kind: Kind, *, encrypted: bool) -> dict[str, str]:
    """Parse a URL's options, after the `?`. ValueError: an option is unknown, repeated or inapplicable."""
    pairs = parse_qsl(query, keep_blank_values=True)
    options = dict(pairs)
    can_encrypt = encrypted or "ssl" in _OWN[kind]
    valid = (*_OWN[kind], *(_TLS if can_encrypt else ()))
    for name in options:
        if name in _TLS and not can_encrypt:
            raise ValueError(f"option {name} needs TLS: rediss://")
        if name not in valid:
            # The rest of a password after an unescaped `?` looks like an option: do not show that rest.
            shown = f" {name[:40]!r}" if _OPTION_NAME.fullmatch(name) else ""
            raise ValueError(f"unknown option{shown}; valid here: {', '.join(valid) or 'none'}")
    if len(pairs) > len(options):
        raise ValueError("an option is given twice")
    if any(name in _TLS for name in options) and not (
        encrypted or _flag(options, "ssl", False) or _flag(options, "sentinel_ssl", False)
    ):
        raise ValueError("options ssl_… need ssl=true")
    return options


def _flag(options: Mapping[str, str], name: str, default: bool) -> bool:
    text = options.get(name)
    if text is None:
        return default
    if text.lower() not in _FLAGS:
        raise ValueError(f"option {name} must be true or false")
    return _FLAGS[text.lower()]


def _tls_options(options: Mapping[str, str]) -> dict[str, str | bool]:
    found: dict[str, str | bool] = {name: options[name] for name in _TLS if name in options}
    demand = options.get("ssl_cert_reqs", "required")
    if demand not in _DEMANDS:
        raise ValueError(f"option ssl_cert_reqs must be one of {', '.join(_DEMANDS)}")
    if ("ssl_certfile" in found) < ("ssl_keyfile" in found):
        raise ValueError("option ssl_keyfile needs ssl_certfile")
    # Host names can be checked only if certificates are checked.
    found["ssl_check_hostname"] = _flag(options, "ssl_check_hostname", demand != "none")
    if demand == "none" and found["ssl_check_hostname"]:
        raise ValueError("ssl_check_hostname cannot be true where ssl_cert_reqs is none")
    return found


def _nodes(hosts: str, kind: Kind) -> tuple[tuple[str, int], ...]:
    texts = hosts.split(",")
    if kind == "server" and len(texts) > 1:
        raise ValueError("several hosts need redis+sentinel:// or redis+cluster://")
    if kind == "server" and not hosts:
        return (("localhost", _PORTS[kind]),)
    return tuple(_node(text, _PORTS[kind]) for text in texts)


def _node(text: str, default_port: int) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or port == 0 or text.endswith(":") or not can_be_looked_up(unquote(host)):
        raise ValueError("a host must be written HOST, HOST:PORT or [IPV6]:PORT, several with commas between")
    return unquote(host), port or default_port


def _path(parts: SplitResult, kind: Kind, options: Mapping[str, str]) -> tuple[str, str, int]:
    """The path of the Unix socket, the name of the Sentinels' service, and the number of the database."""
    if kind == "socket":
        if parts.netloc.rpartition("@")[2] or len(parts.path) < 2:
            raise ValueError("a socket is written unix:///path/to/it")
        return unquote(parts.path), "", _db("", options)
    steps = parts.path.strip("/").split("/")
    service = unquote(steps.pop(0)) if kind == "sentinel" else ""
    if kind == "sentinel" and not service:
        raise ValueError("the path must name the service that the Sentinels watch: …/SERVICE/DB")
    if len(steps) > 1:
        raise ValueError("the path has too many parts")
    db = _db(steps[0] if steps else "", options)
    if kind == "cluster" and db:
        raise ValueError("a Cluster has database 0 only")
    return "", service, db


def _db(text: str, options: Mapping[str, str]) -> int:
    if text and "db" in options:
        raise ValueError("the database is given twice")
    text = text or options.get("db", "")
    if text and not (text.isascii() and text.isdigit() and len(text) < 6):
        raise ValueError("the database must be a number")
    return int(text or 0)
