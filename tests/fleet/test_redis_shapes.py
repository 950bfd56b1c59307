"""Runs a fleet on a Redis with TLS and ACL; tests/faults/cases/test_case_failover.py has Sentinel and
Cluster."""

import asyncio
import re
from pathlib import Path
from typing import Any

from fleet_load import completed, counts
from redis_servers import LOOPBACK, debian, redis_server
from tls_files import authority
from whole_fleet import assert_no_violation

import picker_fleet
from picker_fleet.cli import main


async def test_a_fleet_with_the_documented_acl_serves_over_tls(fleet: Any, tmp_path: Path) -> None:
    # Redis accepts only TLS; its users `picker`, `loader` and `auditor` have the permissions of
    # docs/redis.md.
    page = (Path(picker_fleet.__file__).parents[2] / "docs/redis.md").read_text()
    users = dict(re.findall(r"^user (\w+) on >PASSWORD (.*(?:epp:|function\|load).*)$", page, re.MULTILINE))
    files = authority(tmp_path, "certificate")
    with redis_server(tmp_path / "redis", binary=debian("redis-server"), tls=files) as server:
        for name, rules in users.items():
            server.ask("ACL", "SETUSER", name, "on", ">secret", *rules.split())
        options = f"ssl_ca_certs={files.cert}&ssl_certfile={files.cert}&ssl_keyfile={files.key}"
        place = f"{LOOPBACK}:{server.port}/0?{options}"
        load = ["functions", "load", "--redis", f"rediss://loader:secret@{place}"]
        assert await asyncio.to_thread(main, load) == 0
        scorers = [{"name": name} for name in ("prefix-affinity", "latency", "queue-depth")]
        here = fleet(
            *("--redis", f"rediss://picker:secret@{place}", "--sim-ttft", "20", "--sim-itl", "2"),
            config={"fair_request_queue": {"flow_capacity": 1000}, "scheduling": {"scorers": scorers}},
            unaudited="the picker user may not read the log; the auditor reads it below",
        )
        await completed(here.url, 60, tokens=5)
        await here.until("state", lambda state: not any(counts(state)), what="at rest")
        assert server.ask("EXISTS", "epp:{default}:routes", "epp:{default}:metrics") == 2
        assert_no_violation(f"rediss://auditor:secret@{place}", "a fleet with the documented ACL")
        # Redis may deny only FUNCTION LIST, which a replica tries once per connection.
        denied = {entry[entry.index(b"object") + 1] for entry in server.ask("ACL", "LOG")}
        assert denied <= {b"function|list"}
        here.stop()
