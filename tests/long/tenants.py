"""Two tenants with API keys and official SDKs: one is far over its limit, and the other must not notice.

The tenant `busy` sends many times its limit of requests: it gets 429 with the headers that SDKs read, and
each SDK waits as long as `retry-after` says before it sends the request again. The tenant `quiet` sends the
same load alone, beside `busy`, and alone again.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from edge_envoy import example

from bench.rig import report
from bench.rig.fleet import picker_up
from long.findings import Findings
from long.sdk_server import Server
from long.sdks import at_rest, sdk_python
from picker_tools.local_fleet.network import until
from picker_tools.local_fleet.parts import MODES, Mode

_SDKS = ("openai", "anthropic")
_LIMIT, _PER = 5, "1s"
_SERVERS, _SERVICE_S = 2, 0.1
_QUIET, _BUSY = 2, 8  # number of the tenant's workers for each SDK
_MOST_RATIO, _LEAST_USED = 1.2, 0.8
_SLACK_S = 0.05  # tolerance: how much sooner a retry's answer may come than the first answer plus the wait
_REST_S = 20.0
_CLIENT = Path(__file__).parent / "sdk_tenant.py"
_OPENAI_RESET = re.compile(r"(\d+h)?(\d+m(?!s))?(\d+(\.\d+)?s)?(\d+ms)?")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds of each of a run's three parts")


def run(options: argparse.Namespace, findings: Findings) -> None:
    asyncio.run(_all_modes(options, findings))


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One answer that an SDK got: time by the machine's clock, status, quota headers, the error's body."""

    at_s: float
    status: int
    headers: dict[str, str]
    body: str


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of an SDK with its attempts; `raised`: the class of the SDK's exception, or ''."""

    took_s: float
    raised: str
    attempts: list[_Attempt]


async def _all_modes(options: argparse.Namespace, findings: Findings) -> None:
    python = await asyncio.to_thread(sdk_python)
    rows = [await _run(mode, python, options.seconds, findings) for mode in options.modes]
    head = ["mode", "quiet alone, p95 ms", "ratio beside busy", "busy served", "busy refused"]
    findings.add(report.table(head, rows))


async def _run(mode: Mode, python: Path, seconds: float, findings: Findings) -> list[str]:
    """Run one mode, and return its row of the report's table."""
    async with contextlib.AsyncExitStack() as stack:
        made = [Server([], _SERVICE_S).listening() for _ in range(_SERVERS)]
        servers = [await stack.enter_async_context(each) for each in made]
        how = ("--replicas", "2", "--endpoints", "0", "--mode", mode)
        config = _config(servers)
        fleet = await stack.enter_async_context(picker_up(config, *how))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        table = folder / "keys.yaml"
        table.write_text(yaml.safe_dump(_key_table()), encoding="utf-8")
        envoy = example(fleet, folder, "api_key.py", str(table), mode=mode, settings=config)
        edge = stack.enter_context(envoy)
        clients = _Clients(python, edge.url, seconds)
        before = await clients.calls("quiet", _QUIET)
        beside, busy = await asyncio.gather(clients.calls("quiet", _QUIET), clients.calls("busy", _BUSY))
        after = await clients.calls("quiet", _QUIET)
        quiet = [call for part in (before, beside, after) for calls in part.values() for call in calls]
        alone_s = _p95_s(before, after)
        ratio = _p95_s(beside) / alone_s
        answers = [each for calls in busy.values() for call in calls for each in call.attempts]
        served_s = [each.at_s for each in answers if each.status == 200]
        refused = len(answers) - len(served_s)
        row = [mode, f"{alone_s * 1000:.1f}", f"{ratio:.2f}", str(len(served_s)), str(refused)]
        findings.check(f"`{mode}`: p95 of `quiet` is as alone", ratio <= _MOST_RATIO, f"{ratio:.2f}")
        _check_quiet(f"`{mode}`: `quiet`", quiet, findings)
        _check_rate(f"`{mode}`: `busy`", served_s, findings)
        for sdk in _SDKS:
            _check_busy(f"`{mode}`: `{sdk}`", sdk, busy[sdk], findings)
        rests = await until(lambda: at_rest(fleet), within_s=_REST_S, pause_s=0.2)
        findings.check(f"`{mode}`: nothing is in flight at the end", rests)
        return row


def _config(servers: Iterable[Server]) -> dict[str, Any]:
    limits = [{"requests": _LIMIT, "per": _PER}, {"tokens": 1_000_000, "per": "1m"}]
    return {
        "discovery": {"static": [{"address": each.address} for each in servers]},
        "extproc": {"trusted_headers": ["x-gateway-inference-fairness-id"]},
        # 8 requests at once: without its limit, `busy` would fill all slots.
        "request_queue_controller": {"watermark_per_backend": 4},
        "tenants": {"nodes": [{"path": "busy", "over_limit": "reject", "limits": limits}, {"path": "quiet"}]},
    }


def _key(tenant: str, sdk: str) -> str:
    return f"long-random-key-of-{tenant}-{sdk}"


def _key_table() -> dict[str, str]:
    """SHA-256 of each key -> its flow, as deploy/examples/api_key.py reads them."""
    pairs = [(tenant, sdk) for tenant in ("quiet", "busy") for sdk in _SDKS]
    return {hashlib.sha256(_key(*each).encode()).hexdigest(): "/".join(each) for each in pairs}


class _Clients:
    """Runs clients of both SDKs against the Envoy at `url`, for `seconds` each time."""

    def __init__(self, python: Path, url: str, seconds: float) -> None:
        self._python = python
        self._url = url
        self._seconds = seconds

    async def calls(self, tenant: str, workers: int) -> dict[str, list[_Call]]:
        """All calls of `workers` workers of each SDK, by SDK."""
        found = await asyncio.gather(*(self._of_sdk(tenant, sdk, workers) for sdk in _SDKS))
        return dict(zip(_SDKS, found, strict=True))

    async def _of_sdk(self, tenant: str, sdk: str, workers: int) -> list[_Call]:
        process = await asyncio.create_subprocess_exec(
            *(str(self._python), "-I", str(_CLIENT), sdk, self._url, _key(tenant, sdk)),
            *(str(workers), str(self._seconds)),
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            out, _ = await process.communicate()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        return [
            _Call(call["took_s"], call["raised"], [_Attempt(**each) for each in call["attempts"]])
            for call in json.loads(out)
        ]


def _p95_s(*parts: dict[str, list[_Call]]) -> float:
    return report.percentile(
        [call.took_s for part in parts for calls in part.values() for call in calls], 0.95
    )


def _check_quiet(what: str, calls: list[_Call], findings: Findings) -> None:
    statuses = {each.status for call in calls for each in call.attempts}
    findings.check(f"{what} gets no refusal", statuses == {200}, f"{len(calls)} calls: {statuses}")


def _check_rate(what: str, served_s: list[float], findings: Findings) -> None:
    """Check that the limit is used, and never exceeded: at most a burst and the rate's requests."""
    most = _LIMIT * (1 + max(served_s) - min(served_s)) + 1
    seen = f"{len(served_s)} served, at most {most:.1f}"
    holds = _LEAST_USED * most <= len(served_s) <= most
    findings.check(f"{what} has at least {_LEAST_USED:g} of its limit, and no more", holds, seen)


def _check_busy(what: str, sdk: str, calls: list[_Call], findings: Findings) -> None:
    answers = [each for call in calls for each in call.attempts]
    refused = [each for each in answers if each.status == 429]
    served = [each for each in answers if each.status == 200]
    waits = [each.headers.get("retry-after", "") for each in refused]
    told = {wait: waits.count(wait) for wait in waits}
    findings.check(
        f"{what}: each refusal has `retry-after` in whole seconds",
        bool(refused) and all(wait.isdecimal() and int(wait) >= 1 for wait in waits),
        str(told),
    )
    faults = {fault for each in refused for fault in _faults_of_body(sdk, each.body)}
    findings.check(f"{what}: each refusal names node and limit", not faults, "; ".join(sorted(faults))[:300])
    early = [*_early_retries(calls)]
    retried = sum(len(call.attempts) - 1 for call in calls)
    findings.check(
        f"{what}: every retry waits as told", retried > 0 and not early, f"{retried}, early: {early}"
    )
    raised = {call.raised for call in calls if len(call.attempts) == 1 and call.attempts[0].status == 429}
    is_raised = raised == {"RateLimitError"}
    findings.check(f"{what}: a client without retries raises its error", is_raised, str(raised))
    ended = {call.raised for call in calls if len(call.attempts) > 1}
    findings.check(f"{what}: every retried call is served", ended == {""}, str(ended))
    wrong = {fault for each in served for fault in _faults_of_headers(sdk, each.headers)}
    findings.check(
        f"{what}: served answers have the SDK's quota headers",
        bool(served) and not wrong,
        "; ".join(sorted(wrong))[:300] or str(served[0].headers if served else ""),
    )


def _early_retries(calls: Iterable[_Call]) -> Iterator[float]:
    """The seconds by which the SDK sent a call's retry too early."""
    for call in calls:
        for first, second in zip(call.attempts, call.attempts[1:], strict=False):
            early_s = first.at_s + float(first.headers.get("retry-after", "inf")) - second.at_s
            if early_s > _SLACK_S:
                yield round(early_s, 3)


def _faults_of_body(sdk: str, body: str) -> Iterator[str]:
    tree = json.loads(body)
    error = tree["error"]
    if not all(part in error["message"] for part in ("busy", f"{_LIMIT} requests")):
        yield f"message: {error['message']}"
    if sdk == "anthropic" and (tree.get("type"), error["type"]) != ("error", "rate_limit_error"):
        yield f"types: {tree.get('type')}, {error['type']}"


def _faults_of_headers(sdk: str, headers: dict[str, str]) -> Iterator[str]:
    """The faults of a served answer's quota headers for an SDK's user."""
    for unit, limit in (("requests", _LIMIT), ("tokens", 1_000_000)):
        names = (
            [f"x-ratelimit-{part}-{unit}" for part in ("limit", "remaining", "reset")]
            if sdk == "openai"
            else [f"anthropic-ratelimit-{unit}-{part}" for part in ("limit", "remaining", "reset")]
        )
        values = [headers.get(name, "") for name in names]
        if values[0] != str(limit):
            yield f"{names[0]}: {values[0]}"
        if not values[1].isdecimal() or int(values[1]) > limit:
            yield f"{names[1]}: {values[1]}"
        if not (_is_duration(values[2]) if sdk == "openai" else _is_time(values[2])):
            yield f"{names[2]}: {values[2]}"


def _is_duration(text: str) -> bool:
    """Whether `text` is a duration as OpenAI writes it: 6m0s, 12ms."""
    return bool(text) and _OPENAI_RESET.fullmatch(text) is not None


def _is_time(text: str) -> bool:
    """Whether `text` is a time of RFC 3339 with its zone."""
    try:
        return datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False
