"""Return types of state/store.py: replies of the scripts, verdicts on requests, and events that Redis brings.

Admission, failover, fleet/ and admin/ match these types. A verdict says how one request goes on: an admission
or a placement returns a verdict, and a notification brings a verdict to the replica that owns a waiting
request. The scripts' headers explain each reply. Times are seconds unless their names end in `_ms`.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from picker_fleet.state.schema import Refusal


@dataclass(slots=True)  # not frozen: each request makes one, and a frozen one takes thrice as long
class Placed:
    """The request runs on the first endpoint. The field `loads` has the loads that the script compared, in
    the form of `lua/place.lua`; '' if the request was placed before. The field `quota` has the balances of
    its tenant, in the form of `quotas.shown` in `lua/lib/quotas.lua`; '' without limits. The first of
    `prefillers`, if any, computes the prompt (its stage prefill is reserved); further ones are fallbacks."""

    endpoints: tuple[str, ...]
    loads: str = field(default="", compare=False)
    quota: str = field(default="", compare=False)
    prefillers: tuple[str, ...] = ()


@dataclass(slots=True)
class Queued:
    left_s: float  # seconds until the request's deadline


@dataclass(slots=True)
class Refused:
    """If a tenant's limit refuses the request, `limit` is `UNIT PER_MS PATH` (lua/admit.lua), and `quota` as
    in `Placed`."""

    reason: Refusal
    retry_after_s: int
    limit: str = ""
    quota: str = ""


class Verdict(enum.Enum):
    """A verdict that has no further fields."""

    GRANTED = "granted"  # the replica must ask for the placement
    EXPIRED = "expired"
    PREEMPTED = "preempted"
    EVICTED = "evicted"
    GONE = "gone"  # Redis does not know the request, or another stream owns it
    FOREIGN = "foreign"  # another request has this id
    UNKNOWN_POOL = "unknown-pool"


AnyVerdict = Placed | Queued | Refused | Verdict
NOTIFIED: Mapping[str, Verdict] = {  # the verdicts that a notification may bring by their word alone
    each.value: each for each in (Verdict.GRANTED, Verdict.EXPIRED, Verdict.PREEMPTED, Verdict.EVICTED)
}


def is_older(version: str, other: str) -> bool:
    """Whether the numbered `version` is less than `other`; '' is less than any number."""
    return int(version or 0) < int(other or 0)


def name_of(verdict: AnyVerdict) -> str:
    """The word that scripts and traces use for `verdict`."""
    return verdict.value if isinstance(verdict, Verdict) else type(verdict).__name__.lower()


@dataclass(slots=True)
class Notification:
    """The queue's verdict on a waiting request of this replica. `attempt`: set only if Placed."""

    request_id: str
    verdict: AnyVerdict
    attempt: str = ""


Renewal = Literal["renewed", "restored", "waiting", "unknown"]
FaultReply = Literal["ejected", "down", "noted", "unknown"]
TombstoneReply = Literal["stored", "back"]
PrefilledReply = Literal["released", "unknown"]
SuspicionReply = Literal["suspected", "waiting", "unknown"]
CancelReply = Literal["ended", "foreign", "unknown"]
MarkReply = Literal["marked", "ejected", "unknown"]
EvictReply = Literal["evicted", "running", "unknown"]
EndKind = Literal["settled", "left", "unknown"]


@dataclass(slots=True)
class SettleReply:
    """`left`: the request was still queued, and has left the queue. `model`: the request's model; '' if Redis
    did not know the request."""

    kind: EndKind
    model: str = ""

    @classmethod
    def parse(cls, reply: str) -> "SettleReply":
        kind, _, model = reply.partition(" ")
        return cls(cast(EndKind, kind), model)


@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    """The reply to a heartbeat. `epoch` identifies a lifetime of the shared state; 0: there is none."""

    epoch: str
    was_known: bool
    leader: bool
    live_replicas: int
    config_version: str
    endpoints_version: str
    stock: float
    queued: int
    upper: float
    lower: float
    ready_endpoints: int
    tuned_version: str
    paused: bool


@dataclass(frozen=True, slots=True)
class SweepReply:
    ran: bool
    expired: int
    reclaimed: int
    more: bool
    given_up: int = 0  # number of requests that ended unreported, reclaimed before their leases ran out
    suspects: tuple[str, ...] = ()  # endpoints whose metrics pages may show more unreported ends


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """The result of rebuilding an unknown pool. `records` is the number of requests indexed again, `lost` the
    name of the missing key ('': the key `pool`)."""

    records: int
    lost: str


@dataclass(frozen=True, slots=True)
class LiveConfig:
    """The live changes in force: the settings that they override, and the operator's text
    (fleet/live_config.py). `version` is '' until the first live change."""

    version: str = ""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Dispatched:
    """How often a script call of this replica tried and managed to dispatch queued requests."""

    attempts: int
    successes: int


@dataclass(slots=True)
class RedisLost:
    """Redis is unavailable. The field `cause` is a label of the metric; `reason` goes to the log."""

    cause: str
    reason: str


# The events that replies and channels of Redis bring.
Event = Notification | Dispatched | RedisLost
