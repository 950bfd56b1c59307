"""Parses label selectors as Kubernetes spells them ("Labels and Selectors" in its documentation).

A selector is a comma-separated list of requirements, all of which must hold, such as `a=b` (or `a==b`),
`a!=b`, `a in (b,c)`, `a notin (b,c)`, `a` (the label is set) and `!a` (the label is not set). `!=` and
`notin` also hold if the label is not set. domain/scheduling.py checks selectors, endpoints/stages.py applies
them.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Final, NamedTuple

_NAME: Final = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_KEY: Final = rf"(?:[a-z0-9](?:[a-z0-9.-]{{0,251}}[a-z0-9])?/)?{_NAME}"
_VALUE: Final = rf"(?:{_NAME})?"
_REQUIREMENT: Final = re.compile(
    rf"\s*+(?:(?P<absent>!)\s*+(?P<no>{_KEY})"
    rf"|(?P<key>{_KEY})(?:\s*+(?P<equality>==|=|!=)\s*+(?P<value>{_VALUE})"
    rf"|\s++(?P<within>in|notin)\s*+\((?P<values>\s*+{_VALUE}\s*+(?:,\s*+{_VALUE}\s*+)*)\))?)\s*+(?:,|\Z)"
)


class Requirement(NamedTuple):
    """The label `key` must be one of `values` (None: any value), or, if `negated`, must not be."""

    key: str
    values: frozenset[str] | None
    negated: bool

    def holds(self, labels: Mapping[str, str]) -> bool:
        value = labels.get(self.key)
        found = value is not None and (self.values is None or value in self.values)
        return found is not self.negated


@lru_cache(maxsize=64)
def requirements(text: str) -> tuple[Requirement, ...]:
    """The requirements of the selector `text`.

    Raises:
        ValueError: the selector `text` is malformed; the message says where.
    """
    found: list[Requirement] = []
    at = 0
    while at < len(text) or not found or text.rstrip().endswith(","):
        match = _REQUIREMENT.match(text, at)
        if match is None:
            rest = text[at:].strip()[:40] or "the end"
            forms = "a=b, a!=b, a in (b,c), a notin (b,c), a or !a"
            raise ValueError(f"no label selector at {rest!r}: write {forms}")
        at = match.end()
        if match["absent"]:
            found.append(Requirement(match["no"], None, negated=True))
        elif match["equality"]:
            values = frozenset((match["value"],))
            found.append(Requirement(match["key"], values, negated=match["equality"] == "!="))
        elif match["within"]:
            values = frozenset(each.strip() for each in match["values"].split(","))
            found.append(Requirement(match["key"], values, negated=match["within"] == "notin"))
        else:
            found.append(Requirement(match["key"], None, negated=False))
    return tuple(found)


def label_selector(text: str) -> str:
    """Return `text`, or raise ValueError if it is no selector."""
    requirements(text)
    return text


def selects(text: str, labels: Mapping[str, str]) -> bool:
    """Whether `labels` meet every requirement of the selector `text`, which must be valid."""
    return all(each.holds(labels) for each in requirements(text))
