"""Assigns discovered endpoints to stages: decode, prefill and encode.

A decode endpoint generates answers, and computes the prompts of requests that are not split. A prefill
endpoint computes prompts for decode endpoints, whose servers or sidecars fetch the KV cache; an encode
endpoint turns media into embeddings for decode endpoints. pool.py calls `serving`.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from picker_fleet.domain.label_selector import selects
from picker_fleet.domain.request import Endpoint
from picker_fleet.domain.scheduling import Encode, Stage, Stages
from picker_fleet.endpoints.discovery import Report

ROLE: Final = "llm-d.ai/role"
_ALL_ROLES: Final = ("both", "all")
_DECODING_ROLES: Final = (*_ALL_ROLES, "flexible-decoder")
_STAGES: Final = frozenset(("decode", "prefill", "encode"))

_log = logging.getLogger(__name__)


def _does(stage: str, settings: Stage | Encode, endpoint: Endpoint) -> bool:
    """Whether `endpoint` has this stage: by the stage's selector, else by its label `ROLE`. An endpoint
    without a role decodes."""
    if settings.selector is not None:
        return selects(settings.selector, endpoint.labels)
    role = endpoint.labels.get(ROLE, "")
    if stage == "decode" and (not role or role in _DECODING_ROLES):
        return True
    named = frozenset(role.split("-"))
    return (stage == "prefill" and role in _ALL_ROLES) or stage in named <= _STAGES


def with_stages(endpoints: tuple[Endpoint, ...], settings: Stages) -> tuple[Endpoint, ...]:
    """`endpoints` with their stages; an endpoint of no stage is left out.

    Without a selector the label `ROLE` decides. An endpoint whose role also names `decode` prefills (or
    encodes) only while another endpoint does so without decoding: charts may give this role to every server
    of a pool without stages.
    """
    found = []
    for each in endpoints:
        decodes, prefills = _does("decode", settings.decode, each), _does("prefill", settings.prefill, each)
        encodes = _does("encode", settings.encode, each)
        if prefills or encodes:
            found.append(replace(each, decodes=decodes, prefills=prefills, encodes=encodes))
        elif decodes:
            found.append(each)
    apart = [each for each in found if not each.decodes]
    prefill = settings.prefill.selector is not None or any(each.prefills for each in apart)
    encode = settings.encode.selector is not None or any(each.encodes for each in apart)
    return tuple(
        replace(each, prefills=each.prefills and prefill, encodes=each.encodes and encode)
        if each.prefills or each.encodes
        else each
        for each in found
    )


def serving(labels: Mapping[str, str], settings: Stages, report: Report) -> Report:
    """Wrap `report`: pass on only endpoints that have `labels` and a stage; log the stages and all other
    endpoints."""
    # The last line logged: counts of endpoints that prefill, do both, encode; endpoints without a stage.
    logged: tuple[tuple[int, int, int], tuple[str, ...]] = (0, 0, 0), ()

    def report_serving(endpoints: tuple[Endpoint, ...]) -> None:
        nonlocal logged
        labelled = tuple(each for each in endpoints if labels.items() <= each.labels.items())
        serve = with_stages(labelled, settings)
        others = tuple(sorted({each.address for each in endpoints} - {each.address for each in serve}))
        prefill = [each for each in serve if each.prefills]
        counts = len(prefill), sum(each.decodes for each in prefill), sum(each.encodes for each in serve)
        if counts != logged[0]:
            decode = sum(each.decodes for each in serve)
            _log.info("stages: %d endpoints decode, %d prefill, %d of them both; %d encode", decode, *counts)
        if others != logged[1]:
            which = ", ".join(others[:8])
            _log.info("%d endpoints get no requests due to their labels or %s: %s", len(others), ROLE, which)
        logged = counts, others
        report(serve)

    return report_serving
