"""`pytest --workers N` runs the files of tests in N processes, forked once all tests are collected.

Processes that import and collect all tests for themselves would use 5 s of CPU each before their first test.
An idle worker takes the next file, so long files should come first.
"""

import multiprocessing
import os
from itertools import groupby
from multiprocessing.connection import Connection, wait
from typing import NamedTuple

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=1, help="run the files of tests in so many processes")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    count = session.config.getoption("workers")
    if count < 2 or session.testsfailed or session.config.option.collectonly:
        return None
    fork = multiprocessing.get_context("fork")
    files = [list(items) for _, items in groupby(session.items, key=lambda item: item.path)]
    workers: list[Connection] = []
    for _ in range(count):
        here, there = fork.Pipe()
        fork.Process(target=_work, args=(session, files, there, [*workers, here])).start()
        there.close()
        workers.append(here)
    try:
        _follow(session, workers, files)
    finally:
        for worker in workers:
            worker.close()  # after an interrupt; the worker ends its fixtures
    return True


def _follow(session: pytest.Session, workers: list[Connection], files: list[list[pytest.Item]]) -> None:
    """Give each idle worker the number of the next file, and report the tests' results, until all end."""
    hook, numbers, running = session.config.hook, iter(range(len(files))), dict[Connection, int | None]()
    while workers:
        for worker in wait(workers):
            try:
                data = worker.recv()
            except EOFError:
                workers.remove(worker)
                if (number := running.get(worker, 0)) is not None:
                    session.shouldfail = f"a worker ended in {files[number][0].location[0]}"
                continue
            if data is None:
                running[worker] = None if session.shouldfail else next(numbers, None)
                worker.send(running[worker])
            else:
                report = hook.pytest_report_from_serializable(config=session.config, data=data)
                hook.pytest_runtest_logreport(report=report)
    if session.shouldfail:
        raise session.Failed(session.shouldfail)


class _Reports(NamedTuple):
    """A plugin that sends a worker's reports to the process that started the worker."""

    config: pytest.Config
    to: Connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.to.send(self.config.hook.pytest_report_to_serializable(config=self.config, report=report))


def _work(
    session: pytest.Session, files: list[list[pytest.Item]], starter: Connection, others: list[Connection]
) -> None:
    for other in others:
        other.close()
    plugins = session.config.pluginmanager
    plugins.getplugin("terminalreporter")._tw._file = open(os.devnull, "w")  # noqa: SIM115
    plugins.register(_Reports(session.config, starter))
    capture = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()  # the process that started the worker owns the files of captured output
    capture.start_global_capturing()
    item = None
    try:
        starter.send(None)
        for number in iter(starter.recv, None):
            items = files[number]
            for item, following in zip(items, [*items[1:], session], strict=True):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if session.shouldfail:
                    break
            starter.send(None)
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        item = None  # nobody reads further reports
    finally:
        call = pytest.CallInfo.from_call(lambda: session._setupstate.teardown_exact(None), "teardown")
        if call.excinfo is not None and item is not None:  # a fixture of the session failed
            item.ihook.pytest_runtest_logreport(report=pytest.TestReport.from_item_and_call(item, call))
        capture.stop_global_capturing()  # a traceback of this process is shown
