"""`picker top` with a real fleet, in a real terminal, and with a fake admin API whose figures tests set."""

import argparse
import asyncio
import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import pytest_asyncio
from admin_calls import waiting
from textual.widgets import DataTable, Sparkline

from picker_fleet.admin import models
from picker_fleet.admin.examples import EXAMPLES
from picker_tools.local_fleet.processes import picker_command
from picker_tools.top import client
from picker_tools.top.client import AdminClient, AdminError
from picker_tools.top.command import Top, number, percent, run, seconds

HOSTILE = "\x1b[2J\x07[red]gold\u202e\u2028"
ESCAPED = "\\u001b[2J\\u0007[red]gold\\u202e\\u2028"
ENTRY = dict.fromkeys(("request", "flow", "band", "workload", "endpoint", "by"))
ENTRY |= {"at": 0.0, "stock": 1.0, "queued": 0, "note": ""}


class Screen:
    def __init__(self, pilot: Any) -> None:
        self.app, self.press = pilot.app, pilot.press

    async def shows(self, *parts: str, but: str = "\0") -> str:
        """Wait until the screen contains all `parts` and not `but`; return the screen's text."""
        for _ in range(300):
            text = "\n".join(line.text for line in self.app.screen._compositor.render_strips())
            if all(part in text for part in parts) and but not in text:
                return text
            await asyncio.sleep(0.1)
        pytest.fail(f"{parts} is not on the screen, or {but!r} is: {text}")

    async def answers(self, key: str, question: str, answer: str) -> None:
        await self.press(key)
        await self.shows(question)
        await self.press(answer)


@asynccontextmanager
async def screen(url: str, *, token: str = "", size: tuple[int, int] = (200, 40)) -> AsyncIterator[Screen]:
    async with Top(AdminClient(url, token)).run_test(size=size, notifications=True) as pilot:
        yield Screen(pilot)


def example(model: Any, **other: Any) -> Any:
    return {**EXAMPLES[model.__name__], **other}


class Api:
    """A fake admin API: serves the documented examples and a flow with a hostile name."""

    url = "http://127.0.0.1:0"

    def __init__(self) -> None:
        self.queue = [example(models.Queued), example(models.Queued, id=f"a/{HOSTILE}", flow=HOSTILE)]
        self.snapshot = {
            "at": 1_700_000_000.0, "state": example(models.State), "endpoints": [example(models.Endpoint)],
            "flows": [example(models.Flow), example(models.Flow, flow=HOSTILE, queued=90)],
            "flows_total": 1000, "workloads": [example(models.Workload)], "workloads_total": 1,
            "replicas": [example(models.Replica), example(models.Replica, id="r-2", live=False)],
        }  # fmt: skip
        self.decisions: list[dict[str, Any]] = []
        self.refusals: dict[str, tuple[int, str]] = {}  # the answer's status and body, by path
        self.changes: list[tuple[str, str]] = []  # path and token of each POST call
        self.silent = False
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", int(self.url.rpartition(":")[2]))
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        self._server.close()
        for each in self._writers:
            each.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            request = (await reader.readuntil(b"\r\n\r\n")).decode()
            path = request.split(" ")[1].removeprefix("/api/v1/").partition("?")[0]
            if request.startswith("POST"):
                self.changes.append((path, request.partition("authorization: ")[2].partition("\r\n")[0]))
            page = json.dumps({"requests": self.queue, "total": 5000, "cursor": None, "order": ""})
            status, body = self.refusals.get(path, (200, page))
            writer.write(f"HTTP/1.1 {status} X\r\nconnection: close\r\n\r\n".encode())
            while path == "events" and status == 200:
                decisions = {"entries": self.decisions, "skipped": 0}  # repeated, as after a reconnect
                for name, data in (("snapshot", self.snapshot), ("decisions", decisions)):
                    text = json.dumps(data, ensure_ascii=False)  # the real API does not escape U+2028 either
                    writer.write(b"" if self.silent else f"event: {name}\ndata: {text}\n\n".encode())
                await writer.drain()
                await asyncio.sleep(0.4)
            writer.write(body.encode())
        writer.close()


@pytest_asyncio.fixture
async def api() -> AsyncIterator[Api]:
    served = Api()
    await served.start()
    yield served
    await served.stop()


def problem(status: int, detail: str) -> tuple[int, str]:
    return status, json.dumps(example(models.Problem, status=status, detail=detail))


def column(top: Screen, view: str, at: int) -> list[str]:
    table = top.app.query_one(f"#{view} DataTable", DataTable)
    return [str(table.get_row_at(row)[at]) for row in range(table.row_count)]


async def test_keys_drain_pause_and_evict_and_a_killed_replica_makes_the_screen_stale(fleet: Any) -> None:
    here = fleet("--replicas", "2", "--endpoints", "2", config={"fair_request_queue": {"queue_ttl": "60s"}})
    async with screen(here.admin_url()) as top:
        address = (await here.get("endpoints"))[0]["address"]
        await top.press("3")
        await top.shows(address, "2 of 2 ready", "2 of 2 live")
        await top.answers("d", f"Send nothing new to {address}?", "y")
        await top.shows("drained")
        assert await here.endpoint_status(address, 1) == "drained"
        await top.answers("d", f"Give requests to {address} again?", "y")
        await top.shows("2 of 2 ready")
        await top.answers("p", "Pause dispatch", "y")
        await top.shows("PAUSED")
        await top.answers("p", "Resume dispatch?", "y")
        await top.shows("live", but="PAUSED")
        async with waiting(here, *(f"flow-{number:02}" for number in range(30))):
            second = (await here.get("queue"))["requests"][1]
            await top.press("5")
            await top.shows("30 of 30", "flow-29", second["id"])
            await top.press("down")
            await top.answers("e", f"Evict {second['id']} of {second['flow']}?", "y")
            await top.shows("29 of 29", "done: ")
            assert (await here.get("state", 1))["queued"] == 29
            await top.press("6")
            await top.shows("evicted")
        here.replica(0).kill()
        await top.shows("STALE since", here.admin_url())
        await top.shows("live", but="STALE")


@pytest.mark.parametrize("way", [b"q", b"\x03", signal.SIGTERM])
def test_the_terminal_is_restored_on_exit(way: bytes | signal.Signals) -> None:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    before, seen = termios.tcgetattr(slave), b""
    command = ["env", "TERM=xterm-256color", *picker_command("top", "--admin", "127.0.0.1:1")]
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave) as process:
        while b"does not answer" not in seen:
            seen += os.read(master, 65536)
        if isinstance(way, bytes):
            os.write(master, way)
        else:
            process.send_signal(way)
        while b"\x1b[?1049l" not in seen:  # this sequence restores the terminal's main screen
            seen += os.read(master, 65536)
        assert process.wait(15) == (0 if isinstance(way, bytes) else 143)
    assert termios.tcgetattr(slave) == before
    os.close(master)
    os.close(slave)


async def test_the_eviction_of_a_hostile_id_is_sent_with_the_token_only_after_confirmation(api: Api) -> None:
    async with screen(api.url, token="secret") as top:
        await top.press("5")
        await top.shows(f"a/{ESCAPED}")
        await top.press("down")
        await top.answers("e", f"Evict a/{ESCAPED} of {ESCAPED}?", "n")
        await top.shows("q quit", but="Evict a/")
        path = "requests/a%2F%1B%5B2J%07%5Bred%5Dgold%E2%80%AE%E2%80%A8/evict"
        api.refusals[path] = problem(401, "[b]the token is needed")
        assert api.changes == []
        await top.answers("e", "Evict a/", "y")
        await top.shows("401", "[b]the token is needed", "PICKER_ADMIN__TOKEN")
        assert api.changes == [(path, "Bearer secret")]


async def test_each_view_shows_its_rows_and_client_names_are_escaped(api: Api) -> None:
    async with screen(api.url) as top:
        for key, parts in (
            ("1", ("74%", "75%", ESCAPED, "in turn", "2 of 1 000")),
            ("2", ("chat", "1 290", "800 ms", "1 of 1")),
            ("3", ("10.0.0.1:8000", "down", "36", "31%", "1.9 s", "sql", "at 40 in flight, 41.5 s ago")),
            ("4", ("r-3f9c", "live", "silent", "http://node-1:8081")),
            ("5", ("4f1d-9c", f"a/{ESCAPED}", "26.6 s", "0.25", "r-77a0", "2 of 5 000")),
            ("7", ("in flight 7 to 7 of 8.8, lower chart: waiting, at most 16",)),
        ):
            await top.press(key)
            text = await top.shows("7 of 8.8 requests", "Default 3", "oldest 4.0 s", "0 of 1 ready", *parts)
            assert not {"\x1b", "\x07", "\u202e", "\u2028"} & set(text)
        assert list(top.app.query(Sparkline).first().data)[:3] == [0.0, 8.8, 7]


async def test_a_narrow_terminal_shows_every_view_a_pause_and_an_outage(api: Api) -> None:
    api.snapshot["state"] |= {"paused": True, "degraded": True}
    async with screen(api.url, size=(60, 20)) as top:
        for key in "1234567":
            await top.press(key)
            await top.shows("PAUSED", "WITHOUT REDIS", "2 live", "q quit")


async def test_an_unreachable_api_is_named_until_it_answers(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_SILENCE_S", 1.0)
    await api.stop()
    async with screen(api.url) as top:
        await top.shows(f"{api.url} does not answer")
        await api.start()
        await top.shows("live", but="does not answer")
        await api.stop()
        await top.shows("STALE since", "does not answer")
        api.silent = True
        await api.start()
        await top.shows("STALE since", "ReadTimeout")
        api.silent = False
        await top.shows("live", but="STALE")
        api.refusals["queue"] = problem(503, "no Redis")
        await top.press("5")
        await top.shows("STALE since", "503, no Redis")
        api.refusals["events"] = (404, "<html>")
        await top.shows("this is not a picker's admin API")


async def test_the_cursor_stays_on_its_row_and_the_key_s_changes_the_order(api: Api) -> None:
    async with screen(api.url) as top:
        await top.press("5")
        await top.shows("4f1d-9c")
        api.queue.insert(0, example(models.Queued, id="newer"))
        await top.shows("newer")
        await top.answers("e", "Evict 4f1d-9c of gold?", "n")
        await top.press("1", *"sss")
        await top.shows("sorted by Waits")
        assert column(top, "flows", 2) == ["90", "12"]
        await top.press("3")
        assert [column(top, "endpoints", at) for at in (1, 5, 6)] == [["decode, prefill"], ["1"], ["4"]]


async def test_the_log_shows_new_decisions_only_while_the_cursor_is_on_the_first_row(api: Api) -> None:
    async with screen(api.url) as top:
        await top.press("6")
        await top.shows("decision_log.enabled turns it on")
        api.decisions = [{**ENTRY, "seq": 1, "event": "queued"}, {**ENTRY, "seq": 2, "event": "placed"}]
        await top.shows("2 of 2")
        assert column(top, "log", 1) == ["placed", "queued"]
        await top.press("down")
        api.decisions = [{**ENTRY, "seq": 3, "event": "expired"}]
        await top.shows("paused; move", but="expired")
        await top.press("up")
        await top.shows("expired", "3 of 3")


def test_picker_top_without_a_terminal_ends_with_a_clear_error() -> None:
    with pytest.raises(AdminError, match="needs a terminal"):
        run(argparse.Namespace(admin="http://127.0.0.1:1", pool=None))


def test_numbers_durations_and_percentages_are_formatted() -> None:
    assert [number(value) for value in (7.25, 12400.0, None, float("nan"))] == ["7.25", "12 400", "-", "-"]
    text = [seconds(value) for value in (0.04, 59.97, 3599.7, 11400, -2, None)]
    assert text == ["40 ms", "1 m 00 s", "1 h 00 m", "3 h 10 m", "-2.0 s", "-"]
    assert [percent(value) for value in (0.5, 0.064, None)] == ["50%", "6.4%", "-"]
