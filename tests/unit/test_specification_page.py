"""docs/specification.md names code, tests and settings: all of them exist."""

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from picker_fleet.config import Settings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "specification.md").read_text(encoding="utf-8")
QUOTED = sorted(set(re.findall(r"`([^`\n]+)`", PAGE)))
PATHS = [text for text in QUOTED if re.match(r"(app|bench|deploy|lua|tests)/", text)]
SETTINGS = [text for text in QUOTED if text.partition(".")[0].rstrip("[]") in Settings.model_fields]
COLUMNS = 4


def rows() -> list[list[str]]:
    """The cells of every statement's row."""
    lines = [line for line in PAGE.splitlines() if line.startswith("| ") and "| where |" not in line]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def is_setting(text: str) -> bool:
    """Whether `text` leads to a setting, from section to section."""
    fields = Settings.model_fields
    *sections, last = text.replace("[]", "").split(".")
    for name in sections:
        kind = fields[name].annotation if name in fields else None
        inner = kind if isinstance(kind, type) else next(iter(getattr(kind, "__args__", ())), None)
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return False
        fields = inner.model_fields
    return last in fields


@pytest.mark.parametrize("named", PATHS)
def test_what_the_page_names_is_there(named: str) -> None:
    path, _, test = named.partition("::")
    assert (ROOT / path).exists(), f"docs/specification.md names {path}"
    if test:
        text = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"def {test}\(", text), f"{path} has no {test}"


@pytest.mark.parametrize("named", SETTINGS)
def test_a_setting_that_the_page_names_can_be_set(named: str) -> None:
    assert is_setting(named), f"docs/specification.md names {named}"


def test_every_statement_has_code_and_a_test_or_says_why_not() -> None:
    found = rows()
    assert len(found) > 100
    for cells in found:
        assert len(cells) >= COLUMNS - 1, cells
        statement, where, test, *differs = cells
        assert statement
        assert where.startswith(("`", "–")), cells
        if "tests/" not in test:
            assert differs, f"neither a test nor a reason: {statement}"
            assert differs[0].strip("| "), f"neither a test nor a reason: {statement}"
