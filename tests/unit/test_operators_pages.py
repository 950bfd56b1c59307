"""The operators' pages agree with the alerts, settings, links and log lines."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from picker_fleet.config import Settings
from picker_fleet.replica.live_config import AFFECTS
from picker_fleet.sections import Section

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / f"{name}.md" for name in ("operations", "errors", "tuning", "upgrading")]
LINK = re.compile(r"\]\(([^)#]*)(?:#([^)]*))?\)")
SECTIONS = "|".join(name for name, field in Settings.model_fields.items() if name != "pool")
KEY = re.compile(rf"`((?:{SECTIONS})\.[a-z_.]+)`")


def text_of(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def keys(of: type[Section], before: str = "") -> Iterator[str]:
    """Every key of the settings tree below `of`, with dots."""
    for name, field in of.model_fields.items():
        yield before + name
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, Section):
                yield from keys(kind, f"{before}{name}.")


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        found = (page.parent / target).resolve() if target else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_that_are_named_exist(page: Path) -> None:
    named = set(KEY.findall(page.read_text(encoding="utf-8")))
    assert named
    assert named <= set(keys(Settings))


def test_what_tuning_calls_live_may_change_live_and_nothing_else() -> None:
    rows = re.findall(r"^\| `([\w.]+)`( \*live\*)? \|", text_of("tuning"), re.MULTILINE)
    rows = [(key, live) for key, live in rows if "." in key and key in set(keys(Settings))]
    assert len(rows) > 10
    assert [(key, bool(live)) for key, live in rows] == [(key, key in AFFECTS) for key, _ in rows]


def test_every_alert_is_on_the_page_once() -> None:
    groups = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules" / "alerts.yml").read_text())["groups"]
    alerts = [rule["alert"] for group in groups for rule in group["rules"]]
    listed = re.findall(r"^\| `(Picker\w+)` \|", text_of("operations"), re.MULTILINE)
    assert sorted(listed) == sorted(alerts)


def warnings() -> Iterator[str]:
    """How each warning or error of a replica's log begins, up to what is filled in."""
    for file in sorted((ROOT / "app" / "picker_fleet").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                first = node.args[0]
                logs = getattr(node.func.value, "id", "") == "_log"
                if logs and node.func.attr in ("warning", "error", "exception"):
                    assert isinstance(first, ast.Constant)
                    yield str(first.value)


def test_every_warning_of_the_log_is_on_the_page() -> None:
    page = text_of("operations").split("\n## The log\n", 1)[1]
    found = list(warnings())
    assert len(found) > 15
    for warning in found:
        part = max(re.split(r"%\w+|[:;(]", warning), key=len).strip()
        assert part in page, warning
