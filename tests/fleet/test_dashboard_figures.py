"""Under load, every figure on the dashboard equals the admin API's figure at the same moment."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import page_figures as figures
import pytest
from admin_calls import ask
from dashboard_page import listening
from fleet_load import at_rest
from page_reading import UNREADABLE

SLOW = ("--no-restart", "--endpoints", "3", "--sim-ttft", "300", "--sim-itl", "1")
CONFIG = {
    "models": [{"name": "llama"}, {"name": "poet"}],  # `poet` is an adapter of each simulator
    "objectives": [
        {"name": "gold", "criticality": "Critical"},
        {"name": "heavy", "criticality": "Default", "weight": 3},
        {"name": "batch", "criticality": "Sheddable"},
    ],
    "fair_request_queue": {
        "band_policy": "weighted",
        "flow_capacity": 500,
        "ordering": "workload-aware",
        "queue_ttl": "60s",
        "starvation_after": "2s",
    },
    "request_queue_controller": {"initial_per_backend": 2, "max_per_backend": 2},  # low, so requests wait
    "scheduling": {"scorers": [{"name": "queue-depth", "weight": 1}, {"name": "latency", "weight": 1}]},
}
pytestmark = [
    pytest.mark.timeout(300),  # in seconds; fleet, browser and load share the machine
    pytest.mark.asyncio(loop_scope="module"),  # tests use the browser's event loop
]
FLOWS = (
    ("one", "gold", "llama"),
    ("two", "heavy", "poet"),
    ("three", "", "llama"),
    ("four", "batch", "llama"),
)
CLIENTS = 5  # number of clients of each flow
LOOKS = 3
WITHIN_S = 90
ANOTHER = "(at) => Number(document.getElementById('main').dataset.at) !== at"
QUEUE = """() => [[...document.querySelectorAll('#rows-queue tr')].map(
  (row) => [...row.cells].map((cell) => cell.textContent)),
  document.getElementById('order-queue').textContent]"""


@pytest.fixture(scope="module")
def here(shared_fleet: Any) -> Any:
    return shared_fleet(*SLOW, config=CONFIG)


@asynccontextmanager
async def load(fleet: Any) -> AsyncIterator[None]:
    """Clients of four flows send a request after each answer; the block's end waits for all answers."""
    done = asyncio.Event()

    async def client_of(http: httpx.AsyncClient, flow: str, objective: str, model: str) -> None:
        about = {"objective": objective, "workload": f"of-{flow}", "criticality": 3}
        while not done.is_set():
            assert (await ask(http, flow, prompt=flow, model=model, **about)).status_code == 200

    async with fleet.client() as http, asyncio.TaskGroup() as tasks:
        for flow in FLOWS * CLIENTS:
            tasks.create_task(client_of(http, *flow))
        try:
            yield
        finally:
            done.set()
    await at_rest(fleet)


@asynccontextmanager
async def drained(fleet: Any, address: str) -> AsyncIterator[None]:
    """Drain this endpoint within the `with` block."""
    await fleet.post(f"endpoints/{address}/drain")
    try:
        yield
    finally:
        await fleet.post(f"endpoints/{address}/undrain")


def lacking(shot: dict[str, Any]) -> set[str]:
    """The names of figures that the snapshot `shot` lacks or has only at their default value."""
    there = {
        "a wait": figures.oldest_s(shot) is not None,
        "overdue": shot["state"]["overdue"] > 0,
        "a share": any(each["share"] for each in shot["flows"]),
        "a fair share": any(each["fair_share"] not in (None, 1) for each in shot["flows"]),
        "a weight": any(each["weight"] == 3 for each in shot["flows"]),
        "a workload's rate": any(each["rate"] > 0 for each in shot["workloads"]),
        "a workload's wait": any(each["average_wait_s"] > 0 for each in shot["workloads"]),
        "a score": any(each["score"] for each in shot["workloads"]),
        "KV": any(each["kv_utilisation"] is not None for each in shot["endpoints"]),
        "adapters": any(each["adapters"] for each in shot["endpoints"]),
        "a limit's reason": any(each["limit_reason"] for each in shot["endpoints"]),
        "latency": any(each.get("latency_std_s") for each in shot["endpoints"]),
        "a drained endpoint": any(each["status"] == "drained" for each in shot["endpoints"]),
        "a replica's waiting requests": any(each["waiting"] for each in shot["replicas"]),
    }
    return {name for name, has in there.items() if not has}


async def test_every_figure_on_the_page_equals_the_api_snapshot_of_the_same_time(
    here: Any, dashboard: Any
) -> None:
    address = here.state["endpoints"][2]["address"]
    async with load(here), drained(here, address), listening(here) as snapshots, dashboard(here) as page:
        seen: set[float] = set()
        missing: set[str] | None = None
        async with asyncio.timeout(WITHIN_S):
            while len(seen) < LOOKS or missing:  # repeat until each kind of figure has been compared
                shown = await page.page.evaluate(figures.PAGE)
                if shown["at"] in seen:
                    await page.until(ANOTHER, shown["at"])
                    continue
                seen.add(shown["at"])
                shot = await snapshots.taken(shown["at"])
                figures.all_of(shown, shot)
                assert len(shown["replicas"]) == 3
                missing = lacking(shot) if missing is None else missing & lacking(shot)
        await page.says("#connection", "live")
        await page.until("/requests? waits?:/.test(document.getElementById('why').textContent)")


async def test_every_figure_in_the_queue_table_equals_an_api_answer(here: Any, dashboard: Any) -> None:
    async with load(here), dashboard(here) as page:
        answers: list[Any] = []  # the API's answers to this page's reads of the queue
        page.page.on("response", lambda each: "/api/v1/queue" in each.url and answers.append(each))
        await page.page.locator("#queue").scroll_into_view_if_needed()
        seen: set[str] = set()
        async with asyncio.timeout(WITHIN_S):
            while len(seen) < LOOKS:
                rows, order = await page.page.evaluate(QUEUE)
                if not rows or str(rows) in seen:
                    await asyncio.sleep(0.05)
                    continue
                if any([figures.queue(rows, await answer.json()) for answer in list(answers)]):
                    seen.add(str(rows))
                    assert "dispatch order" in order.lower()


async def test_every_figure_can_be_read_on_a_phone_in_both_colour_schemes(here: Any, dashboard: Any) -> None:
    phone = {"viewport": {"width": 390, "height": 844}, "color_scheme": "light"}
    async with load(here), listening(here) as snapshots, dashboard(here, **phone) as page:
        await page.until(
            "() => ['flows', 'workloads'].every((id) => document.querySelector(`#rows-${id} tr`))"
        )
        for theme in ("light", "dark"):
            await page.until(f"document.documentElement.dataset.theme === '{theme}'")
            found = await page.page.evaluate(UNREADABLE, ["endpoints", "workloads", "replicas", "flows"])
            assert found["faults"] == []
            assert found["cells"] >= 3 * 10 + 1 * 5 + 3 * 7 + 1 * 8
            assert found["width"] <= 390
            await page.page.emulate_media(color_scheme="dark")
        shown = await page.page.evaluate(figures.PAGE)
        figures.all_of(shown, await snapshots.taken(shown["at"]))
