"""The dashboard in a real browser, for tests.

When a test closes a page, the page must have had no console error, no failed script, and no request except to
the replica's own admin API.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from admin_calls import event_stream

if TYPE_CHECKING:
    from playwright.async_api import Browser, ConsoleMessage, Locator, Page

CHROMIUM = "/usr/bin/chromium-headless-shell"  # needs half the CPU time of `chromium` for a page
_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE_MS = 30_000
_POLL_S = 0.1


@asynccontextmanager
async def browser() -> AsyncIterator["Browser"]:
    """A headless Chromium; .ci/packages installs it."""
    from playwright.async_api import async_playwright  # all test workers import this module

    assert shutil.which(CHROMIUM), f"{CHROMIUM} is missing: run .ci/packages"
    async with async_playwright() as driver:
        running = await driver.chromium.launch(executable_path=CHROMIUM, args=_ARGUMENTS)
        try:
            yield running
        finally:
            await running.close()


class Dashboard:
    """One open page. `check` ignores console messages that contain a text in `allowed`."""

    def __init__(self, page: "Page", url: str) -> None:
        self.page = page
        self.url = url
        self.requested: list[str] = []
        self.faults: list[str] = []
        self.allowed: list[str] = []
        page.on("request", lambda request: self.requested.append(request.url))
        page.on("pageerror", lambda fault: self.faults.append(str(fault)))
        page.on("console", self._on_console)
        page.set_default_timeout(PATIENCE_MS)

    def _on_console(self, message: "ConsoleMessage") -> None:
        if message.type in ("error", "warning"):
            self.faults.append(message.text)

    async def until(self, condition: str, argument: Any = None) -> None:
        """Wait until the JavaScript expression, which may take `argument`, is true.

        Polls from Python: Playwright's own wait evaluates text in the page, which the page's policy forbids.
        """
        async with asyncio.timeout(PATIENCE_MS / 1000):
            while True:
                if await self.page.evaluate(condition, argument):
                    return
                await asyncio.sleep(_POLL_S)

    async def text(self, selector: str) -> str:
        return (await self.page.locator(selector).first.inner_text()).strip()

    async def says(self, selector: str, part: str) -> None:
        """Wait until the element at `selector` contains the text `part`."""
        shown = "([selector, part]) => document.querySelector(selector)?.textContent.includes(part)"
        await self.until(shown, [selector, part])

    def row(self, table: str, part: str) -> "Locator":
        """The table row (flows, queue, …) that contains the text `part`."""
        return self.page.locator(f"#rows-{table} tr", has_text=part)

    async def give_token(self, token: str) -> None:
        await self.until("document.getElementById('ask-token').open")
        await self.page.fill("#token", token)
        await self.page.keyboard.press("Enter")

    async def confirm(self, yes: str) -> None:
        """Answer the open confirmation dialog with the button named `yes`."""
        await self.page.locator("dialog#confirm[open]").get_by_role("button", name=yes, exact=True).click()

    def check(self) -> None:
        foreign = [url for url in self.requested if not url.startswith((self.url, "data:"))]
        assert foreign == [], f"the page sent requests to other servers: {foreign}"
        rest = [fault for fault in self.faults if not any(part in fault for part in self.allowed)]
        assert rest == [], f"the page had errors: {rest}"


@asynccontextmanager
async def opened(
    chromium: "Browser", fleet: Any, replica: int = 0, *, tokens: Sequence[str] = (), **options: Any
) -> AsyncIterator[Dashboard]:
    """Open a replica's dashboard in its own window and wait for figures; `options` go to `new_page`.

    The dashboard asks for a token; the test enters `tokens` in order, and only the last is valid.
    """
    page = await chromium.new_page(**{"viewport": {"width": 1280, "height": 900}, **options})
    try:
        shown = Dashboard(page, f"{fleet.admin_url(replica)}/")
        await page.goto(shown.url)
        for number, token in enumerate(tokens):
            shown.allowed.append("401")
            await shown.says("#token-title", "not right" if number else "asks for a token")
            await shown.give_token(token)
        await shown.until("document.getElementById('main').dataset.at !== undefined")
        yield shown
        shown.check()
    finally:
        await page.close()


class Snapshots:
    """The snapshots, by time, of a replica's event stream; the dashboard gets the same snapshots."""

    def __init__(self) -> None:
        self.by_time: dict[float, dict[str, Any]] = {}
        self._arrived = asyncio.Condition()

    async def read(self, fleet: Any, replica: int) -> None:
        async with event_stream(fleet, replica) as events:
            async for name, data in events:
                if name == "snapshot":
                    async with self._arrived:
                        self.by_time[data["at"]] = data
                        self._arrived.notify_all()

    async def taken(self, at: float) -> dict[str, Any]:
        async with asyncio.timeout(20), self._arrived:
            await self._arrived.wait_for(lambda: at in self.by_time)
            return self.by_time[at]


@asynccontextmanager
async def listening(fleet: Any, replica: int = 0) -> AsyncIterator[Snapshots]:
    """Collect a replica's snapshots from now on."""
    snapshots = Snapshots()
    task = asyncio.create_task(snapshots.read(fleet, replica))
    try:
        yield snapshots
    finally:
        task.cancel()
        await asyncio.wait((task,), timeout=5)
