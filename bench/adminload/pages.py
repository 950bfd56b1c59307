"""Dashboards in a real browser, a process: `python -m bench.adminload.pages PRIORITY COUNT URL...`.

`open` on its input opens COUNT pages, at the URLs in turn, and is answered with `open` once all have figures.
`close` is answered with a line of JSON: for each page the milliseconds from each snapshot's appearance on it
to the next one's. PRIORITY is as bench.adminload.priority has it: operators' browsers are not on the fleet's
machines.
"""

import asyncio
import itertools
import json
import shutil
import sys

from playwright.async_api import Browser, Page, async_playwright

from bench.adminload.priority import take
from picker_tools.local_fleet.network import until

_CHROMIUM = "/usr/bin/chromium"
_ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")
_PATIENCE_S = 120.0
_WATCH = """() => {
  const main = document.getElementById("main");
  window.shownAt = [];
  new MutationObserver(() => window.shownAt.push(performance.now()))
    .observe(main, { attributes: true, attributeFilter: ["data-at"] });
}"""


async def _opened(chromium: Browser, url: str) -> Page:
    page = await chromium.new_page(viewport={"width": 1280, "height": 900})
    await page.goto(url, timeout=_PATIENCE_S * 1000)
    await page.evaluate(_WATCH)

    async def shown() -> bool | None:
        return await page.evaluate("window.shownAt.length > 0") or None

    if await until(shown, within_s=_PATIENCE_S) is None:
        raise SystemExit(f"{url} shows nothing, but: {await page.inner_text('#connection')}")
    return page


async def _closed(page: Page) -> list[float]:
    at_ms: list[float] = await page.evaluate("window.shownAt")
    await page.close()
    return [later - former for former, later in itertools.pairwise(at_ms)]


async def _main(count: int, urls: list[str]) -> None:
    if shutil.which(_CHROMIUM) is None:
        raise SystemExit(f"{_CHROMIUM} is missing: run .ci/packages")
    pages: list[Page] = []
    async with async_playwright() as driver:
        chromium = await driver.chromium.launch(executable_path=_CHROMIUM, args=list(_ARGUMENTS))
        while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
            if line == "open":
                pages = [await _opened(chromium, urls[each % len(urls)]) for each in range(count)]
                print("open", flush=True)
            else:
                print(json.dumps([await _closed(page) for page in pages]), flush=True)
        await chromium.close()


if __name__ == "__main__":
    take(sys.argv[1])
    asyncio.run(_main(int(sys.argv[2]), sys.argv[3:]))
