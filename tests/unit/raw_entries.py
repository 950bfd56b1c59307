"""A request of the simulated queue, and the entries of a decision log about it, as the stream has them."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass
class Request:
    id: str
    flow: str = ""
    band: int = 1
    cost: float = 1.0
    weight: float = 1.0
    limit: int = 0
    arrived: int = 0
    deadline_ms: int = 0
    owner: str = "a"
    due_ms: int = 0
    state: str = "new"
    endpoint: str = ""
    taken: float = 0.0
    tag: float = -1.0


NOBODY = Request("", band=0, cost=0, owner="")


def raw_entry(
    event: str, r: Request, numbers: Mapping[str, float], about: Mapping[str, str]
) -> dict[str, str]:
    """`numbers` are those of the pool after the event; `about` its tag, by and note."""
    numbers = {
        **numbers, "band": r.band, "cost": r.cost, "weight": r.weight, "arrived": r.arrived,
        "deadline_ms": r.deadline_ms, "limit": r.limit,
    }  # fmt: skip
    return {
        **{name: f"{number:.17g}" for name, number in numbers.items()},
        **about,
        "event": event,
        "request": r.id,
        "flow": r.flow,
        "workload": "",
        "owner": r.owner,
        "endpoint": r.endpoint,
        "due_ms": str(r.due_ms) if r.due_ms else "",
    }
