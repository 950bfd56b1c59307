"""`picker audit` on runs of real replicas, under every policy and with every event of a request."""

import asyncio
import json
import random
from collections.abc import Collection, Mapping
from typing import Any

import pytest
from decision_ledger import events_of
from script_fleet import Fleet, OpenFleet, Replica, addresses, until

from picker_fleet.cli import main
from picker_fleet.domain.bands import Band
from picker_fleet.domain.request import Endpoint, Outcome
from picker_fleet.state.store import name_of
from picker_tools.audit.log import CHARGES, Entry, LogStream

FLOWS = {"one": 1.0, "two": 2.0, "four": 4.0, "tight": 1.0}
LIMITS = {"tight": 1}
# Three levels of tenants; some share, wait, are demoted or refused, and the last two have no limits.
TENANTS = {
    **dict.fromkeys(("acme/search/k1", "acme/search/k2", "acme/chat/k1", "acme/chat/k2"), 1.0),
    **dict.fromkeys(("umbrella/k1", "umbrella/k2", "umbrella/k3"), 1.0), "initech/a/b/c": 2.0, "single": 1.0,
}  # fmt: skip
NODES: Mapping[str, Mapping[str, Any]] = {
    "acme": {"weight": 3, "limits": [{"unit": "tokens", "amount": 9000, "per_ms": 1000, "burst": 200}]},
    "acme/*": {"max_parallel": 2, "budget": {"units": 1e6, "period": "day"}},
    "acme/search": {
        "over_limit": "reject", "weight": 2, "limits": [{"unit": "requests", "amount": 500, "per_ms": 1000}],
    },
    "umbrella": {
        "over_limit": "demote",
        "limits": [{"unit": "answer_tokens", "amount": 2000, "per_ms": 1000, "burst": 50}],
    },
    "umbrella/*": {"limits": [{"unit": "prompt_tokens", "amount": 3000, "per_ms": 1000, "burst": 60}]},
}  # fmt: skip
POLICIES: Mapping[str, Mapping[str, Any]] = {
    "weighted-fair, fcfs": {},
    "round-robin, edf": {"fairness": "round-robin", "ordering": "edf", "band_policy": "weighted"},
    "none, workload-aware": {"fairness": "none", "ordering": "workload-aware"},
    "weighted-fair, workload-aware": {"ordering": "workload-aware", "wait_signal": "workload_average"},
    "tenants": {"tenants": {"separator": "/"}},
}
STAGES = (
    *map(Endpoint, addresses(2)),
    Endpoint("10.0.1.1:8000", max_inflight=2, prefills=True, decodes=False),
    Endpoint("10.0.1.2:8000", max_inflight=1, prefills=True, decodes=False),
)


class Storm:
    """Random load: requests arrive at several replicas, are cancelled, evicted or retried, and end. The load
    comes from a seed, but the server decides the order of concurrent calls. `unit` multiplies each cost.
    `weights` are the flows' weights. If the load `splits`, prefill endpoints compute half of all prompts.
    """

    def __init__(
        self, fleet: Fleet, seed: int, unit: float = 1.0, weights: Mapping[str, float] = FLOWS,
        *, splits: bool = False,
    ) -> None:  # fmt: skip
        self._splits = splits
        self._fleet, self._unit, self._weights = fleet, unit, weights
        self._random = random.Random(seed)
        self._owners: dict[str, Replica] = {}
        self._flows: dict[str, str] = {}
        self._count = 0
        self._log_read = "-"  # id of the log's last entry that was read
        self._happened: set[str] = set()  # events and causes of grants logged so far
        self._last: dict[str, str] = {}  # last logged event by request id

    async def blow(self, steps: int, until_seen: Collection[str] = ()) -> None:
        """Take `steps` steps, then more until the log has all of `until_seen`: events, and grants' causes
        ("turn" or "guard")."""
        for step in range(1000):
            await self._read_log()
            if step >= steps and set(until_seen) <= self._happened:
                return
            if step % 10 == 0:
                await self._fleet.replicas[0].sweep()
            await asyncio.gather(*(self._arrive() for _ in range(self._random.randrange(6))))
            await self._place()
            if self._splits:
                for request in await self._some("placed", 2):
                    await self._owners[request].store.prefilled(request)
            await asyncio.gather(*map(self._settle, await self._some("placed", 2)))
            for request in await self._some("queued", 2):
                await self._disturb(request)
        raise AssertionError(f"the log lacks some of {until_seen}")

    async def let_one_expire(self) -> None:
        """Queue a request, and pause dispatch until the request expires."""
        replica, request = self._fleet.replicas[0], "short-lived"

        async def has_expired() -> bool:
            await replica.sweep()
            return "expired" in events_of(await self._fleet.log(), request)

        await replica.store.set_live_config({"paused": 1}, {})
        verdict = await replica.admit(request, flow="brief", band=Band.CRITICAL, ttl_s=0.05)
        assert name_of(verdict) == "queued"
        await until(has_expired)
        await replica.store.set_live_config({"paused": None}, {})

    async def calm(self) -> None:
        """Let every request that remains end."""
        while self._owners:
            await self._place()
            await asyncio.gather(*map(self._settle, await self._some("placed", len(self._owners))))
            await self._fleet.replicas[0].sweep()

    async def _arrive(self) -> None:
        self._count += 1
        request, chance = f"r{self._count}", self._random
        replica = chance.choice(self._fleet.replicas)
        self._flows[request] = flow = chance.choice(list(self._weights))
        self._owners[request] = replica
        await replica.admit(
            request, flow=flow, weight=self._weights[flow], limit=LIMITS.get(flow, 0),
            priority=chance.choice([10, 0, 0, 0, -10, 100, 7, -3]),
            cost=self._unit * chance.choice([1.0, 2.0, 3.0]), workload=chance.choice(["", "w1", "w2"]),
            ttl_s=chance.choice([0.05, 1.0, 60.0, 60.0]), age_s=chance.choice([0.0, 0.0, 0.02]),
            prompt_tokens=chance.choice([1, 10, 30]), answer_tokens=chance.choice([1, 10, 30]),
            prefill=self._prefill(),
        )  # fmt: skip

    async def _place(self) -> None:
        granted = await self._some("granted", len(self._owners))
        places = (self._owners[each].place(each, prefill=self._prefill()) for each in granted)
        await asyncio.gather(*places)

    def _prefill(self) -> str:
        return "*" if self._splits and self._random.random() < 0.5 else ""

    async def _settle(self, request: str) -> None:
        units = self._random.choice([None, 0.5, 1.0, 2.5, 6.0])
        actual = None if units is None else self._unit * units
        outcome = self._random.choice([Outcome.COMPLETED, Outcome.COMPLETED, Outcome.UPSTREAM_FAILED])
        usage = self._random.choice(["", "10,4,40", "30,0,5"])
        await self._owners[request].store.settle(request, outcome, actual, usage=usage)

    async def _disturb(self, request: str) -> None:
        store = self._owners[request].store
        match self._random.randrange(4):
            case 0:
                await store.cancel(request, 1, "cancelled")
            case 1:
                await store.evict(request)
            case 2:
                self._owners[request] = self._random.choice(self._fleet.replicas)
                await self._owners[request].admit(request, flow=self._flows[request])

    async def _some(self, event: str, most: int) -> list[str]:
        """At most `most` requests whose last event was `event` or an equivalent event."""
        await self._read_log()
        last = self._last
        same = {"placed": ("placed", "bypassed"), "queued": ("queued", "requeued")}.get(event, (event,))
        known = ("queued", "requeued", "granted", "placed", "bypassed", "orphaned")
        self._owners = {each: owner for each, owner in self._owners.items() if last.get(each) in known}
        found = [each for each in self._owners if last[each] in same]
        return self._random.sample(found, min(most, len(found)))

    async def _read_log(self) -> None:
        """Read the entries that are new in the decision log."""
        for number, fields in await self._fleet.redis.xrange(self._fleet.keys.log, min=self._log_read):
            entry, self._log_read = Entry.parse(fields), f"({number}"
            self._happened |= {entry.event, entry.by}
            if entry.event not in ("corrected", "adopted", "prefilled") and entry.event not in CHARGES:
                self._last[entry.request] = entry.event


async def test_the_audit_of_a_run_with_two_stages_finds_no_violation(fleet: OpenFleet) -> None:
    async with fleet("a", "b", "c", endpoints=STAGES, total_capacity=60, upper_per=4) as it:
        storm = Storm(it, 12, splits=True)
        await storm.blow(60, until_seen={"prefilled", "requeued", "expired", "cancelled", "evicted"})
        await storm.calm()
        report = await it.audit()
        assert [violation for finding in report.findings for violation in finding.violations] == []
        assert await it.at_rest()


RUNS = [*((policy, 1.0) for policy in POLICIES), ("weighted-fair, fcfs", 1e7)]


@pytest.mark.parametrize(("policy", "unit"), RUNS)
async def test_the_audit_of_a_run_finds_no_violation(fleet: OpenFleet, policy: str, unit: float) -> None:
    # Three replicas run with a full queue, overdue requests and wrong cost estimates.
    settings = {
        "total_capacity": 60, "flow_capacity": 40, "upper_per": 3 * unit, "starvation_ms": 5,
        "guard_share": 0.2, **POLICIES[policy],
    }  # fmt: skip
    async with fleet("a", "b", "c", endpoints=2, **settings) as it:
        storm = Storm(it, 11, unit, TENANTS if "tenants" in settings else FLOWS)
        nodes = {path: json.dumps(node) for path, node in NODES.items()}
        await it.replicas[0].store.set_tenants("tenants", nodes if "tenants" in settings else {})
        ends = {"expired", "cancelled", "evicted"}
        rare = ends | {"granted", "bypassed", "adopted", "throttled", "unthrottled"}
        await storm.let_one_expire()
        await storm.blow(60, until_seen={*rare, "guard"})
        # Bounds, weights and the order change while requests wait.
        changes = {"upper_per": 5 * unit, "lower_per": 5 * unit, "weights": {"one": 3}}
        await it.replicas[0].store.set_live_config(changes, {})
        await storm.blow(20)
        await it.replicas[1].store.set_live_config({"ordering": "fcfs", "fairness": "weighted-fair"}, {})
        await storm.blow(20)
        await storm.calm()
        report, log = await it.audit(), await it.log()
        # Every kind of event has happened, and the audit of the decision log finds no violation.
        seen = {entry.event for entry in log}
        assert rare <= seen
        assert ("rebased" in seen) is (unit > 1)  # only large tags are rebased
        assert any(entry.by == "guard" for entry in log)
        assert [violation for finding in report.findings for violation in finding.violations] == []
        assert report.open_at_end == 0
        assert all(finding.checked > 50 for finding in report.findings)


async def test_the_audit_of_a_trimmed_log_has_no_finding(fleet: OpenFleet, valkey_url: str) -> None:
    # Redis has trimmed the first part of a run's log.
    async with fleet("a", "b", endpoints=STAGES, total_capacity=60) as it:
        storm = Storm(it, seed=5, splits=True)
        await storm.blow(30)
        await storm.calm()
        await it.redis.xtrim(it.keys.log, maxlen=500, approximate=False)
        # The audit finds no violation in the rest of the log.
        assert main(["audit", "--redis", valkey_url, "--pool", it.pool]) == 0


async def test_picker_audit_reports_a_violation_with_its_log_entry(
    fleet: OpenFleet, valkey_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # The log says that a request ended twice.
    async with fleet("a", checked=False) as (it, a):
        await a.admit("r")
        await a.settle("r")
        *_, (_, last) = await it.redis.xrange(it.keys.log)
        await it.redis.xadd(it.keys.log, {**last, "seq": str(int(last["seq"]) + 1)})
        # The audit's exit status and output report the violation.
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
