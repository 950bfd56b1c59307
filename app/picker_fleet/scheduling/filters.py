"""Who may be picked at all. A filter is a pure function: the ask and the endpoints in, a reason against each
endpoint out, or None where there is none; or None altogether if it has nothing to say of this ask.

Hard filters always hold. A soft one (`SOFT`) is a wish: if it would leave nobody, it is waived. They apply
in the table's order; the first that bars an endpoint gives the reason.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from picker_fleet.scheduling.ask import PickAsk
from picker_fleet.scheduling.signals import Signals

Reasons = list[str | None]
Filter = Callable[[PickAsk, Sequence[Signals]], Reasons | None]


def subset(ask: PickAsk, endpoints: Sequence[Signals]) -> Reasons | None:
    """Only endpoints that the gateway's subset hint names."""
    wanted = ask.subset
    if wanted is None:
        return None
    return [None if endpoint.address in wanted else "not in the subset hint" for endpoint in endpoints]


def health(ask: PickAsk, endpoints: Sequence[Signals]) -> Reasons | None:
    """Only endpoints that answer."""
    return [None if endpoint.healthy else "unhealthy" for endpoint in endpoints]


def drain(ask: PickAsk, endpoints: Sequence[Signals]) -> Reasons | None:
    """Only endpoints that take new requests."""
    return ["draining" if endpoint.draining else None for endpoint in endpoints]


def label(ask: PickAsk, endpoints: Sequence[Signals]) -> Reasons | None:
    """Only endpoints that have every label of the selector."""
    if not ask.selector:
        return None
    wanted = ask.selector.items()
    return [
        next((f"label {name} is not {value}" for name, value in wanted if labels.get(name) != value), None)
        for labels in [endpoint.labels for endpoint in endpoints]
    ]


def adapter(ask: PickAsk, endpoints: Sequence[Signals]) -> Reasons | None:
    """Only endpoints that run the adapter or have a slot for it; one whose slots are unknown may."""
    wanted = ask.adapter
    if not wanted:
        return None
    full = f"no adapter slot free for {wanted}"
    return [
        None
        if endpoint.has_adapter_slot or wanted in endpoint.active_adapters or endpoint.max_adapters is None
        else full
        for endpoint in endpoints
    ]


FILTERS: Mapping[str, Filter] = {
    "subset": subset,
    "health": health,
    "drain": drain,
    "label": label,
    "adapter": adapter,
}
SOFT = frozenset({"adapter"})


@dataclass(frozen=True, slots=True)
class Sifted:
    """`kept` endpoints in the order they came, why each other one is out, and the soft filters waived."""

    kept: list[Signals]
    excluded: dict[str, str]  # address -> reason
    waived: tuple[str, ...]


def sift(ask: PickAsk, endpoints: Sequence[Signals]) -> Sifted:
    """Part the endpoints that `ask` may go to from the others."""
    kept = list(endpoints)
    excluded: dict[str, str] = {}
    waived: list[str] = []
    for name, bars in FILTERS.items():
        reasons = bars(ask, kept)
        if reasons is None or not any(reasons):
            continue
        if name in SOFT and all(reasons):
            waived.append(name)
            continue
        passed = []
        for endpoint, reason in zip(kept, reasons, strict=True):
            if reason:
                excluded[endpoint.address] = reason
            else:
                passed.append(endpoint)
        kept = passed
    return Sifted(kept, excluded, tuple(waived))
