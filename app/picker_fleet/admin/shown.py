"""Lanes, requests, workloads and replicas in the words of the admin API (admin/listed.py). Pure."""

from collections.abc import Mapping
from typing import Any, overload

from picker_fleet.admin.standing import Standing, Told
from picker_fleet.config import Settings
from picker_fleet.request import Band
from picker_fleet.state.reads import Running
from picker_fleet.state.rows import Entry, Lane, WorkloadRow

BANDS = tuple(band.label for band in Band)
_DIGITS = 6


@overload
def rounded(value: float) -> float: ...
@overload
def rounded(value: None) -> None: ...
@overload
def rounded(value: float | None) -> float | None: ...
def rounded(value: float | None) -> float | None:
    """To a millionth, which is enough to look at."""
    return None if value is None else round(value, _DIGITS)


def flow(lane: Lane, standing: Standing, weights: float | None, *, even: bool) -> dict[str, Any]:
    """`weights`: of all that wait in its band; `even`: the policy looks at none (`round-robin`)."""
    served = standing.served_per_s(lane.band, lane.name)
    all_served = standing.served_bands[lane.band]
    return {
        "flow": lane.name,
        "band": BANDS[lane.band],
        "queued": lane.queued,
        "oldest_s": rounded(lane.oldest_s),
        "start_tag": lane.start,
        "weight": lane.weight,
        "parked": lane.parked,
        "in_flight": lane.in_flight,
        "served_cost_per_s": rounded(served),
        "share": None if served is None or not all_served else rounded(min(served / all_served, 1.0)),
        "fair_share": rounded((1.0 if even else lane.weight) / weights) if weights else None,
    }


def queued(entry: Entry, position: int | None, start_tag: float | None) -> dict[str, Any]:
    return {
        **_request(entry),
        "position": position,
        "deadline_in_s": round(entry.deadline_in_s, _DIGITS),
        "overdue": entry.overdue,
        "overdue_in_s": round(entry.overdue_in_s, _DIGITS),
        "score": _score(entry),
        "start_tag": start_tag,
    }


def running(it: Running) -> dict[str, Any]:
    return {**in_flight(it.entry), "lease_in_s": rounded(it.lease_in_s)}


def in_flight(entry: Entry) -> dict[str, Any]:
    return {
        **_request(entry),
        "endpoint": entry.endpoints[0] if entry.endpoints else None,
        "fallbacks": list(entry.endpoints[1:]),
    }


def workload(row: WorkloadRow, settings: Settings) -> dict[str, Any]:
    """The score's parts are those of a request that would arrive now; its criticality is its own."""
    policy, score = settings.workloads, None
    if settings.fair_request_queue.ordering == "workload-aware":
        by_average = policy.wait_signal == "workload_average"
        score = {
            "wait": rounded(policy.wait_weight * min(row.average_wait_s / policy.wait_cap, 1))
            if by_average
            else 0.0,
            "criticality": None,
            "rate": rounded(-policy.rate_weight * min(row.rate / policy.rate_cap, 1)),
            "total": None,
        }
    return {
        "id": row.id,
        "total": row.total,
        "active": row.active,
        "dispatched": row.dispatched,
        "rate": rounded(row.rate),
        "average_wait_s": rounded(row.average_wait_s),
        "last_request_s_ago": rounded(row.last_request_s_ago),
        "score": score,
    }


def replica(told: Told, *, this: str, silence_s: float) -> dict[str, Any]:
    about = told.about
    up_s = _of(about, "up_s", int, float)
    return {
        "id": told.id,
        "live": told.heartbeat_s_ago < silence_s,
        "heartbeat_s_ago": round(told.heartbeat_s_ago, 3),
        "host": _of(about, "host", str),
        "degraded": _of(about, "degraded", bool),
        "waiting": _of(about, "waiting", int),
        "admin": _of(about, "admin", str),
        "grpc": _of(about, "grpc", str),
        "version": _of(about, "version", str),
        "started_s_ago": None if up_s is None else round(up_s + told.heartbeat_s_ago, 3),
        "this": told.id == this,
    }


def bands(
    state: Mapping[str, Any], standing: Standing, weights: Mapping[Band, float] | None
) -> list[dict[str, Any]]:
    """Each band's part of `state`; `weights` under `band_policy: weighted`."""
    return [
        {
            "band": name,
            "queued": state["queue_length"][name],
            "virtual_time": state["virtual_times"][name],
            "active_flows": standing.totals[band] + standing.totals[band + 3],
            "oldest_s": rounded(standing.oldest_s(band)),
            "weight": None if weights is None else weights[band],
        }
        for band, name in zip(Band, BANDS, strict=True)
    ]


def _of(about: Mapping[str, Any], name: str, *kinds: type) -> Any:
    """What a replica, maybe of another version, says of itself; None unless it is of these kinds."""
    value = about.get(name)
    return value if type(value) in kinds else None


def _request(entry: Entry) -> dict[str, Any]:
    return {
        "id": entry.id,
        "state": entry.state,
        "flow": entry.flow,
        "band": BANDS[entry.band],
        "workload": entry.workload or None,
        "model": entry.model,
        "criticality": entry.criticality,
        "cost": entry.cost,
        "age_s": round(entry.age_s, _DIGITS),
        "owner": entry.owner,
    }


def _score(entry: Entry) -> dict[str, Any] | None:
    score = entry.score
    if score is None:
        return None
    return {
        "wait": rounded(score.wait),
        "criticality": rounded(score.criticality),
        "rate": rounded(score.rate),
        "total": rounded(score.wait + score.criticality + score.rate),
    }
