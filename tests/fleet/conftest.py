"""Whole fleets for tests: `picker up` as its user runs it, and ways to look into it.

`fleet` starts fleets that are the test's own; `shared_fleet` hands the same one to every test that asks
for the same, one after the other, and keeps one alive at a time. Either way the end is checked: the decision
log keeps every promise, exit status 0 and no process left.
"""

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import pytest
import pytest_asyncio
from dashboard_page import Dashboard, browser, opened
from whole_fleet import Fleet, fleets, started, stop_all

Starter = Callable[..., Fleet]
Opener = Callable[..., AbstractAsyncContextManager[Dashboard]]


@pytest.fixture
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    """`fleet(*options, config=None, unaudited="", spawned=False)` starts a fleet of the test's own."""
    with fleets(tmp_path_factory) as start:
        yield start


@pytest.fixture(scope="session")
def shared_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    """`shared_fleet(*options, config=None, spawned=False)`: as `fleet`, but who asks for the same gets it.

    For tests that leave a fleet as they found it. A fixture that asks for it with parameters has module
    scope, so that tests are run in the order of the parameters and each fleet is started once.
    """
    running: dict[str, Fleet] = {}

    def start(*options: str, config: dict[str, Any] | None = None, spawned: bool = False) -> Fleet:
        key = json.dumps([options, config, spawned], sort_keys=True)
        if key not in running:
            others = list(running.values())
            running.clear()
            stop_all(others)
            folder = tmp_path_factory.mktemp("shared-fleet")
            running[key] = started(folder, options, config, spawned=spawned)
        return running[key]

    yield start
    stop_all(list(running.values()))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def dashboard() -> AsyncIterator[Opener]:
    """`dashboard(fleet, replica=0, **options)` opens a replica's dashboard in the module's one browser; the
    module's tests share a loop.
    """
    async with browser() as chromium:
        yield partial(opened, chromium)
