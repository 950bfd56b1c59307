"""Parsers and checks of configuration values: durations, addresses, numbers, names, tokens."""

import re
from collections import Counter
from collections.abc import Iterable
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer

from picker_fleet.domain.bands import LEAST_PRIORITY, MOST_PRIORITY, Criticality

T = TypeVar("T")
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)?")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_ZONE = re.compile(r"[A-Za-z0-9._-]{1,16}")
_HOST = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_.-]{0,251}[a-z0-9_])?")
_TOKEN = re.compile(r"[!-~]{1,512}")
_UNIT_S = {"ms": 0.001, "s": 1.0, None: 1.0, "m": 60.0, "h": 3600.0}
_LONGEST_S = 366 * 86_400.0  # a year in seconds; longer timers overflow on some platforms
MAX_NAME_BYTES = 256  # maximum bytes of a model name, objective, fairness id or tenant's path
_MOST = 1e9  # up to this value Lua's doubles keep counts and weights exact


def duration_s(value: object) -> float:
    """The seconds that `value` gives: a number of seconds, or a string such as `500ms`, `30s`, `5m`.

    Raises:
        ValueError: the duration has another form, is negative or not finite, or is longer than a year.
    """
    seconds: float
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = value
    elif isinstance(value, str):
        match = _DURATION.fullmatch(value.strip())
        if match is None:
            raise ValueError(f"{value[:40]!r} is no duration: write 500ms, 30s, 5m or 1h")
        seconds = float(match[1]) * _UNIT_S[match[2]]
    else:
        raise ValueError("a duration such as 30s or 500ms is needed")
    if not 0 <= seconds <= _LONGEST_S:  # also rejects NaN
        raise ValueError("a duration must be finite, not negative, and at most a year")
    return float(seconds)


def split_host_port(address: str) -> tuple[str, int]:
    """Split '10.0.0.1:8000' into ('10.0.0.1', 8000), without the brackets of an IPv6 address.

    Raises:
        ValueError: the text `address` has no port, or is an IPv6 address without brackets.
    """
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    digits = port.isascii() and port.isdecimal() and len(port) <= 5
    if not colon or not digits or (not bracketed and any(mark in host for mark in ":[]")):
        raise ValueError(f"{address[:60]!r} is no host:port (IPv6 goes in brackets)")
    return host[1:-1] if bracketed else host, int(port)


def can_be_looked_up(host: str) -> bool:
    """Whether a DNS resolver accepts `host`: no part between dots is empty or longer than 63 bytes."""
    try:
        return bool(host.encode("idna"))
    except UnicodeError:
        return False


def host_port(value: object) -> str:
    """Check and return `host:port`, with IPv6 in brackets; port 0 stands for any free port.

    Raises:
        ValueError: the text `value` is no `host:port`.
    """
    host, port = split_host_port(str(value))
    if not host or host.isspace() or port > 65535 or not can_be_looked_up(host):
        raise ValueError(f"{str(value)[:60]!r} is no host:port")
    return str(value)


def host_name(value: object) -> str:
    """A host's name or address without a port, in lower case; `*.example.org` stands for all subdomains.

    Raises:
        ValueError: the host `value` is neither a name nor an address, or has a port.
    """
    text = str(value).strip().lower().removesuffix(".")
    try:
        return str(ip_address(text.removeprefix("[").removesuffix("]")))
    except ValueError:
        pass
    if not isinstance(value, str) or not _HOST.fullmatch(text) or ".." in text:
        raise ValueError(f"{str(value)[:60]!r} is no host name (without a port) or *.NAME for its subdomains")
    return text


def endpoint_address(value: object) -> str:
    """An endpoint's `ip:port` in canonical form; an IPv6 address has brackets.

    Raises:
        ValueError: the host is no IP address (Envoy accepts no names here), or the port is 0.
    """
    host, port = split_host_port(str(value))
    if not 1 <= port <= 65535:
        raise ValueError(f"{str(value)[:60]!r}: the port must be 1 to 65535")
    try:
        address = ip_address(host)
    except ValueError:
        raise ValueError(f"{str(value)[:60]!r} is no ip:port; names go in discovery.dns") from None
    if isinstance(address, IPv6Address) and not _ZONE.fullmatch(address.scope_id or "0"):
        raise ValueError(f"{str(value)[:60]!r}: its zone has other characters than letters, digits, . _ -")
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def is_loopback(host: str) -> bool:
    """Whether `host` is a loopback IP address; False for a name."""
    try:
        address = ip_address(host)
    except ValueError:
        return False
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback


def file_path(value: object) -> Path:
    """`value` as a Path. Raises ValueError if `value` is not text, is empty, or contains a NUL."""
    if isinstance(value, Path):
        return value
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError("a file's path is needed")
    return Path(value)


def repeated(values: Iterable[T]) -> list[T]:
    """The values that occur more than once, without duplicates."""
    return [value for value, count in Counter(values).items() if count > 1]


def http_url(url: str) -> str:
    """Return `url`, or raise ValueError if it has another scheme than http or https."""
    if not url.startswith(("http://", "https://")):
        raise ValueError("must begin with one of http://, https://")
    return url


def bearer_token(text: str) -> str:
    """A bearer token without surrounding white space, such as a file's last newline.

    Raises:
        ValueError: the token is empty, too long, or has a character that a header cannot carry.
    """
    token = text.strip()
    if not _TOKEN.fullmatch(token):
        raise ValueError("must be 1 to 512 visible ASCII characters, without spaces")
    return token


def without_secrets(text: str) -> str:
    """`text`, but only scheme, host, port and path of a URL, since the rest may contain a password or key. A
    text with an @ may be a URL without its scheme."""
    scheme, mark, rest = text.partition("://") if "://" in text else ("", "", text)
    place = re.split(r"[?#]", rest, maxsplit=1)[0]
    if "@" in rest and "@" not in place:  # the URL's password contains a question mark or hash
        return f"{scheme}{mark}…"
    return f"{scheme}{mark}{place.rpartition('@')[2]}" if mark or "@" in text else text


def has_control(text: str) -> bool:
    """Whether `text` contains a control character. Names in the shared state have no control characters: keys
    join names by byte 0x1F, and records end names by byte 0."""
    return _CONTROL.search(text) is not None


def _name(text: str) -> str:
    if has_control(text):
        raise ValueError("contains a control character")
    return text


AUTO = "auto"


def _countable(value: float) -> float:
    if abs(value) > _MOST:
        raise ValueError(f"must be at most {_MOST:g}")
    return value


def _auto_or_count(value: object) -> object:
    if isinstance(value, str) and value != AUTO:
        raise ValueError(f"must be {AUTO} or a whole number")
    return None if value == AUTO else value


Duration = Annotated[float, BeforeValidator(duration_s)]
# None stands for `auto`, the spelling in the configuration and in its JSON.
_from_auto = BeforeValidator(lambda value: None if value == AUTO else value)
_to_auto = PlainSerializer(lambda value: AUTO if value is None else value, when_used="json")
AutoDuration = Annotated[Duration | None, _from_auto, _to_auto]
HostPort = Annotated[str, BeforeValidator(host_port)]
HostName = Annotated[str, BeforeValidator(host_name)]
EndpointAddress = Annotated[str, BeforeValidator(endpoint_address)]
FilePath = Annotated[Path, BeforeValidator(file_path)]
CriticalityName = Annotated[Criticality, BeforeValidator(Criticality.parse)]
Priority = Annotated[int, Field(strict=True, ge=LEAST_PRIORITY, le=MOST_PRIORITY)]
# With these limits the queue's sums stay exact for years (docs/fairness.md); also in Lua (state/schema.py).
LEAST_WEIGHT, MOST_WEIGHT = 1e-3, 1e6  # smallest and largest weight of a flow or a band
MOST_COST = 1e9  # largest cost of a request, and largest bound of the stock per endpoint
LEAST_COST = 1e-3  # smallest cost that an estimator may give: scripts round a stock below 1e-6 to 0
# Strict types: `true` or "1" is refused where the number 1 is meant. A YAML value of the wrong type is
# probably the user's mistake.
Count = Annotated[int, Field(strict=True), AfterValidator(_countable)]
AutoCount = Annotated[Count | None, BeforeValidator(_auto_or_count), _to_auto]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False), AfterValidator(_countable)]
Flag = Annotated[bool, Field(strict=True)]
Name = Annotated[str, Field(min_length=1, max_length=512), AfterValidator(_name)]
Token = Annotated[str, AfterValidator(bearer_token)]
