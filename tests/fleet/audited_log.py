"""The decision log of a test's fleet: enabled by default, and audited (G1 to G6) when the fleet ends.

Used by `whole_fleet`.
"""

from collections.abc import Mapping
from typing import Any

from picker_tools.audit.auditor import audited

_ENABLED, _MAX_ENTRIES = "PICKER_DECISION_LOG__ENABLED", "PICKER_DECISION_LOG__MAX_ENTRIES"
_ENTRIES = 3_000_000  # more than any test writes, so that nothing is trimmed


def environment(config: Mapping[str, Any]) -> dict[str, str]:
    """Environment variables that enable the decision log untrimmed, except settings that `config` has."""
    configured = config.get("decision_log", {})
    wanted = {_ENABLED: ("enabled", "true"), _MAX_ENTRIES: ("max_entries", str(_ENTRIES))}
    return {name: value for name, (key, value) in wanted.items() if key not in configured}


def assert_no_violation(redis_url: str, fleet_name: str, pool: str = "default") -> None:
    """Audit the decision log of `pool` in Redis.

    Raises:
            AssertionError: the log violates a guarantee (the message shows where), or its start is missing.
            LogUnreadable: there is no log, or Redis does not answer.
    """
    report = audited(redis_url, pool)
    problems = [
        "\n    ".join([f"{violation.promise}: {violation.what}", *map(str, violation.evidence)])
        for finding in report.findings
        for violation in finding.violations
    ]
    if report.first_seq != 1:
        problems.append(f"log: it begins at entry {report.first_seq}")
    log = f"{report.entries} entries of the decision log of {fleet_name}, pool {pool}"
    what = f"{report.violations} violations in {log}"
    assert not problems, "\n".join([what, *report.remarks, *problems])
