"""Parses the table of metrics in docs/metrics.md."""

import re
from dataclasses import dataclass
from pathlib import Path

_ROW = re.compile(r"\| `(epp_\w+)` \| (\w+) \| (.*?) \| (sum|max) \| (.+) \|")
_PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


@dataclass(frozen=True, slots=True)
class Row:
    """A documented metric family. The field `name` includes a counter's suffix `_total`."""

    name: str
    kind: str
    labels: frozenset[str]
    read_with: str


def documented() -> dict[str, Row]:
    """Every documented metric family, by name."""
    rows = [
        Row(name, kind, frozenset(re.findall(r"`(\w+)`", labels)), read_with)
        for name, kind, labels, read_with, _ in _ROW.findall(_PAGE.read_text())
    ]
    assert len(rows) == len({row.name for row in rows})
    return {row.name: row for row in rows}


def families(page: str) -> dict[str, tuple[str, frozenset[str]]]:
    """Type and label names of each `epp_` family on a metrics page; no labels for a family without series."""
    kinds = dict(re.findall(r"^# TYPE (epp_\w+) (\w+)$", page, re.MULTILINE))
    labels: dict[str, set[str]] = {name: set() for name in kinds}
    for name, inside in re.findall(r"^(epp_\w+)(?:\{(.*)\})? ", page, re.MULTILINE):
        base = name if name in kinds else re.sub(r"_(bucket|sum|count)$", "", name)
        labels[base] |= set(re.findall(r'(\w+)="', inside)) - {"le"}
    return {name: (kind, frozenset(labels[name])) for name, kind in kinds.items()}
