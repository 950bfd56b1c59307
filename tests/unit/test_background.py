"""A background task continues after a failure; the failure is logged once and counted each time."""

import asyncio
import logging

import pytest
from background import running, until

from picker_fleet import background
from picker_fleet.domain.errors import StartupError


@pytest.fixture
def failed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of failed tasks, in the order in which failures were counted."""
    monkeypatch.setattr(background, "_PAUSE_S", 0.001)
    names: list[str] = []
    background.count_failures(names.append)
    return names


def failing(*faults: Exception) -> background.Work:
    """A function that raises the next of `faults` in each call, and later runs until cancelled."""
    left = list(faults)

    async def work() -> None:
        await asyncio.sleep(0)
        if left:
            raise left.pop(0)
        await asyncio.Event().wait()

    return work


async def test_a_background_task_runs_again_after_each_failure(
    failed: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    faults = [ValueError("one"), ValueError("two"), ExceptionGroup("parts", [OverflowError("three")])]
    async with running(background.keep("sweep", failing(*faults))):
        await until(lambda: len(failed) == len(faults))
    assert failed == ["sweep"] * 3
    # The second failure came from the same source line, so only the first is logged.
    logged = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.exc_info[1] for record in logged if record.exc_info] == [faults[0], faults[2]]
    assert "sweep" in logged[0].getMessage()


async def test_a_background_task_that_fails_at_its_first_start_ends_the_replica(failed: list[str]) -> None:
    with pytest.raises(StartupError, match="no such file"):
        await background.keep("discovery", failing(StartupError("no such file")))
    assert failed == []


async def test_a_background_task_that_has_run_once_survives_a_startup_error(failed: list[str]) -> None:
    faults = ValueError("a bug"), StartupError("the file is gone for a moment")
    async with running(background.keep("discovery", failing(*faults))):
        await until(lambda: len(failed) == 2)


async def test_the_failure_of_a_task_that_nothing_awaits_is_counted(failed: list[str]) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(background.report_unhandled)
    loop.call_soon(lambda: 1 / 0)
    await until(lambda: failed == ["callbacks"])
