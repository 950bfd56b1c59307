"""A real browser shows the dashboard of a real fleet: the page agrees with the API, and its buttons work."""

from collections.abc import AsyncIterator
from typing import Any

import page_figures as figures
import pytest
import pytest_asyncio
from admin_calls import ask, waiting
from dashboard_page import Dashboard
from whole_fleet import suspended

SLOW = ("--endpoints", "2", "--sim-ttft", "300", "--sim-itl", "1")
CONFIG = {
    "objectives": [{"name": "gold", "criticality": "Critical"}],
    "fair_request_queue": {"flow_capacity": 500, "queue_ttl": "60s"},
    "request_queue_controller": {"watermark_per_backend": 2},
}
pytestmark = pytest.mark.asyncio(loop_scope="module")  # all tests use the browser's event loop
XSS = "<img src=x onerror=window.owned=1>"


async def switch(page: Dashboard, to: str, outcome: str) -> None:
    """Press the button that pauses or resumes dispatch, confirm, and wait for the page to say `outcome`."""
    await page.page.click("#pause")
    await page.confirm(to)
    await page.says("#toast", outcome)
    await page.says("#pause", "Resume dispatch" if to == "Pause" else "Pause dispatch")


@pytest.fixture(scope="module")
def here(shared_fleet: Any) -> Any:
    """A fleet for the dashboard; every test leaves it unchanged."""
    return shared_fleet(*SLOW, config=CONFIG)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def open_page(here: Any, dashboard: Any) -> AsyncIterator[Dashboard]:
    async with dashboard(here) as shown:
        yield shown


@pytest_asyncio.fixture(loop_scope="module")
async def page(here: Any, open_page: Dashboard) -> AsyncIterator[Dashboard]:
    """The fleet's dashboard, which tests share; after each test, dispatch must not be paused."""
    yield open_page
    open_page.check()
    assert not (await here.get("state"))["paused"]


async def test_the_page_of_one_replica_shows_the_queue_that_others_report(here: Any, dashboard: Any) -> None:
    async with waiting(here, *["gold"] * 3, "silver"), dashboard(here, replica=2) as page:
        await page.says("#why", "paused by an operator: 4 requests wait")
        listed = (await here.get("flows"))["flows"]
        assert sorted((flow["flow"], flow["queued"]) for flow in listed) == [("gold", 3), ("silver", 1)]
        shown = sorted(row[:3] for row in (await page.page.evaluate(figures.PAGE))["flows"])
        assert shown == [["gold", "Default", "3"], ["silver", "Default", "1"]]
        order = [each["id"] for each in (await here.get("queue", 1))["requests"]]
        await page.until("() => document.querySelectorAll('#rows-queue tr').length === 4")
        assert await page.page.locator("#rows-queue tr td:nth-child(2)").all_inner_texts() == order
        await page.page.fill("#queue-flow", "silver")
        await page.page.keyboard.press("Enter")
        await page.says("#count-queue", "1 request")
        assert await page.text("#rows-queue tr td:nth-child(3)") == "silver"
        await page.page.locator("#rows-queue tr button.link").click()
        await page.says("#lookup-answer h3", "queued")
        await page.says("#lookup-answer", "silver")


async def test_the_drain_and_undrain_buttons_change_an_endpoints_status(here: Any, page: Dashboard) -> None:
    address = here.state["endpoints"][0]["address"]
    for action, outcome in (("Drain", "gets no new requests"), ("Undrain", "takes requests again")):
        await page.page.get_by_role("button", name=f"{action} {address}", exact=True).click()
        await page.confirm(action)
        await page.says("#toast", outcome)
        assert await here.endpoint_status(address, 1) == ("drained" if action == "Drain" else "ready")
    await page.page.get_by_role("button", name=f"Drain {address}", exact=True).wait_for()


async def test_an_endpoints_limit_is_drawn_and_can_be_pinned_and_unpinned(here: Any, page: Dashboard) -> None:
    address = here.state["endpoints"][0]["address"]
    row = page.row("endpoints", address)
    await here.patch({"request_queue_controller": {"mode": "adaptive"}})
    await page.says("#count-endpoints", "the fleet finds their limits")
    await row.locator("path.bound.limit").wait_for(state="attached")
    await row.get_by_role("button", name=f"Pin {address}", exact=True).click()
    await page.page.fill("#confirm-number", "0")
    await page.confirm("Pin")  # the dialog stays open: a limit is at least 1
    await page.page.fill("#confirm-number", "3")
    await page.page.keyboard.press("Enter")
    await page.says("#toast", f"The limit of {address} is pinned")
    unpin = row.get_by_role("button", name=f"Unpin {address}", exact=True)
    await unpin.wait_for()
    shown = {each["address"]: each for each in await here.get("endpoints")}[address]
    assert (shown["limit"], shown["limit_reason"], shown["pinned"]) == (3, "pinned", True)
    assert await row.locator("td:nth-child(4), td:nth-child(6)").all_inner_texts() == ["3", "pinned"]
    await unpin.click()
    await page.confirm("Unpin")
    await page.says("#toast", f"The fleet finds the limit of {address} again")
    assert (await here.get("config", 1))["config"]["request_queue_controller"]["pinned"] == {}
    await here.patch({"request_queue_controller": {"mode": None, "pinned": None}})
    await page.until("() => !document.getElementById('count-endpoints').textContent.includes('limits')")


async def test_the_captions_count_waiting_requests_and_the_evict_button_evicts(
    here: Any, page: Dashboard
) -> None:
    async with waiting(here, "keep", "drop"):
        await page.says("#text-queued", "2 requests now")
        await page.says("#text-stock", "never above 4.4")
        assert await page.page.locator("#chart-stock path.line").count() == 1
        await page.row("queue", "drop").get_by_role("button", name="Evict").click()
        await page.confirm("Evict")
        await page.says("#toast", "has left the queue")
        await here.until_state(queued=1)
        await page.row("queue", "drop").wait_for(state="detached")
        (left,) = (await here.get("queue"))["requests"]
        await page.row("queue", "keep").get_by_role("button", name="Evict").click()
        await here.post(f"requests/{left['id']}/evict")
        # Another operator has evicted the request meanwhile: the page shows the API's text.
        page.allowed.append("404")
        await page.confirm("Evict")
        await page.says("#toast", "no such request waits")


async def test_dispatch_can_be_paused_and_resumed_by_keyboard_alone(here: Any, dashboard: Any) -> None:
    async with dashboard(here) as page:  # the focus begins at the top of a new page

        async def press(*names: str) -> None:
            for name in names:
                await page.page.keyboard.press(name)

        async def focused(what: str = "id || document.activeElement.className") -> str:
            return str(await page.page.evaluate(f"document.activeElement.{what}"))

        await press("Tab")
        assert await focused() == "skip"
        await press("Tab")
        assert await focused() == "pause"
        assert await page.page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        await press("Enter")
        await page.page.locator("dialog#confirm[open]").wait_for()
        assert await focused("textContent") == "Cancel"
        await press("Escape")
        assert await focused() == "pause"
        assert not (await here.get("state"))["paused"]
        await press("Enter", "Tab", "Enter")
        await page.says("#toast", "stopped dispatching")
        await page.until("document.activeElement.id === 'pause'")
        await page.says("#pause", "Resume dispatch")
        assert (await here.get("state", 1))["paused"]
        await press("Enter", "Tab", "Enter")
        await page.says("#toast", "dispatches again")
        button = page.page.locator("#rows-endpoints button").first
        await button.focus()
        at = await page.page.evaluate("document.getElementById('main').dataset.at")
        await page.until("(at) => document.getElementById('main').dataset.at !== at", at)
        assert await button.evaluate("(node) => node === document.activeElement")


CLICKS = """const [pause, question, yes] = ['pause', 'confirm', 'confirm-yes'].map(
  (id) => document.getElementById(id));"""


@pytest.mark.parametrize(
    ("clicks", "answer"),
    [
        ("pause.click(); question.close(); pause.click()", "Pause"),
        ("pause.click(); yes.click(); pause.click()", "Cancel"),
    ],
    ids=["unanswered", "confirmed"],
)
async def test_a_dialog_that_is_reopened_at_once_makes_the_confirmed_change_once(
    page: Dashboard, clicks: str, answer: str
) -> None:
    await page.page.evaluate(CLICKS + clicks)
    await page.confirm(answer)
    await page.says("#toast", "stopped dispatching")
    await page.says("#pause", "Resume dispatch")
    await switch(page, "Resume", "dispatches again")


async def test_removing_a_table_row_above_a_pressed_button_does_not_lose_the_click(page: Dashboard) -> None:
    answer = await page.page.evaluate(
        """async () => {
          const { Rows, el } = await import(`${location.origin}/static/dom.js`);
          const table = document.body.appendChild(el("table"));
          table.createTHead().insertRow().insertCell();
          const body = table.appendChild(el("tbody"));
          const rows = new Rows(body, (each) => each, () => {
            const tr = el("tr");
            tr.appendChild(el("td")).appendChild(el("button"));
            return { tr, update() {} };
          });
          rows.show(["a", "b", "c", "d"]);
          let moved = 0;
          const watch = new MutationObserver((all) => {
            for (const each of all) moved += each.addedNodes.length;
          });
          watch.observe(body, { childList: true });
          const kept = body.lastElementChild;
          rows.show(["b", "c", "d"]);
          await Promise.resolve();
          table.remove();
          return [moved, kept === body.lastElementChild, body.children.length];
        }"""
    )
    assert answer == [0, True, 3]


async def test_names_that_clients_choose_are_shown_as_text(here: Any, page: Dashboard) -> None:
    workload = "<script>window.owned=2</script>"
    async with waiting(here, XSS, workload=workload):
        await page.page.locator("#queue").scroll_into_view_if_needed()  # makes the page read the queue
        await page.row("flows", XSS).wait_for()
        await page.row("queue", XSS).wait_for()
        await page.says("#why", XSS)
        await page.says("#rows-workloads", workload)
        await page.says("#rows-decisions", "queued")
        await page.page.locator("#rows-queue button.link").click()
        await page.says("#lookup-answer", XSS)
        await page.page.locator("#rows-queue button", has_text="Evict").click()
        await page.says("#confirm-text", XSS)
        await page.confirm("Cancel")
        assert await page.page.locator("img, main script").count() == 0
        assert await page.page.evaluate("window.owned") is None


async def test_a_narrow_screen_needs_no_horizontal_scrolling(here: Any, dashboard: Any) -> None:
    long = "a-flow-with-a-name-that-no-phone-has-room-for-" * 4
    for width in (390, 1280):
        size = {"width": width, "height": 844}
        async with waiting(here, long, "short"), dashboard(here, viewport=size) as page:
            await page.row("queue", "short").wait_for()
            await page.row("flows", "short").wait_for()
            await page.page.locator("#rows-queue button.link").first.click()
            await page.says("#lookup-answer h3", "queued")
            assert await page.page.evaluate("document.documentElement.scrollWidth") <= width
            for button in await page.page.locator("button:visible").all():
                box = await button.bounding_box()
                assert 0 <= box["x"] <= width - box["width"]


async def test_the_first_fifty_flows_are_shown_and_the_rest_counted(here: Any, dashboard: Any) -> None:
    names = [f"flow-{number}" for number in range(60)]
    async with waiting(here, *names), dashboard(here) as page:
        await page.says("#count-flows", "the first 50 of 60")
        assert await page.page.locator("#rows-flows tr").count() == 50
        await page.says("#tile-queued", "60")
        await page.says("#count-queue", "60 requests, 1 to")
        seen: list[str] = []
        while True:
            seen += await page.page.locator("#rows-queue tr td:nth-child(2)").all_inner_texts()
            if await page.page.locator("#queue-next").is_disabled():
                break
            await page.page.click("#queue-next")
            await page.says("#count-queue", f" {len(seen) + 1} to")
        assert len(seen) == 60
        assert len(set(seen)) == 60


async def test_the_page_says_stale_while_its_replica_is_suspended(here: Any, page: Dashboard) -> None:
    page.allowed.append("status of 503")  # a read in flight when the replica stops gets 503
    await page.says("#connection", "live")
    with suspended(here.replica(0)):
        await page.says("#connection", "stale since")
    await page.says("#connection", "live")


async def test_a_page_reconnects_when_its_replica_restarts_at_its_address(here: Any, page: Dashboard) -> None:
    # The browser's error depends on when the kill comes. A new replica answers 503 until it reaches Redis.
    page.allowed += ["net::ERR_", "status of 503"]
    before = await page.text("#replica")
    here.replica(0).kill()
    await page.until("(before) => document.getElementById('replica').textContent !== before", before)
    await page.says("#connection", "live")


async def test_the_page_shows_an_alarm_while_redis_is_suspended(here: Any, page: Dashboard) -> None:
    page.allowed.append("status of 503")  # reads of the queue get 503 while Redis is down
    with suspended(here.child("valkey-server")):
        await page.until("document.getElementById('why').dataset.level === 'bad'")
    await page.until("document.getElementById('why').dataset.level === 'calm'")
    await page.says("#connection", "live")


async def test_new_decisions_appear_live_unless_the_list_is_put_on_hold(here: Any, page: Dashboard) -> None:
    async with here.client() as client:
        assert (await ask(client, "seen")).status_code == 200
        await page.says("#rows-decisions", "seen")
        await page.page.click("#decisions-hold")
        assert (await ask(client, "unseen")).status_code == 200
        await page.until(
            "() => /on hold, [1-9]/.test(document.getElementById('count-decisions').textContent)"
        )
        assert "unseen" not in await page.text("#rows-decisions")
        await page.page.click("#decisions-hold")
        await page.says("#rows-decisions", "unseen")


@pytest.fixture(scope="module")
def guarded(shared_fleet: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A fleet with tokens for the admin API and no decision log; its start stops the fleet `here`."""
    file = tmp_path_factory.mktemp("tokens") / "alice"
    file.write_text("may-look")
    admin = {"token": "open-sesame", "tokens": [{"file": str(file), "role": "viewer"}]}
    config = {"admin": admin, "decision_log": {"enabled": False}}
    return shared_fleet(*SLOW, "--replicas", "1", config=config)


async def test_the_page_asks_for_a_token_again_after_an_invalid_one_and_after_a_change_by_a_viewer(
    guarded: Any, dashboard: Any
) -> None:
    async with dashboard(guarded, tokens=("wrong", "may-look")) as page:
        page.allowed.append("403")
        await page.page.click("#pause")
        await page.confirm("Pause")
        await page.give_token("open-sesame")
        await page.says("#toast", "stopped dispatching")
        await page.says("#pause", "Resume dispatch")
        await switch(page, "Resume", "dispatches again")
        assert await page.page.evaluate("Object.values(localStorage).join() + document.cookie") == ""


async def test_without_a_decision_log_the_page_says_how_to_enable_it(guarded: Any, dashboard: Any) -> None:
    async with dashboard(guarded, tokens=("may-look",), color_scheme="dark") as page:
        await page.says("#none-decisions", "decision_log: {enabled: true}")
        theme = "document.documentElement.dataset.theme"
        assert await page.page.evaluate(theme) == "dark"
        await page.page.click("#theme")
        assert await page.page.evaluate(theme) == "light"
        await page.page.reload()
        await page.until(f"{theme} === 'light'")
