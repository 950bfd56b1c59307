"""What the error replies of Redis mean (docs/errors.md shows the same table), and their log lines.

state/batching.py and state/subscriptions.py ask, telemetry/metrics.py counts by meaning.
"""

import enum
import logging
import re
from collections.abc import Iterable, Sequence

from picker_fleet.state.schema import FORMAT

_MAX_LOGGED_CHARS = 200  # of a name, or of an error

_log = logging.getLogger(__name__)


class Meaning(enum.Enum):
    """What an error reply means.

    ELSEWHERE: retried on a new connection, which leads to the primary by then.
    DENIED: retried a moment later. If either lasts, Redis counts as unavailable for the call.
    FULL: Redis takes no writes for now.
    FORMAT: the pool has another format, or none (lua/lib/pool.lua).
    ITEM: a script failed, on a damaged record for example.
    """

    ELSEWHERE = "elsewhere"
    DENIED = "denied"
    FULL = "full"
    FORMAT = "format"
    ITEM = "item"


OTHER_FORMAT = "FORMAT "  # and the pool's format, or `none`
ERROR_REPLIES = (
    # This server is not the primary, or serves nobody now.
    ("MOVED ", "elsewhere"),
    ("ASK ", "elsewhere"),
    ("TRYAGAIN ", "elsewhere"),
    ("READONLY ", "elsewhere"),
    ("ERR Can not run script with write flag on readonly replica", "elsewhere"),
    ("MASTERDOWN ", "elsewhere"),
    ("UNBLOCKED ", "elsewhere"),
    ("NOREPLICAS ", "elsewhere"),  # `min-replicas-to-write`: another primary may have been chosen
    ("CLUSTERDOWN ", "elsewhere"),
    ("LOADING ", "elsewhere"),
    ("NOAUTH ", "elsewhere"),
    ("WRONGPASS ", "elsewhere"),
    ("DENIED ", "elsewhere"),
    ("ERR max number of clients", "elsewhere"),
    # The primary, but it runs this for nobody.
    ("BUSY ", "denied"),
    ("NOPERM ", "denied"),
    ("ERR ACL failure in script", "denied"),
    ("ERR The user executing the script ", "denied"),  # the same, before Redis 7.2
    ("ERR unknown command", "denied"),
    ("ERR unknown subcommand", "denied"),
    ("ERR Unknown Redis command called from script", "denied"),
    ("ERR This Redis command is not allowed from script", "denied"),
    ("ERR Function not found", "denied"),  # and it cannot be given the library
    # The primary, but it takes no writes that need memory, or none at all.
    ("OOM ", "full"),
    ("MISCONF ", "full"),
    # The scripts' own, about every call.
    (OTHER_FORMAT, "format"),
)
NO_ANSWER = "no-answer"  # a kind of error in the metrics, beside the meanings of error replies


# What servers and proxies write before the cause, such as
# `ERR Error running script (call to f_1a2b): @user_script:7: @user_script: 7: -READONLY You can't write …`.
# Only this is passed over: behind it may be text of a client.
_WRAPPERS = re.compile(
    r"(?:-|ERR(?:: ?| )|error (?:running|calling|executing) (?:script|function)(?: ?\([^)]{0,120}\))?: ?"
    r"|@?user_\w+ ?: ?\d+: ?)+",
    re.IGNORECASE,
)
_ADVICE = (  # what an operator can do about causes that do not pass by themselves
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
    """The meaning of the error reply `error` by its cause, whatever wraps it; ITEM unless ERROR_REPLIES has
    it."""
    found = _first(error, ERROR_REPLIES)
    return Meaning(found) if found else Meaning.ITEM


def explained(error: str) -> str:
    """`error`, shortened, with what to do about it where that is known."""
    advice = _first(error, _ADVICE)
    shown = error[:_MAX_LOGGED_CHARS]
    return f"{shown} ({advice})" if advice else shown


def _first(error: str, table: Iterable[tuple[str, str]]) -> str:
    wrapped = _WRAPPERS.match(error)
    cause = error[wrapped.end() :] if wrapped else error
    forms = (error, cause, f"ERR {cause}")
    return next((found for prefix, found in table if any(form.startswith(prefix) for form in forms)), "")


def other_format(error: str) -> str:
    """What an error of OTHER_FORMAT says, in words."""
    found = error.removeprefix(OTHER_FORMAT).split(" ")[0][:_MAX_LOGGED_CHARS]
    state = "no format number" if found == "none" else f"format {found}"
    return f"the pool in Redis has {state}, and this version reads and writes format {FORMAT}"


def log_error(script: str, items: Iterable[Sequence[object]], error: str) -> None:
    """Log a call that Redis answered with an error; `items` are the arguments of each item that it had."""
    _log.error(
        "Redis answered %s of %s with an error: %s", script, ", ".join(map(_named, items)), _shown(error)
    )


def _named(args: Sequence[object]) -> str:
    """The request that an item concerns; of an arrival (pack_arrival) also what its keys are made of."""
    first = args[0] if args else ""
    if not isinstance(first, bytes):
        return _shown(str(first))
    request_id, _, flow, workload, *_ = [*first.decode(errors="replace").split("\0", 4), "", "", "", ""]
    return f"{_shown(request_id)} (flow {_shown(flow)}, workload {_shown(workload)})"


def _shown(text: str) -> str:
    shown = ascii(text[:_MAX_LOGGED_CHARS])
    return shown if len(shown) <= _MAX_LOGGED_CHARS else shown[: _MAX_LOGGED_CHARS - 1] + "…"
