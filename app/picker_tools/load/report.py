"""What is left of a run: `summary.json` and `report.html` in a folder, and a table on the terminal."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from picker_tools.load.evidence import Evidence
from picker_tools.load.page import page
from picker_tools.load.plots import draw
from picker_tools.load.promise import Promise, Verdict
from picker_tools.load.summary import summary

_STYLES = {Verdict.HELD: "green", Verdict.BROKEN: "bold red", Verdict.NOT_JUDGED: "yellow"}


def write(run: Evidence, promises: Sequence[Promise], folder: Path) -> None:
    """Both files, over what was there."""
    told = summary(run, promises)
    text = json.dumps(told, indent=2) + "\n"
    (folder / "summary.json").write_text(text, encoding="utf-8")
    (folder / "report.html").write_text(page(told, promises, draw(run)), encoding="utf-8")


def show(run: Evidence, promises: Sequence[Promise]) -> None:
    """The verdicts on stdout, what is broken with its evidence below."""
    console = Console(highlight=False)
    if console.is_terminal:
        table = Table(title=f"{run.scenario.name}: {len(run.answers)} requests")
        for column in ("verdict", "promise", "evidence"):
            table.add_column(column)
        for promise in promises:
            table.add_row(
                promise.verdict.value, promise.name, promise.evidence, style=_STYLES[promise.verdict]
            )
        console.print(table)
    else:
        for promise in promises:
            print(f"{promise.verdict.value:<11} {promise.name:<20} {promise.evidence}")
    for promise in promises:
        if promise.verdict is Verdict.BROKEN:
            text = "\n".join([f"BROKEN {promise.name}: {promise.says}; {promise.evidence}", *promise.cases])
            console.print(text, style="red", markup=False, soft_wrap=True)
