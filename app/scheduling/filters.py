"""Who may be picked at all. A filter is a pure function of the ask and one endpoint: why not, or None.

Hard filters always hold. A soft one (`SOFT`) is a wish: if it would leave nobody, it is waived. They apply
in the table's order; the first that bars an endpoint gives the reason.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from app.scheduling.ask import PickAsk
from app.scheduling.signals import Signals

Filter = Callable[[PickAsk, Signals], str | None]


def subset(ask: PickAsk, endpoint: Signals) -> str | None:
    """Only endpoints that the gateway's subset hint names."""
    if ask.subset is None or endpoint.address in ask.subset:
        return None
    return "not in the subset hint"


def health(ask: PickAsk, endpoint: Signals) -> str | None:
    """Only endpoints that answer."""
    return None if endpoint.healthy else "unhealthy"


def drain(ask: PickAsk, endpoint: Signals) -> str | None:
    """Only endpoints that take new requests."""
    return "draining" if endpoint.draining else None


def label(ask: PickAsk, endpoint: Signals) -> str | None:
    """Only endpoints that have every label of the selector."""
    if not ask.selector:
        return None
    labels = endpoint.labels
    for name, wanted in ask.selector.items():
        if labels.get(name) != wanted:
            return f"label {name} is not {wanted}"
    return None


def adapter(ask: PickAsk, endpoint: Signals) -> str | None:
    """Only endpoints that run the adapter or have a slot for it; one whose slots are unknown may."""
    if not ask.adapter or endpoint.max_adapters is None:
        return None
    if ask.adapter in endpoint.active_adapters or endpoint.has_adapter_slot:
        return None
    return f"no adapter slot free for {ask.adapter}"


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
        reasons = [bars(ask, endpoint) for endpoint in kept]
        if not any(reasons):
            continue
        if name in SOFT and all(reasons):
            waived.append(name)
            continue
        judged = list(zip(kept, reasons, strict=True))
        excluded.update((endpoint.address, reason) for endpoint, reason in judged if reason)
        kept = [endpoint for endpoint, reason in judged if not reason]
    return Sifted(kept, excluded, tuple(waived))
