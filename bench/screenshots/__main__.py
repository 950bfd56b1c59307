"""`python -m bench.screenshots`: a fleet, a minute of load, and the pictures in docs/images."""

import argparse
import asyncio
import io
import shutil
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.async_api import Browser, async_playwright
from rich.console import Console

from app.top.admin import Admin
from app.top.feed import News
from app.top.frame import Place, frame
from bench.screenshots.fleet import fleet
from bench.screenshots.load import CONFIG, load

CHROMIUM = "/usr/bin/chromium"
IMAGES = Path(__file__).parents[2] / "docs" / "images"
_COLOURS = 96  # enough for a page of few; a quarter of the bytes
_PHONE = {"width": 390, "height": 1400}
_DESK = {"width": 1280, "height": 1010}


async def main(seconds: float, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    sims = ("--sim-ttft", "150", "--sim-itl", "12", "--seed", "7")
    async with fleet(CONFIG, *sims) as state, load(state["envoy"]):
        admins = [replica["admin"] for replica in state["replicas"]]
        async with async_playwright() as driver:
            chromium = await driver.chromium.launch(
                executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--no-first-run"]
            )
            try:
                async with asyncio.TaskGroup() as tasks:
                    for name, scheme, size in (
                        ("light", "light", _DESK),
                        ("dark", "dark", _DESK),
                        ("phone", "light", _PHONE),
                    ):
                        tasks.create_task(
                            _page(
                                chromium, admins[0], seconds, folder / f"dashboard-{name}.png", scheme, size
                            )
                        )
            finally:
                await chromium.close()
        await asyncio.to_thread(_top, admins[0], folder / "top.svg")


async def _page(
    chromium: Browser, admin: str, seconds: float, file: Path, scheme: Any, size: dict[str, int]
) -> None:
    page = await chromium.new_page(viewport=size, color_scheme=scheme)  # type: ignore[arg-type]
    await page.goto(admin)
    await page.wait_for_timeout(seconds * 1000)  # so that the charts have something to show
    picture = Image.open(io.BytesIO(await page.screenshot(full_page=False)))
    picture.convert("RGB").quantize(_COLOURS).save(file, optimize=True)
    print(f"{file.name}: {picture.width} × {picture.height}, {file.stat().st_size // 1024} KiB")


def _top(admin: str, file: Path) -> None:
    shots = Admin(admin).snapshots()
    shot = next(shots)
    shots.close()  # type: ignore[attr-defined]
    console = Console(record=True, width=100, height=24, file=io.StringIO(), force_terminal=True)
    console.print(frame(News(shot, 0.1, ""), Place(), url=admin, width=100, height=24))
    file.write_text(console.export_svg(title="picker top"))
    print(f"{file.name}: {file.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.screenshots", description=__doc__)
    parser.add_argument("--seconds", type=float, default=75.0, help="of load before the pictures")
    parser.add_argument("--folder", type=Path, default=IMAGES)
    arguments = parser.parse_args()
    if not shutil.which(CHROMIUM):
        raise SystemExit(f"{CHROMIUM} is missing: run .ci/packages")
    asyncio.run(main(arguments.seconds, arguments.folder))
