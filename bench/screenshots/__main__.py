"""`python -m bench.screenshots`: a fleet, a minute of load, and the pictures in docs/images."""

import argparse
import io
import re
import shutil
from pathlib import Path
from typing import Literal

from PIL import Image
from playwright.sync_api import ViewportSize, sync_playwright
from rich.console import Console

from bench.screenshots.fleet import fleet
from bench.screenshots.load import CONFIG, load
from picker_tools.top.admin import Admin
from picker_tools.top.feed import Feed, News
from picker_tools.top.frame import Place, frame
from picker_tools.top.pages import read
from picker_tools.top.views import VIEWS

CHROMIUM = "/usr/bin/chromium"
IMAGES = Path(__file__).parents[2] / "docs" / "images"
_COLOURS = 96  # enough for a page of few; a quarter of the bytes
_PATIENCE_MS = 120_000
_CELLS, _LINES, _ROWS = 80, 24, 14  # of picker top, as over SSH
_DESK: ViewportSize = {"width": 1280, "height": 1010}
_PHONE: ViewportSize = {"width": 390, "height": 1400}
_PALM: ViewportSize = {"width": 390, "height": 844}
PAGES: tuple[tuple[str, Literal["light", "dark"], ViewportSize], ...] = (
    ("light", "light", _DESK),
    ("dark", "dark", _DESK),
    ("phone", "light", _PHONE),
)


def main(seconds: float, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    sims = ("--sim-ttft", "300", "--sim-itl", "25", "--seed", "7")  # slow: a busy machine has a queue, too
    with fleet(CONFIG, *sims) as state, load(state["envoy"]), sync_playwright() as driver:
        admin = state["replicas"][0]["admin"]
        api = Admin(admin)
        chromium = driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--no-first-run"]
        )
        pages = []
        for name, scheme, size in PAGES:
            page = chromium.new_page(viewport=size, color_scheme=scheme)
            page.goto(admin)
            pages.append((page, folder / f"dashboard-{name}.png"))
        with Feed(api) as feed:
            pages[0][0].wait_for_timeout(seconds * 1000)  # so that the charts have something to show
            for page, file in pages:
                page.bring_to_front()  # one behind another may wait long for its next frame
                _save(page.screenshot(timeout=_PATIENCE_MS), file)
            page.set_viewport_size(_PALM)
            page.evaluate("location.hash = 'endpoints'")
            _save(page.screenshot(timeout=_PATIENCE_MS), folder / "dashboard-phone-endpoints.png")
            chromium.close()
            news = feed.news(read(api, "", _ROWS))
        for name in ("flows", "queue", "stock"):
            _top(news, name, folder / f"top-{name}.svg")


def _save(shot: bytes, file: Path) -> None:
    picture = Image.open(io.BytesIO(shot))
    picture.convert("RGB").quantize(_COLOURS, Image.Quantize.MAXCOVERAGE).save(file, optimize=True)
    print(f"{file.name}: {picture.width} × {picture.height}, {file.stat().st_size // 1024} KiB")


def _top(news: News, view: str, file: Path) -> None:
    place = Place([each.name for each in VIEWS].index(view))
    console = Console(record=True, width=_CELLS, height=_LINES, file=io.StringIO(), force_terminal=True)
    console.print(frame(news, place, url="", width=_CELLS, height=_LINES))
    # Its font would come from a server elsewhere; a reader has one that is as good.
    picture = re.sub(r"@font-face \{.*?\}", "", console.export_svg(title="picker top"), flags=re.DOTALL)
    file.write_text("\n".join(line.rstrip() for line in picture.splitlines() if line.strip()) + "\n")
    print(f"{file.name}: {file.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.screenshots", description=__doc__)
    parser.add_argument("--seconds", type=float, default=75.0, help="of load before the pictures")
    parser.add_argument("--folder", type=Path, default=IMAGES)
    arguments = parser.parse_args()
    if not shutil.which(CHROMIUM):
        raise SystemExit(f"{CHROMIUM} is missing: run .ci/packages")
    main(arguments.seconds, arguments.folder)
