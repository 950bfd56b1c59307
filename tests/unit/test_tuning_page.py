"""docs/tuning.md has a row for every key that tunes something."""

from pathlib import Path

import pytest

from picker_fleet.config import Settings
from picker_fleet.replica.live_config import LIVE
from picker_fleet.sections import Model

PAGE = (Path(__file__).parents[2] / "docs" / "tuning.md").read_text(encoding="utf-8")
TUNED = ("fair_request_queue", "request_queue_controller", "workloads", "scheduling", "scraping", "leases")
ROWS = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]


def keys() -> list[str]:
    sections = Settings()
    found = [f"{name}.{key}" for name in TUNED for key in type(getattr(sections, name)).model_fields]
    return found + [f"models[].{key}" for key in Model.model_fields if key != "name"]


def row(section: str, key: str) -> str | None:
    """The first cell of the row about a key: it names its section first, and may list keys of it."""
    return next((cell for cell in ROWS if f"`{section}." in cell and f"{key}`" in cell), None)


@pytest.mark.parametrize("key", keys())
def test_a_key_has_a_row_that_says_whether_it_is_live(key: str) -> None:
    section, _, name = key.rpartition(".")
    cell = row(section, name)
    assert cell is not None, f"docs/tuning.md has no row for {key}"
    assert ("*live*" in cell) == (key in LIVE), f"{key} is {'' if key in LIVE else 'not '}live"
