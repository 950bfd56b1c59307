"""Whole fleets for tests, run by `picker up` as users run it, and fixtures to inspect the fleets.

`fleet` starts fleets for one test; `shared_fleet` gives the same fleet to all tests that pass the same
arguments, and keeps one fleet alive at a time. When a fleet ends, its decision log must pass the audit, its
exit status must be 0, and no process may be left.
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
    """`fleet(*options, config=None, unaudited="", spawned=False)` starts a fleet for one test."""
    with fleets(tmp_path_factory) as start:
        yield start


@pytest.fixture(scope="session")
def shared_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    """`shared_fleet(*options, config=None, spawned=False)` gives one fleet to all equal calls.

    Use `shared_fleet` in tests that leave the fleet unchanged. A fixture that passes parameters to
    `shared_fleet` has module scope, so that pytest groups tests by parameter and each fleet starts once.
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
    """`dashboard(fleet, replica=0, **options)` opens a replica's dashboard in the module's only browser; the
    module's tests share an event loop.
    """
    async with browser() as chromium:
        yield partial(opened, chromium)
