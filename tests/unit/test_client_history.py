"""`check_history` finds each fault, and a client records what its answer lacks."""

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from queue_simulator import Request, raw_entry
from tables import cases

from picker_tools.load import client_history
from picker_tools.load.client_history import ClientRecord, ClientRequest, check_history, send_request

ANSWER = json.dumps({"usage": {"completion_tokens": 2}}).encode()
HEAD = b"HTTP/1.1 200 OK\r\nx-picker-request-id: r1\r\n"
EVENT = b'data: {"choices":[{"text":"a"}]}\n\n'
DONE = b"data: [DONE]\n\n"


def entry(seq: int, event: str, request: str = "r1", *, stock: float = 0) -> dict[str, str]:
    """One entry of a decision log."""
    r = Request(request, "f", arrived=1_000_000, deadline_ms=9_000, endpoint="10.0.0.1:8000")
    numbers = {"v": 0, "queued": 0, "upper": 4, "lower": 4}
    numbers |= {"seq": seq, "time_us": 1_000_000 + seq, "stock": stock}
    return raw_entry(event, r, numbers, {"tag": "", "by": "", "note": ""})


def lifecycle_log(*ends: str) -> list[Mapping[str, str]]:
    """A log in which r1 is admitted and ends once for each of `ends`."""
    events = [event for end in ends for event in ("bypassed", end)]
    return [entry(seq, event, stock=seq % 2) for seq, event in enumerate(events, start=1)]


def served(request: str = "r1") -> ClientRecord:
    return ClientRecord(ClientRequest("p", 2), 0.0, 1.0, 200, True, False, request, "10.0.0.1:8000", "", "")


def faults(history: Sequence[ClientRecord], log: Sequence[Mapping[str, str]], **options: Any) -> list[str]:
    """The faults without those of the audit, which has its own tests."""
    found = check_history(history, log, **options).faults
    return [fault for fault in found if not fault.startswith(("G", "log"))]


FAULTY = [
    ([served()], [], "knows no end"),
    ([served()], lifecycle_log("completed", "completed"), "ended as"),
    ([served()], lifecycle_log("cancelled"), "ended as"),
    ([served(), served()], lifecycle_log("completed"), "as another does"),
    ([served("")], lifecycle_log("completed"), "or none"),
    ([], lifecycle_log("completed")[:1], "never ended"),
]


@pytest.mark.parametrize(("history", "log", "what"), FAULTY)
def test_each_fault_is_found(history: list[ClientRecord], log: list[Mapping[str, str]], what: str) -> None:
    found = faults(history, log)
    assert any(what in fault for fault in found), found


def test_a_second_end_by_a_stopped_replica_is_allowed_only_with_may_resume() -> None:
    assert faults([served()], lifecycle_log("completed")) == []
    log = lifecycle_log("completed", "cancelled")
    assert faults([served()], log) != []
    assert faults([served()], log, may_resume=True) == []
    assert check_history([served()], log, may_resume=True).resumed == 1
    # Two valid ends are always a fault; a lost log may lack a request.
    assert faults([served()], lifecycle_log("completed", "completed"), may_resume=True) != []
    assert faults([served()], [], log_lost=True) == []


def test_a_client_that_left_is_no_failure_and_a_cut_answer_is() -> None:
    left = replace(served(), whole=False, left=True)
    assert (left.failed, left.served) == (False, False)
    assert replace(served(), whole=False).failed


async def record_of_answer(answer: bytes, request: ClientRequest) -> ClientRecord:
    """The record of a request to a server that sends `answer` and hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        return await send_request(f"http://127.0.0.1:{port}", request)


def chunked(*pieces: bytes) -> bytes:
    chunks = (b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"".join(chunks)


ANSWERS = [
    (HEAD + b"content-length: %d\r\n\r\n" % len(ANSWER) + ANSWER, False, True),
    (HEAD + b"content-length: %d\r\n\r\n" % (len(ANSWER) + 1) + ANSWER, False, False),
    (HEAD + b"content-length: 2\r\n\r\n{}", False, False),
    (chunked(EVENT, EVENT, DONE) + b"0\r\n\r\n", True, True),
    (chunked(EVENT, EVENT, DONE), True, False),
    (chunked(EVENT, DONE) + b"0\r\n\r\n", True, False),
    (chunked(EVENT, EVENT) + b"0\r\n\r\n", True, False),
    (HEAD, False, False),
    (b"", False, False),
]


@pytest.mark.parametrize(("answer", "streamed", "right"), ANSWERS)
async def test_an_answer_is_whole_only_with_all_its_parts(answer: bytes, streamed: bool, right: bool) -> None:
    record = await record_of_answer(answer, ClientRequest("p", 2, streamed=streamed))
    assert record.served is right
    assert record.failed is not right


async def test_no_server_is_a_failure_and_not_an_exception() -> None:
    record = await send_request("http://127.0.0.1:1", ClientRequest("p", 2))
    assert (record.status, record.failed) == (0, True)
    assert record.fault


@pytest.mark.parametrize("ends", [("completed",), ("completed", "completed"), ("reclaimed",)])
def test_a_saved_run_is_checked_like_the_run_itself(tmp_path: Path, ends: tuple[str, ...]) -> None:
    headers = (("a", "b"), ("c", "d"))
    request = ClientRequest("p ü", 2, streamed=True, pad_bytes=3, leaves_s=0.5, headers=headers)
    history = [replace(served(), request=request), replace(served(""), status=503, whole=False)]
    rules = {"may_end": ("completed", "reclaimed")}
    written = client_history.save_run(tmp_path / "run", history, lifecycle_log(*ends), **rules)
    assert written.check() == check_history(history, lifecycle_log(*ends), **rules)


def test_excepted_promises_are_not_checked() -> None:
    log = [entry(number, "bypassed", f"r{number}", stock=number) for number in range(1, 6)]
    log += [entry(5 + number, "completed", f"r{number}", stock=5 - number) for number in range(1, 6)]
    assert {fault[:2] for fault in check_history([], log).faults} == {"G1"}
    assert check_history([], log, except_promises=("G1",)).faults == ()


EXITS = {"no fault": (("completed",), 0), "a fault": (("completed", "completed"), 1), "no run": ((), 2)}


@cases("ends, code", EXITS)
def test_the_command_exits_with_what_it_finds(
    tmp_path: Path, ends: tuple[str, ...], code: int, monkeypatch: Any, capsys: Any
) -> None:
    if ends:
        client_history.save_run(tmp_path, [served()], lifecycle_log(*ends))
    monkeypatch.setattr(sys, "argv", ["client_history", str(tmp_path)])
    assert client_history.main() == code
    assert ("rules broken" in capsys.readouterr().out) is bool(ends)
