"""One entry of the decision log, as `lua/lib/pool.lua` writes it (docs/redis-schema.md)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

TURN, GUARD = "turn", "guard"
ENDS = frozenset({
    "completed", "client_gone", "upstream_failed", "withdrawn", "cancelled", "refused", "reclaimed",
    "expired", "abandoned", "preempted", "evicted",
})  # fmt: skip
LANES = frozenset({"parked", "unparked"})  # about a lane, which `flow` names
EVENTS = ENDS | LANES | {
    "queued", "bypassed", "granted", "placed", "requeued", "adopted", "held", "restored", "moved",
    "corrected", "tuned", "rebased",
}  # fmt: skip


class EntryError(ValueError):
    """An entry that cannot be read; the message names the entry and the field."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A decision. `stock`, `queued`, `v`, `upper` and `lower` are those after it.

    `tag` is the lane's start tag (None: not told), of `rebased` what all tags of the band are less by,
    `due_ms` when the request becomes overdue (None: not told), `limit` that of its flow on each endpoint (0:
    none), `endpoint` '' while it has none.
    """

    seq: int
    time_us: int
    event: str
    request: str
    flow: str
    band: int
    workload: str
    cost: float
    weight: float
    arrived: int
    deadline_ms: int
    due_ms: int | None
    limit: int
    tag: float | None
    v: float
    by: str
    owner: str
    endpoint: str
    stock: float
    queued: int
    upper: float
    lower: float
    note: str

    @classmethod
    def parse(cls, raw: Mapping[str, str]) -> "Entry":
        """The entry whose fields are `raw`.

        Raises:
            EntryError: a field is missing, a number is none, or the event is unknown.
        """
        field = ""
        try:
            values: dict[str, Any] = {}
            for field, read in _READ.items():
                values[field] = read(raw[field])
            field = "event"
            if raw[field] not in EVENTS:
                raise ValueError("unknown event")
        except (KeyError, ValueError):
            told = repr(raw[field][:80]) if field in raw else "missing"
            raise EntryError(f"entry {raw.get('seq', '?')[:20]}: {field} is {told}") from None
        return cls(**values)

    @property
    def now_ms(self) -> int:
        """The clock of the decision, as the scripts count it."""
        return self.time_us // 1000

    def __str__(self) -> str:
        about = [f"#{self.seq}", f"{self.time_us / 1e6:.6f}", self.event]
        if self.event in LANES:
            about.append(f"lane={self.flow!r} band={self.band}")
        elif self.request:
            about.append(f"{self.request} flow={self.flow!r} band={self.band} cost={self.cost:g}")
            about.append(f"arrived={self.arrived / 1e6:.6f}")
        about += [
            f"{name}={value}"
            for name, value in (("tag", self.tag), ("by", self.by), ("endpoint", self.endpoint))
            if value not in (None, "")
        ]
        about.append(f"v={self.v:g} stock={self.stock:g}/{self.upper:g} queued={self.queued}")
        if self.note and self.event != "tuned":
            about.append(f"note={self.note}")
        return " ".join(about)


def _optional_float(text: str) -> float | None:
    return float(text) if text else None


def _optional_int(text: str) -> int | None:
    return int(text) if text else None


_READ: Mapping[str, Callable[[str], Any]] = {
    "seq": int, "time_us": int, "event": str, "request": str, "flow": str, "band": int, "workload": str,
    "cost": float, "weight": float, "arrived": int, "deadline_ms": int, "due_ms": _optional_int, "limit": int,
    "tag": _optional_float, "v": float, "by": str, "owner": str, "endpoint": str, "stock": float,
    "queued": int, "upper": float, "lower": float, "note": str,
}  # fmt: skip
