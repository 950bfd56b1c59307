"""Classifies error replies of Redis (docs/errors.md shows the same table), and logs them.

state/batching.py and state/subscriptions.py call this module; telemetry/metrics.py counts errors by meaning.
"""

import enum
import logging
import re
from collections.abc import Iterable, Sequence

from picker_fleet.state.schema import FORMAT

_MAX_LOGGED_CHARS = 200  # maximum characters of a name or an error reply

_log = logging.getLogger(__name__)


class Meaning(enum.Enum):
    """The meaning of an error reply.

    ELSEWHERE: this server is not the primary, or not ready; the call is retried on a new connection.
    DENIED: the call is retried a moment later. If a retry is answered ELSEWHERE or DENIED, items that are not
    durable get StateUnavailable.
    FULL: for now, Redis refuses writes.
    FORMAT: the pool has another format, or none (lua/lib/pool.lua).
    ITEM: a script failed on one item, for example on a malformed record.
    """

    ELSEWHERE = "elsewhere"
    DENIED = "denied"
    FULL = "full"
    FORMAT = "format"
    ITEM = "item"


OTHER_FORMAT = "FORMAT "  # the reply continues with the pool's format, or `none`
ERROR_REPLIES = (
    # This server is not the primary, or serves no client now.
    ("MOVED ", "elsewhere"),
    ("ASK ", "elsewhere"),
    ("TRYAGAIN ", "elsewhere"),
    ("READONLY ", "elsewhere"),
    ("ERR Can not run script with write flag on readonly replica", "elsewhere"),
    ("MASTERDOWN ", "elsewhere"),
    ("UNBLOCKED ", "elsewhere"),
    ("NOREPLICAS ", "elsewhere"),  # too few replicas (`min-replicas-to-write`): another primary may exist
    ("CLUSTERDOWN ", "elsewhere"),
    ("LOADING ", "elsewhere"),
    ("NOAUTH ", "elsewhere"),
    ("WRONGPASS ", "elsewhere"),
    ("DENIED ", "elsewhere"),
    ("ERR max number of clients", "elsewhere"),
    # This server is the primary, but does not run this call at all, or does not run it for this user.
    ("BUSY ", "denied"),
    ("NOPERM ", "denied"),
    ("ERR ACL failure in script", "denied"),
    ("ERR The user executing the script ", "denied"),  # an ACL failure, before Redis 7.2
    ("ERR unknown command", "denied"),
    ("ERR unknown subcommand", "denied"),
    ("ERR Unknown Redis command called from script", "denied"),
    ("ERR This Redis command is not allowed from script", "denied"),
    ("ERR Function not found", "denied"),  # the library is missing and cannot be loaded
    # This server is the primary, but accepts no writes that need memory, or no writes at all.
    ("OOM ", "full"),
    ("MISCONF ", "full"),
    # The reply of this project's scripts to any call on a pool of another format.
    (OTHER_FORMAT, "format"),
)
NO_ANSWER = "no-answer"  # the metrics' label for a call without a reply


# The prefixes that servers and proxies put before the cause, such as
# `ERR Error running script (call to f_1a2b): @user_script:7: @user_script: 7: -READONLY You can't write …`.
# Skip only known prefixes: the text after them may come from a client.
_WRAPPERS = re.compile(
    r"(?:-|ERR(?:: ?| )|error (?:running|calling|executing) (?:script|function)(?: ?\([^)]{0,120}\))?: ?"
    r"|@?user_\w+ ?: ?\d+: ?)+",
    re.IGNORECASE,
)
_ADVICE = (  # error's prefix -> remedy, for causes that an operator must remove
    ("ERR unknown", "the server has no Redis Functions: Valkey 8 or later and Redis 7.0 or later have them"),
    ("ERR Unknown Redis command", "a proxy or another server lacks commands that docs/redis.md lists"),
    ("ERR Function not found", "the library is missing: run `picker functions load`"),
    ("NOPERM ", "the user lacks a right that docs/redis.md lists"),
    ("ERR ACL failure in script", "the user lacks a right that docs/redis.md lists"),
    ("ERR The user executing the script ", "the user lacks a right that docs/redis.md lists"),
    ("READONLY ", "redis.url leads to a replica of Redis"),
    ("OOM ", "the server's maxmemory is reached"),
)


def meaning_of(error: str) -> Meaning:
    """The meaning of the error reply `error`, found by its cause after any wrapping prefixes; ITEM for an
    unlisted cause."""
    found = _first(error, ERROR_REPLIES)
    return Meaning(found) if found else Meaning.ITEM


def explained(error: str) -> str:
    """The text `error`, shortened, with a remedy if _ADVICE has one."""
    advice = _first(error, _ADVICE)
    shown = error[:_MAX_LOGGED_CHARS]
    return f"{shown} ({advice})" if advice else shown


def _first(error: str, table: Iterable[tuple[str, str]]) -> str:
    wrapped = _WRAPPERS.match(error)
    cause = error[wrapped.end() :] if wrapped else error
    forms = (error, cause, f"ERR {cause}")
    return next((found for prefix, found in table if any(form.startswith(prefix) for form in forms)), "")


def other_format(error: str) -> str:
    """Describe an error reply that begins with OTHER_FORMAT."""
    found = error.removeprefix(OTHER_FORMAT).split(" ")[0][:_MAX_LOGGED_CHARS]
    state = "no format number" if found == "none" else f"format {found}"
    return f"the pool in Redis has {state}, and this version reads and writes format {FORMAT}"


def log_error(script: str, items: Iterable[Sequence[object]], error: str) -> None:
    """Log a call that Redis answered with an error; `items` has the arguments of each item of the call."""
    _log.error(
        "Redis answered script %s of request %s with an error: %s",
        script,
        ", ".join(map(_named, items)),
        _shown(error),
    )


def _named(args: Sequence[object]) -> str:
    """The request id in the arguments of an item; for an arrival (pack_arrival) also flow and workload."""
    first = args[0] if args else ""
    if not isinstance(first, bytes):
        return _shown(str(first))
    request_id, _, flow, workload, *_ = [*first.decode(errors="replace").split("\0", 4), "", "", "", ""]
    return f"{_shown(request_id)} (flow {_shown(flow)}, workload {_shown(workload)})"


def _shown(text: str) -> str:
    shown = ascii(text[:_MAX_LOGGED_CHARS])
    return shown if len(shown) <= _MAX_LOGGED_CHARS else shown[: _MAX_LOGGED_CHARS - 1] + "…"
