"""Assigns discovered endpoints to stages: those that decode, those that prefill prompts for others, or both.

An endpoint that decodes serves whole requests. An endpoint that prefills computes prompts for endpoints that
decode, whose servers or sidecars fetch the KV cache. pool.py puts `serving` between discovery and the fleet.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from picker_fleet.domain.label_selector import selects
from picker_fleet.domain.request import Endpoint
from picker_fleet.domain.scheduling import Stage, Stages
from picker_fleet.endpoints.discovery import Report

ROLE: Final = "llm-d.ai/role"
_ALL_ROLES: Final = ("both", "all")
_DECODING_ROLES: Final = (*_ALL_ROLES, "flexible-decoder")

_log = logging.getLogger(__name__)


def _does(stage: str, settings: Stage, endpoint: Endpoint) -> bool:
    """Whether `endpoint` has this stage: by the stage's selector, else by its label `ROLE`. An endpoint
    without a role decodes."""
    if settings.selector is not None:
        return selects(settings.selector, endpoint.labels)
    role = endpoint.labels.get(ROLE, "")
    if stage == "decode":
        return not role or role in _DECODING_ROLES or stage in role.split("-")
    return role in _ALL_ROLES or stage in role.split("-")


def with_stages(endpoints: tuple[Endpoint, ...], settings: Stages) -> tuple[Endpoint, ...]:
    """`endpoints` with their stages; an endpoint of neither stage is left out.

    Without a selector the label `ROLE` decides. Endpoints whose role names both stages then prefill only
    while some endpoint only prefills: in a pool without prefill servers charts give every server such a role.
    """
    found = []
    for each in endpoints:
        decodes, prefills = _does("decode", settings.decode, each), _does("prefill", settings.prefill, each)
        if decodes or prefills:
            found.append(replace(each, decodes=decodes, prefills=prefills) if prefills else each)
    if settings.prefill.selector is None and all(each.decodes for each in found):
        return tuple(replace(each, prefills=False) if each.prefills else each for each in found)
    return tuple(found)


def serving(labels: Mapping[str, str], settings: Stages, report: Report) -> Report:
    """Wrap `report`: pass on only endpoints that have `labels` and a stage; log the stages and all other
    endpoints."""
    # How many endpoints prefill, how many of them also decode, and the endpoints without a stage.
    logged: tuple[int, int, tuple[str, ...]] = (0, 0, ())

    def report_serving(endpoints: tuple[Endpoint, ...]) -> None:
        nonlocal logged
        labelled = tuple(each for each in endpoints if labels.items() <= each.labels.items())
        serve = with_stages(labelled, settings)
        others = tuple(sorted({each.address for each in endpoints} - {each.address for each in serve}))
        prefill = [each for each in serve if each.prefills]
        found = len(prefill), sum(each.decodes for each in prefill), others
        if found[:2] != logged[:2]:
            decode = sum(each.decodes for each in serve)
            _log.info("stages: %d endpoints decode, %d prefill, %d of them both", decode, *found[:2])
        if others != logged[2]:
            which = ", ".join(others[:8])
            _log.info("%d endpoints get no requests due to their labels or %s: %s", len(others), ROLE, which)
        logged = found
        report(serve)

    return report_serving
