"""Makes calls of official SDKs through the fleet, in each mode, and directly to a model server.

For each call of sdk_calls.py and sdk_calls.mjs, the fleet must change neither the requests that reach the
server nor the answer that the SDK returns. Then each request is sent again through the fleet and directly,
and status, headers and bytes of the answers must be equal. Installs the SDKs once in the user's cache folder.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from crowd import http_client
from fleet_load import counts

from bench.rig.fleet import RunningFleet, picker_up
from long.environments import InstallFault, cache_folder, environment
from long.findings import Findings
from long.sdk_server import Request, Server
from picker_tools.local_fleet.network import until
from picker_tools.local_fleet.parts import MODES

_PYTHON = (
    *("openai[aiohttp]==3.57.0", "anthropic==2.14.0", "litellm==1.110.2", "ollama==0.6.3"),
    "zstandard==0.25.0",
)
_NODE = "openai@7.57.0"
_START_S, _CALL_S, _REST_S = 300.0, 60.0, 20.0  # the SDKs need 10 s of CPU to start
_FAULTY = ("a fault of the client", "no such model")  # names of calls that must fail end with these words
_HERE = Path(__file__).parent
# Envoy and the picker add these headers to requests or to answers. `host` differs in its port.
_ADDED = {
    "host", "connection", "x-envoy-external-address", "x-request-id", "x-forwarded-proto", "x-forwarded-for",
    "x-envoy-expected-rq-timeout-ms", "x-picker-client-protocol",
    "x-envoy-attempt-count", "x-gateway-destination-endpoint", "x-picker-client-request-id",
}  # fmt: skip
_ADDED_TO_ANSWERS = {
    *("x-request-id", "server", "date", "x-queue-pressure", "x-session-token"),
    "x-envoy-upstream-service-time",
}
_FRAMING = {"host", "content-length", "transfer-encoding", "connection"}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--only", metavar="REGEX", default="", help="only calls whose name matches")
    parser.add_argument("--servers", type=int, default=2, help="model servers; each stores its own responses")


def run(options: argparse.Namespace, findings: Findings) -> None:
    asyncio.run(_all_calls(options, findings))


def sdk_python() -> Path:
    """The Python of an environment with the SDKs; installs them if needed, InstallFault if that fails."""
    version = "-".join(each.split("==")[1] for each in _PYTHON)
    return environment("sdks", version, _PYTHON) / "bin" / "python"


def _commands() -> list[tuple[str, ...]]:
    """Install the SDKs if needed; return the commands that run sdk_calls.py and sdk_calls.mjs.

    Raises:
        InstallFault: a package cannot be installed, or Node is missing.
    """
    python = sdk_python()
    if not (npm := shutil.which("npm")) or not (node := shutil.which("node")):
        raise InstallFault("Node's `openai` needs node and npm, which are not on the PATH")
    folder = cache_folder("sdks") / _NODE
    if not (folder / "node_modules" / "openai").exists():
        folder.mkdir(parents=True, exist_ok=True)
        words = (npm, "install", "--silent", "--no-fund", "--no-audit", "--ignore-scripts", _NODE)
        if (
            done := subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
        ).returncode:
            raise InstallFault(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    # Node resolves packages of an ECMAScript module only from the module's own folder.
    script = shutil.copy(_HERE / "sdk_calls.mjs", folder)
    return [(str(python), "-I", str(_HERE / "sdk_calls.py")), (node, str(script))]


async def _all_calls(options: argparse.Namespace, findings: Findings) -> None:
    commands = await asyncio.to_thread(_commands)
    async with contextlib.AsyncExitStack() as stack:
        requests: list[Request] = []
        listening = [Server(requests).listening() for _ in range(options.servers)]
        servers = [await stack.enter_async_context(each) for each in listening]
        config = {
            "discovery": {"static": [{"address": each.address} for each in servers]},
            "default_model": "llama",
            "extproc": {"max_body_bytes": 4_000_000},
        }
        url = f"http://{servers[0].address}"
        direct = [
            dict([seen async for seen in _calls(each, url, servers, options.only)]) for each in commands
        ]
        for mode in options.modes:
            async with picker_up(config, "--replicas", "2", "--endpoints", "0", "--mode", mode) as fleet:
                for command, expected in zip(commands, direct, strict=True):
                    async for name, (answer, requests) in _calls(command, fleet.url, servers, options.only):
                        faults = [*_differences(name, expected[name], (answer, requests))]
                        faults += [each for one in requests for each in await _replayed(one, fleet)]
                        findings.check(f"`{mode}`: {name}", not faults, "; ".join(faults)[:600])
                rests = await until(lambda: at_rest(fleet), within_s=_REST_S, pause_s=0.2)
                findings.check(f"`{mode}`: nothing is in flight at the end", rests)


async def at_rest(fleet: RunningFleet) -> bool:
    """Whether no request waits or is in flight."""
    return not any(counts(await fleet.get("state")))


_Seen = tuple[Any, list[Request]]  # a call's return value, and its requests as the server got them


async def _calls(
    command: Sequence[str], url: str, servers: Sequence[Server], only: str
) -> AsyncIterator[tuple[str, _Seen]]:
    """Run `command` against `url`, and yield the result of each call whose name matches `only`."""
    kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    for server in servers:
        server.kept.clear()
    process = await asyncio.create_subprocess_exec(
        *command, url, env=kept | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}, limit=2**24,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        for name in json.loads(await asyncio.wait_for(process.stdout.readline(), _START_S)):
            if not re.search(only, name):
                continue
            servers[0].requests.clear()
            process.stdin.write(f"{name}\n".encode())
            answer = json.loads(await asyncio.wait_for(process.stdout.readline(), _CALL_S))
            # litellm also requests /api/show, for the prices of Ollama's models.
            is_show = name == "ollama: show"
            yield (
                name,
                (answer, [each for each in servers[0].requests if is_show or each.path != "/api/show"]),
            )
    finally:
        process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _differences(name: str, expected: _Seen, seen: _Seen) -> list[str]:
    faults = []
    if expected[0] != seen[0]:
        faults.append(f"the SDK returns {str(seen[0])[:300]} instead of {str(expected[0])[:300]}")
    if isinstance(expected[0], dict) and "raised" in expected[0] and not name.endswith(_FAULTY):
        faults.append(f"the call fails without the fleet: {expected[0]}")
    for wanted, got in zip(map(_comparable, expected[1]), map(_comparable, seen[1]), strict=False):
        faults += _unlike("the server gets", wanted, got)
    if len(expected[1]) != len(seen[1]) or not seen[1]:
        faults.append(f"the server gets {len(seen[1])} requests instead of {len(expected[1])}")
    return faults


def _unlike(what: str, wanted: Mapping[str, Any], got: Mapping[str, Any]) -> list[str]:
    return [
        f"{what} {name} {str(got.get(name))[:200]} instead of {str(wanted.get(name))[:200]}"
        for name in sorted({*wanted, *got})
        if got.get(name) != wanted.get(name)
    ]


def _comparable(request: Request) -> Mapping[str, Any]:
    """A request without the form boundary and the added headers, which differ from call to call."""
    headers, body = {**request.headers}, request.body
    if boundary := re.search(r"boundary=(\S+)", headers.get("content-type", "")):
        headers["content-type"] = headers["content-type"].replace(boundary[1], "…")
        body = body.replace(boundary[1].encode(), "…".encode())
    kept = {name: value for name, value in headers.items() if name not in _ADDED}
    return kept | {":method": request.method, ":path": request.path, "body": body}


async def _replayed(request: Request, fleet: RunningFleet) -> list[str]:
    """Send `request` again, directly and through the fleet. Returns how the two answers differ."""
    headers = [(name, value) for name, value in request.headers.items() if name not in _FRAMING | _ADDED]
    answers: list[dict[str, Any]] = []
    for url in (f"http://{request.address}", fleet.url):
        content = request.body or None
        asked = httpx.Request(request.method, url + request.path, headers=headers, content=content)
        async with http_client() as client:
            answer = await client.send(asked, stream=True)
            body = b"".join([each async for each in answer.aiter_raw()])
        kept = {name: value for name, value in answer.headers.items() if name not in _ADDED_TO_ANSWERS}
        answers.append(kept | {":status": answer.status_code, "body": body})
    return _unlike("the answer has", *answers)
