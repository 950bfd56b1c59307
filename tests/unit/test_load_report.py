"""The report of `picker load`: `summary.json` and a self-contained page."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from load_runs import answer, refusal, run, sample

from picker_tools.load.checks import check_promises
from picker_tools.load.report import show, write
from picker_tools.load.result import FaultsInjected, RunResult
from picker_tools.load.scenarios import SCENARIOS

FAULTS = FaultsInjected(kills=[(3.0, "replica-1")], outages=[(5.0, 8.0)])


class Tags(HTMLParser):
    """The tags of a page; fails if one is not closed in order."""

    VOID = frozenset({"meta", "br", "path", "use", "rect"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.all: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.all.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.all.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def written(evidence: RunResult, folder: Path) -> tuple[dict[str, object], str]:
    write(evidence, check_promises(evidence), folder)
    summary: dict[str, object] = json.loads((folder / "summary.json").read_text())
    return summary, (folder / "report.html").read_text()


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_page_is_self_contained(name: str, tmp_path: Path) -> None:
    _, page = written(run(name, faults_injected=FAULTS), tmp_path)
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert tags.all.count("svg") >= 4
    assert not {"script", "link", "img", "image", "iframe"} & set(tags.all)
    assert not re.search(r'(?:href|src)="(?!#)', page)
    assert "url(" not in re.sub(r"url\(#", "", page)
    # It follows the reader's choice of light or dark, its pictures too.
    assert "prefers-color-scheme: dark" in page
    assert "currentColor" in page
    assert not re.search("#010203|#040506", page)
    # It is small enough to send.
    assert len(page) < 300_000


def test_a_broken_promise_is_reported_with_its_evidence(tmp_path: Path) -> None:
    answers = (refusal("client-1", reason="<b>full</b>"), refusal("client-2"), *run().answers[2:])
    evidence = run(answers=answers)
    summary, page = written(evidence, tmp_path)
    # The markup is shown as text.
    tags = Tags()
    tags.feed(page)
    text = " ".join(tags.texts)
    assert "1 promise broken" in text
    assert "client-1 #0: sent at 0.000 s, 503 <b>full</b>" in text
    assert "<b>full</b>" not in page
    assert summary["verdict"] == "broken"
    promises = {each["name"]: each for each in summary["promises"]}  # type: ignore[attr-defined]
    assert promises["no-errors"]["verdict"] == "broken"
    assert len(promises["no-errors"]["cases"]) == 2
    assert summary["counts"]["ends"]["503 rejected-saturated"] == 1  # type: ignore[index]


def test_the_summary_has_what_is_needed_to_repeat_the_run(tmp_path: Path) -> None:
    summary, _ = written(run("noisy-neighbour", faults_injected=FAULTS), tmp_path)
    assert summary["scenario"] == "noisy-neighbour"
    assert summary["seed"] == 1
    assert summary["parameters"]["rates_per_s"] == {"noisy": 2.0, "quiet": 2.0}  # type: ignore[index]
    assert summary["versions"]["picker-fleet"]  # type: ignore[index]
    quiet = summary["sources"]["quiet"]  # type: ignore[index]
    assert quiet["sent"] == quiet["served"] == 40
    assert quiet["ttft_s"] == {"p50": 0.1, "p90": 0.1, "p95": 0.1, "p99": 0.1, "max": 0.1}
    assert summary["shares"]["quiet"]["served"] == pytest.approx(0.5)  # type: ignore[index]
    assert summary["faults"]["kills"] == [{"at_s": 3.0, "replica": "replica-1"}]  # type: ignore[index]
    assert summary["faults"]["redis_away"] == [{"from_s": 5.0, "to_s": 8.0}]  # type: ignore[index]


@pytest.mark.parametrize(
    "evidence",
    [
        run(answers=(), samples=(), rest=None),
        run(answers=(answer("client-1", status=0, first_s=None, head_s=None, fault="no connection"),)),
        replace(run(samples=(sample(0.1),)), interrupted=True),
    ],
    ids=["nothing", "one failure", "one sample"],
)
def test_every_run_has_a_report(evidence: RunResult, tmp_path: Path) -> None:
    summary, page = written(evidence, tmp_path)
    assert summary["counts"]["sent"] == evidence.sent  # type: ignore[index]
    assert ("INTERRUPTED" in page) is evidence.interrupted


def test_the_terminal_shows_every_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    evidence = run(rest=None)
    show(evidence, check_promises(evidence))
    # One line a promise, and one that says what is broken and why.
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("held")][:2] == [
        "no-errors",
        "nothing-expires",
    ]
    assert any(line.startswith("broken") and "at-rest" in line for line in lines)
    assert any(line.startswith("BROKEN at-rest: after the load every count is exactly 0") for line in lines)
