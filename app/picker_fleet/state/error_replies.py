"""What the error replies of Redis mean (docs/errors.md shows the same table), and their log lines.

state/batching.py and state/subscriptions.py ask, telemetry/metrics.py counts by meaning.
"""

import asyncio
import enum
import logging
from collections.abc import Iterable, Sequence

from picker_fleet.state.schema import FORMAT

_LOG_LINES_PER_S = 10  # a client that sends a bad request may send many
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
    ("MASTERDOWN ", "elsewhere"),
    ("UNBLOCKED ", "elsewhere"),
    ("NOREPLICAS ", "elsewhere"),  # `min-replicas-to-write`: another primary may have been chosen
    ("CLUSTERDOWN ", "elsewhere"),
    ("LOADING ", "elsewhere"),
    ("NOAUTH ", "elsewhere"),
    ("DENIED ", "elsewhere"),
    ("ERR max number of clients", "elsewhere"),
    # The primary, but it runs this for nobody.
    ("BUSY ", "denied"),
    ("NOPERM ", "denied"),
    ("ERR ACL failure in script", "denied"),
    ("ERR The user executing the script ", "denied"),  # the same, before Redis 7.2
    ("ERR unknown command", "denied"),
    ("ERR Function not found", "denied"),  # and it cannot be given the library
    # The primary, but it takes no writes that need memory, or none at all.
    ("OOM ", "full"),
    ("MISCONF ", "full"),
    # The scripts' own, about every call.
    (OTHER_FORMAT, "format"),
)
NO_ANSWER = "no-answer"  # a kind of error in the metrics, beside the meanings of error replies


def meaning_of(error: str) -> Meaning:
    """The meaning of the error reply `error`; ITEM unless it is in ERROR_REPLIES."""
    return next(
        (Meaning(meaning) for prefix, meaning in ERROR_REPLIES if error.startswith(prefix)), Meaning.ITEM
    )


def other_format(error: str) -> str:
    """What an error of OTHER_FORMAT says, in words."""
    found = error.removeprefix(OTHER_FORMAT).split(" ")[0][:_MAX_LOGGED_CHARS]
    state = "no format number" if found == "none" else f"format {found}"
    return f"the pool in Redis has {state}, and this version reads and writes format {FORMAT}"


class ErrorLog:
    """Logs calls that Redis answered with an error, a bounded number a second."""

    def __init__(self) -> None:
        self._second, self._lines = 0, 0

    def write(self, script: str, items: Iterable[Sequence[object]], error: str) -> None:
        """`items`: the arguments of each item that the call had."""
        second = int(asyncio.get_running_loop().time())
        if second != self._second:
            self._second, self._lines = second, 0
        self._lines += 1
        if self._lines <= _LOG_LINES_PER_S:
            names = ", ".join(map(_named, items))
            _log.error("Redis answered %s of %s with an error: %s", script, names, _shown(error))


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
