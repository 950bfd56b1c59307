"""Puts faults into the Lua scripts and the failover code, and checks that a test or schedule finds each.

Each mutation in MUTATIONS is applied to a copy of the source tree, in which the mutation's tests run. If all
pass, schedules of faults run by seed until one fails. bench/results/mutations.md has the results.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from bench.rig.report import table
from long.findings import Findings

ROOT = Path(__file__).parents[2]
_LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "bench", "deploy")
_TESTS_S, _SCHEDULE_S = 600.0, 120.0


class Mutation(NamedTuple):
    """Replaces the only `before` in `file` by `after`. `tests`: the narrowest tests that should fail."""

    name: str
    file: str
    before: str
    after: str
    tests: str


_RULES, _LEASES, _IN_FAILOVER = (
    "tests/model/test_rules.py",
    "tests/scripts/test_leases.py",
    "tests/unit/test_outages.py",
)
_TENANTS = "tests/model/test_tenants.py"
_STAGES = "tests/scripts/test_stages.py"
MUTATIONS = (
    Mutation(
        "a renewal leaves the lease as it is", "lua/renew.lua",
        "return 'waiting' end\n    defer_write('ZADD', key.inflight, now_ms + settings.lease_ms, id)",
        "return 'waiting' end", _RULES,
    ),
    Mutation(
        "an adoption places a waiting request beyond the bound", "lua/admit.lua",
        "  if record.is_waiting(r) then\n    if r.deadline",
        "  if r.state == STATE_ORPHANED then\n    if r.deadline", _RULES,
    ),
    Mutation(
        "an end gives back its stock twice", "lua/settle.lua",
        "    finish_request(r, outcome)\n", "    finish_request(r, outcome)\n    pool.release(r.taken)\n",
        _RULES,
    ),
    Mutation(
        "a tombstone is not stored", "lua/tombstone.lua",
        "    tombstones.put(id, now_ms - tonumber(ago_ms))\n", "", _LEASES,
    ),
    Mutation(
        "a grant takes no stock", "lua/lib/dispatch.lua",
        "counters.dispatches = counters.stock + take,", "counters.dispatches = counters.stock,", _RULES,
    ),
    Mutation(
        "a bypass passes the bound", "lua/admit.lua",
        "if (take > 0 and pool.stock + take > pool.upper) or endpoints", "if endpoints", _RULES,
    ),
    Mutation(
        "a grant passes the bound", "lua/lib/dispatch.lua",
        "      if upper <= 0 or (take > 0 and counters.stock + take > upper) then break end\n", "", _RULES,
    ),
    Mutation(
        "an endpoint at its limit is chosen like any other", "lua/lib/endpoints.lua",
        " then cost = cost + AT_LIMIT end", " then cost = cost end", _RULES,
    ),
    Mutation(
        "an endpoint without a found limit adds nothing to the bound", "lua/lib/marks.lua",
        "(caps[address] or default_cap)", "(caps[address] or 0)", _RULES,
    ),
    Mutation(
        "an end leaves its tokens on the endpoint", "lua/lib/endpoints.lua",
        "stage.add_amount(address, -taken,", "stage.add_amount(address, 0,",
        "tests/model/test_queue_machine.py",
    ),
    Mutation(
        "a found limit leaves the bound as it is", "lua/set_limits.lua",
        "      marks.update_bounds()\n", "", "tests/scripts/test_found_limits.py",
    ),
    Mutation(
        "an end forgets the prefill of its request", "lua/lib/ends.lua",
        "    if r.prefillers ~= '' then stages.release_prefill(prefill.first(r.prefillers), r.id) end\n", "",
        _STAGES,
    ),
    Mutation(
        "the first token leaves the prefill to the request's end", "lua/lib/ends.lua",
        "    r.prefillers = ''\n    record.put(r)\n    queue", "    record.put(r)\n    queue", _STAGES,
    ),
    Mutation(
        "a prefill endpoint at its limit takes one more", "lua/lib/ends.lua",
        "      if not limited or",
        "      if limited then return prefill.counted()[1] end\n      if not limited or",
        _STAGES,
    ),
    Mutation(
        "a granted request takes no room of its blocker", "lua/lib/throttle.lua",
        "left, has_own = left - 1, has_own", "has_own = has_own", "tests/scripts/test_waiting_for_room.py",
    ),
    Mutation(
        "a turn charges no tenant above the flow", "lua/lib/flows.lua",
        "      tag = tag + share_of_node(node, r)\n", "", _TENANTS,
    ),
    Mutation(
        "a request that fails is refunded twice", "lua/lib/quotas.lua",
        "charge(r, found, lists.charged, -1, 'all')", "charge(r, found, lists.charged, -2, 'all')", _TENANTS,
    ),
    Mutation(
        "a tenant that no longer queues charges again at the start", "lua/lib/tenants.lua",
        "elseif string.find(r.charged, constants.code, 1, true) then", "elseif false then", _TENANTS,
    ),
    Mutation(
        "a new bound does not count the running requests", "lua/lib/quotas.lua",
        "      if bounds[1] then", "      if false then", _TENANTS,
    ),
    Mutation(
        "tenants pay the estimate, not the usage", "lua/settle.lua",
        "    if settings.tenants and used ~= '' then", "    if false then", _TENANTS,
    ),
    Mutation(
        "an outage charges a tenant's request twice", "app/picker_fleet/admission/quotas.py",
        "charge.limits.add(limit.key)", "pass", "tests/unit/test_quotas.py",
    ),
    Mutation(
        "each replica has the whole of a tenant's limit", "app/picker_fleet/admission/quotas.py",
        "whole / live, whole, rate,", "whole, whole, rate,", "tests/unit/test_quotas.py",
    ),
    Mutation(
        "an expired request is granted", "lua/lib/dispatch.lua",
        "    elseif r.deadline_ms <= now_ms then\n      end_and_notify(r, NOTIFY_EXPIRED)\n    elseif not",
        "    elseif not", _RULES,
    ),
    Mutation(
        "a request of a silent replica is granted", "lua/lib/dispatch.lua",
        "elseif not pool.is_live(r.owner) then", "elseif false then", _RULES,
    ),
    Mutation(
        "an abandoned stream cancels the request of its successor", "lua/cancel.lua",
        "elseif r.owner ~= notifications.caller or r.attempt ~= attempt then",
        "elseif r.owner ~= notifications.caller then", _RULES,
    ),
    Mutation(
        "a request with another body adopts a known id", "lua/admit.lua",
        "\n    and string.match(r.attempt, '%..*') == string.match(arrival.attempt, '%..*')", "",
        "tests/scripts/test_adoption.py",
    ),
    Mutation(
        "a restored request takes no stock", "lua/lib/ends.lua",
        "  pool.stock = pool.stock + r.taken\n", "", _LEASES,
    ),
    Mutation(
        "a grant is reported in one heartbeat only", "lua/heartbeat.lua",
        "left[#left + 1] = 'granted ' .. id", "notifications.withdraw(owner, id)",
        "tests/scripts/test_gate.py",
    ),
    Mutation(
        "each replica takes the whole free budget", "app/picker_fleet/admission/local_gate.py",
        "return float(each + (rank < remainder))", "return float(math.floor(free + RESIDUE))",
        "tests/unit/test_local_admission.py",
    ),
    Mutation(
        "requests placed since the heartbeat take no budget", "app/picker_fleet/admission/failover.py",
        "return max(part - self.placed, 0.0)", "return part", _IN_FAILOVER,
    ),
    Mutation(
        "an end releases budget each time it is reported", "app/picker_fleet/admission/ledger.py",
        "entry.phase is Phase.ENDED and (entry.journaled or entry.unread):", "False:",
        "tests/unit/test_local_admission.py",
    ),
    Mutation(
        "a resync does not wait for the tombstones of peers", "app/picker_fleet/admission/failover.py",
        "            await self.tombstones.wait_for_peers(self._peers.live)\n", "",
        "tests/scripts/test_failover.py",
    ),
    Mutation(
        "the first resynced replica shares the queue at once", "app/picker_fleet/admission/failover.py",
        "        waited_s, straggles =", "        return True\n        waited_s, straggles =",
        "tests/scripts/test_failover.py",
    ),
    Mutation(
        "a failed resync keeps the budget that its ends released", "app/picker_fleet/admission/failover.py",
        "outage.gate.limit_budget(outage.gate.free - resync.released)", "pass", _IN_FAILOVER,
    ),
    Mutation(
        "ends in flight are dropped with their connection", "app/picker_fleet/state/batching.py",
        "[item for item in call.items if item.durable and not item.answer.done()]", "[]",
        "tests/scripts/test_link.py",
    ),
)  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--schedules", type=int, default=50, help="fault schedules to run if the tests pass")
    parser.add_argument("--only", default="", help="only mutations whose name contains this text")


def run(options: argparse.Namespace, findings: Findings) -> None:
    chosen = [each for each in MUTATIONS if options.only in each.name]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=_LEFT_OUT)
        found = _by_test(tree, sorted({each.tests for each in chosen}))
        findings.check("without a mutation the tests pass", not found, found)
        for mutation in chosen:
            file = tree / mutation.file
            whole = file.read_text(encoding="utf-8")
            if whole.count(mutation.before) != 1:
                findings.check(mutation.name, False, f"{mutation.file} has changed: update this mutation")
                continue
            file.write_text(whole.replace(mutation.before, mutation.after), encoding="utf-8")
            found = _by_test(tree, [mutation.tests]) or _by_schedule(tree, options.schedules)
            file.write_text(whole, encoding="utf-8")
            findings.check(mutation.name, bool(found), found)
            rows.append([mutation.name, f"`{mutation.file}`", found or "**nothing**"])
    findings.add(table(["mutation", "file", "found by"], rows))


def _environment(tree: Path) -> dict[str, str]:
    paths = ("app", ".", *(f"tests/{name}" for name in ("scripts", "unit", "fleet", "faults")))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(str(tree / path) for path in paths)}


def _by_test(tree: Path, tests: list[str]) -> str:
    """Run `tests` in `tree`. Returns the first test that fails; '' if all pass."""
    command = (sys.executable, "-m", "pytest", "-x", "-n0", "--timeout=60", *tests)
    ran = subprocess.run(
        command, cwd=tree, env=_environment(tree), capture_output=True, text=True, check=False,
        timeout=_TESTS_S,
    )  # fmt: skip
    if not ran.returncode:
        return ""
    failed = re.search(r"(?m)^(?:FAILED|ERROR) ([^\s[]+)", ran.stdout)
    return f"`{failed[1]}`" if failed else f"pytest ended with {ran.returncode}: {ran.stdout[-300:]}"


def _by_schedule(tree: Path, count: int) -> str:
    """Run up to `count` fault schedules. Returns the first schedule that fails; '' if all pass."""
    for seed in range(count):
        command = (sys.executable, "tests/fleet/schedules.py", "--whole", str(seed))
        ran = subprocess.run(
            command, cwd=tree, env=_environment(tree), capture_output=True, text=True, check=False,
            timeout=_SCHEDULE_S,
        )  # fmt: skip
        if ran.returncode:
            what = (ran.stdout or ran.stderr).strip().partition(": ")[2][:60]
            return f"schedule {seed}: {what}"
    return ""
