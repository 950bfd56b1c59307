"""What each error means that Redis answers in place of a reply; docs/errors.md shows the same table."""

import enum

ERROR_REPLIES = (
    # Not, or not now, the server to ask.
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
    # The one to ask, but it does not do this for anyone.
    ("BUSY ", "denied"),
    ("NOPERM ", "denied"),
    ("ERR ACL failure in script", "denied"),
    ("ERR unknown command", "denied"),
    ("ERR Function not found", "denied"),  # and it cannot be given the library
    # It takes nothing that would add to what it holds, or nothing at all that it would have to write down.
    ("OOM ", "full"),
    ("MISCONF ", "full"),
)
NO_ANSWER = "no-answer"  # among the metrics' kinds of errors, beside the meanings of those that are answered


class Meaning(enum.Enum):
    """ELSEWHERE: asked once more, on a new connection, which leads to whoever is the primary by then. DENIED:
    asked once more a moment later. Either, if it lasts, is as if Redis had not answered. FULL: it takes no
    writes for now. ITEM: a script's error, on a damaged record for example."""

    ELSEWHERE = "elsewhere"
    DENIED = "denied"
    FULL = "full"
    ITEM = "item"


def meaning_of(error: str) -> Meaning:
    """What `error`, the text of an error reply, means; ITEM unless it is known to mean something else."""
    return next(
        (Meaning(meaning) for prefix, meaning in ERROR_REPLIES if error.startswith(prefix)), Meaning.ITEM
    )
