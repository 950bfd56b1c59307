"""Fleets of the fault suite, and each case's row in the table of results."""

import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_case import FULL, Case
from proxy import Proxy, proxy
from redis_servers import Server
from whole_fleet import Fleet, fleets

_PROJECT = Path(__file__).parents[3]
_OUTCOME = pytest.StashKey[bool]()
# The files in `collect_ignore` run only in `make faults`: they keep `redis.silence` at its default, so a busy
# machine would look like a slow Redis. `make test` has shorter tests: tests/fleet/test_redis_loss.py,
# tests/faults/test_redis_connection.py, and the fault schedules that stall, delay and cut connections.
collect_ignore = [] if FULL else ["test_case_redis_away.py", "test_case_redis_slow.py"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    if report.when == "call":  # an interrupted case has no call report
        item.stash[_OUTCOME] = report.passed
    return report


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Choose Envoy's modes for a case. `make faults` runs the modes `lean` and `http`; the short form runs
    the modes in the case's mark `short_form`, or only `lean` without this mark.
    """
    if "mode" in metafunc.fixturenames:
        short = metafunc.definition.get_closest_marker("short_form")
        modes = short.args if short else ("lean",)
        if "FAULT_SUITE" in os.environ:
            modes = ("lean", "http")
        marks = [pytest.mark.timeout(1800)] if FULL else []
        metafunc.parametrize("mode", [pytest.param(mode, marks=marks) for mode in modes])


@pytest.fixture
def case(request: pytest.FixtureRequest, mode: str) -> Iterator[Case]:
    """The row of the present test in the table of results."""
    made = Case(request.node.name.removeprefix("test_"), mode)
    yield made
    if "FAULT_SUITE" in os.environ:
        made.record(request.node.stash.get(_OUTCOME, False) and made.ended_well)


@pytest.fixture
def faulty(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Fleet]]:
    """`faulty(*options, config, **more)` starts a fleet in the case's mode; `more` is as for `Fleet`.

    In mode `http` the fleet finds its limits (`Case.with_limits`). The fleet is stopped before the case's row
    is written: if the stop fails, the case fails.
    """
    try:
        with fleets(tmp_path_factory, "--debug-headers", "--mode", case.mode) as start:
            yield lambda *options, config, **more: start(*options, config=case.with_limits(config), **more)
    except BaseException:
        case.ended_well = False
        raise


@pytest.fixture
async def between(valkey: Server) -> AsyncIterator[Proxy]:
    """A proxy with fault injection in front of the test's own Valkey."""
    async with proxy(valkey.port) as it:
        yield it


class TwoVersions:
    """A copy of the folder `lua` beside the app: replicas that start after `change()` load a new library."""

    def __init__(self, folder: Path) -> None:
        (folder / "app").symlink_to(_PROJECT / "app")
        shutil.copytree(_PROJECT / "lua", folder / "lua")
        self._file = folder / "lua" / "admit.lua"
        self.environment = {"PYTHONPATH": str(folder / "app")}

    def change(self, comment: str) -> None:
        """Append `comment` to a script: the library gets another hash, and so other names of functions."""
        with self._file.open("a", encoding="utf-8") as script:
            script.write(f"-- {comment}\n")


@pytest.fixture
def two_versions(tmp_path: Path) -> TwoVersions:
    return TwoVersions(tmp_path)
