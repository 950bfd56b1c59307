"""The response headers that tell a client how much of its tenants' limits remains.

OpenAI's and Anthropic's clients read these headers, which both vendors' API references define ("Rate
limits"). Of the limits on a request's tenant path, the scripts report the one with the least share remaining.
"""

import math
import re
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final

DEMOTED: Final = "x-picker-demoted"  # the request went to the lowest band, since a tenant is over its limit
_OPENAI: Final = {
    unit: tuple(f"x-ratelimit-{what}-{unit}" for what in ("limit", "remaining", "reset"))
    for unit in ("requests", "tokens")
}
_ANTHROPIC: Final = {
    unit: tuple(f"anthropic-ratelimit-{unit}-{what}" for what in ("limit", "remaining", "reset"))
    for unit in ("requests", "tokens")
}
# All headers that this module makes. With tenants, the picker removes a model server's headers of that name.
NAMES: Final = (*(name for api in (_OPENAI, _ANTHROPIC) for names in api.values() for name in names), DEMOTED)
LONGEST: Final = 32  # maximum characters of a header value; times are the longest values
_LATEST_S = 253_402_300_799  # the end of year 9999

_PART = re.compile(r"(?:^|;)(requests|tokens)=([0-9]{1,15}),([0-9]{1,15}),([0-9]{1,15})(?=;|$)")


def quota_headers(quota: str, *, is_anthropic: bool, now_s: float) -> dict[str, str]:
    """The headers for `quota`, a text such as `requests=LIMIT,REMAINING,RESET_MS;demoted=1` (state/store.py).

    `is_anthropic`: the request's path is of Anthropic's API, whose headers give the time of a limit's reset;
    OpenAI's headers give the time until the reset. `now_s` is the Unix time.
    """
    found: dict[str, str] = {}
    names = _ANTHROPIC if is_anthropic else _OPENAI
    for unit, limit, remaining, digits in _PART.findall(quota):
        of_limit, of_remaining, of_reset = names[unit]
        reset_ms = int(digits)
        found[of_limit], found[of_remaining] = limit, remaining
        found[of_reset] = _at(math.ceil(now_s + reset_ms / 1000)) if is_anthropic else _duration(reset_ms)
    if "demoted=1" in quota:
        found[DEMOTED] = "true"
    return found


def _duration(ms: int) -> str:
    """`ms` as OpenAI's API writes a duration: 12ms, 1.5s, 6m0s, 1h0m0s."""
    if ms < 1000:
        return f"{ms}ms"
    seconds = f"{ms % 60_000 / 1000:g}s"  # at most five digits, which the format `g` keeps
    if ms < 60_000:
        return seconds
    hours, minutes = divmod(ms // 60_000, 60)
    return f"{hours}h{minutes}m{seconds}" if hours else f"{minutes}m{seconds}"


@lru_cache(maxsize=1024)
def _at(time_s: int) -> str:
    """A Unix time in the format of RFC 3339."""
    return datetime.fromtimestamp(min(time_s, _LATEST_S), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
