"""The decision log of a test's fleet: on unless the test says otherwise, and held against G1 to G6 when the
fleet ends, whatever the test is about.
"""

from collections.abc import Mapping
from typing import Any

from picker_tools.audit.auditor import audited

_ENABLED, _MAX_ENTRIES = "PICKER_DECISION_LOG__ENABLED", "PICKER_DECISION_LOG__MAX_ENTRIES"
_ENTRIES = 3_000_000  # more than any test writes: the log is to be whole


def is_on(config: Mapping[str, Any]) -> bool:
    """Whether a fleet of this configuration writes the log."""
    return bool(config.get("decision_log", {}).get("enabled", True))


def environment(config: Mapping[str, Any]) -> dict[str, str]:
    """Of a fleet's processes, so that its log is on and kept whole where `config` does not say otherwise."""
    stated = config.get("decision_log", {})
    wanted = {_ENABLED: ("enabled", "true"), _MAX_ENTRIES: ("max_entries", str(_ENTRIES))}
    return {name: value for name, (key, value) in wanted.items() if key not in stated}


def judge(redis_url: str, whose: str) -> None:
    """Replay the log that is at `redis_url` now.

    Raises:
        AssertionError: it breaks a promise, or its beginning is missing; with the entries that show it.
        LogUnreadable: there is none, or Redis does not answer.
    """
    report = audited(redis_url, "default")
    told = [
        "\n    ".join([f"{violation.promise}: {violation.what}", *map(str, violation.evidence)])
        for finding in report.findings
        for violation in finding.violations
    ]
    if report.first_seq != 1:
        told.append(f"log: it begins at entry {report.first_seq}")
    what = f"{report.violations} violations in {report.entries} entries of the decision log of {whose}"
    assert not told, "\n".join([what, *report.remarks, *told])
