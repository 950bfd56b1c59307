"""`picker audit` reads a pool's decision log. tests/model/test_queue_machine.py audits random runs."""

import pytest
from script_fleet import OpenFleet

from picker_fleet.cli import main
from picker_tools.audit.log import LogStream


async def test_the_audit_of_a_trimmed_log_has_no_finding(fleet: OpenFleet, valkey_url: str) -> None:
    # Redis has trimmed the first part of a run's log, and some requests began there.
    async with fleet("a", upper_per=5) as (it, a):
        for number in range(40):
            await a.admit(f"r{number}", flow=f"flow{number % 3}")
            if number >= 10:
                await a.settle(f"r{number - 10}")
        await it.redis.xtrim(it.keys.log, maxlen=60, approximate=False)
        assert main(["audit", "--redis", valkey_url, "--pool", it.pool]) == 0


async def test_picker_audit_reports_a_violation_with_its_log_entry(
    fleet: OpenFleet, valkey_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with fleet("a", checked=False) as (it, a):
        await a.admit("r")
        await a.settle("r")
        *_, (_, last) = await it.redis.xrange(it.keys.log)
        await it.redis.xadd(it.keys.log, {**last, "seq": str(int(last["seq"]) + 1)})
        assert main(["audit", "--redis", valkey_url, "--pool", it.pool]) == 1
        shown = capsys.readouterr().out
        assert "G6: request r ends without having begun, or twice: completed" in shown
        assert f"#{int(last['seq']) + 1} " in shown


async def test_picker_audit_exits_with_2_if_the_pool_has_no_decision_log(
    fleet: OpenFleet, valkey_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with fleet("a", log_max=0) as it:
        await it.replicas[0].admit("r")
        assert main(["audit", "--redis", valkey_url, "--pool", it.pool]) == 2
        assert f"pool '{it.pool}' has no decision log" in capsys.readouterr().err


async def test_log_entries_trimmed_in_a_read_are_reported(fleet: OpenFleet, valkey_url: str) -> None:
    # The decision log has several pages, and the first page has been read.
    async with fleet("a") as (it, a):
        for i in range(40):
            await a.admit(f"r{i}")
        with LogStream(valkey_url, it.pool, page=10) as log:
            pages = log.pages()
            assert not next(pages).trimmed
            # If unread log entries are trimmed, only the page after the gap reports the gap.
            await it.redis.xtrim(it.keys.log, maxlen=20, approximate=False)
            assert [page.trimmed for page in pages] == [True, False]
