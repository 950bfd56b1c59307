"""Runs Locust, GuideLLM, AIPerf and inference-perf against a running fleet, with two tenants at once.

Headers name the tenant. `bulk` has 12 concurrent requests, `chat` has 4 with the objective `premium`. Each
tool must report answers and no error, and the admin API must show exactly the tenants' flows and bands. All
tools but Locust are installed once in the user's cache folder; inference-perf needs Python 3.12.
"""

import argparse
import asyncio
import contextlib
import csv
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from long.environments import environment, find_python
from long.findings import Findings
from long.vllm_servers import made_model

_LOCUSTFILE = Path(__file__).parents[2] / "deploy" / "locust" / "locustfile.py"
_VERSIONS = {"guidellm": "0.8.1", "aiperf": "0.13.0", "inference-perf": "0.7.0"}
_FLOW, _OBJECTIVE = "x-gateway-inference-fairness-id", "x-gateway-inference-objective"
_PROMPT_TOKENS, _TOKENS = 200, 40
_ANSWERS_PER_S = 2.0  # estimate per stream: inference-perf needs a number of requests instead of a duration
_LOOK_S = 0.25
_LIMIT_S = 420.0  # timeout of a tool; some take more than a minute to start
_STOP_S = 20.0


@dataclass(frozen=True, slots=True)
class _Tenant:
    """A tenant: `streams` concurrent requests, and the band that its objective gives them."""

    name: str
    streams: int
    objective: str = ""
    band: str = "Default"

    @property
    def headers(self) -> dict[str, str]:
        return {_FLOW: self.name} | ({_OBJECTIVE: self.objective} if self.objective else {})


_TENANTS = (_Tenant("bulk", 12), _Tenant("chat", 4, "premium", "Critical"))
_Counts = Mapping[str, tuple[int, int]]  # numbers of answers and errors by tenant
# A tool's command, and a function that reads the tool's report after the process has ended.
_Job = tuple[tuple[str, ...], Callable[[], _Counts]]


def _program(name: str, python: str = sys.executable) -> str:
    version = _VERSIONS[name]
    return str(environment(name, version, [f"{name}=={version}"], python=python) / "bin" / name)


def _read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def _guidellm(url: str, seconds: int, folder: Path, tenant: _Tenant) -> _Job:
    out = folder / f"{tenant.name}.json"
    headers = ",".join(f"extras.headers.{name}={value}" for name, value in tenant.headers.items())
    command = (
        *(_program("guidellm"), "run", "--disable-progress", "--output", f"kind=json,path={out}"),
        *("--backend", f"kind=openai_http,target={url},model=llama,validate_backend=false,{headers}"),
        *("--tokenizer", f"kind=huggingface_auto,model={made_model(folder / 'model')}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={_PROMPT_TOKENS},output_tokens={_TOKENS}"),
        *("--profile", f"kind=concurrent,streams={tenant.streams}"),
        *("--constraint", f"kind=max_duration,seconds={seconds}"),
    )

    def read() -> _Counts:
        totals = _read(out)["benchmarks"][0]["metrics"]["request_totals"]
        return {tenant.name: (totals["successful"], totals["errored"])}

    return command, read


def _aiperf(url: str, seconds: int, folder: Path, tenant: _Tenant) -> _Job:
    out = folder / tenant.name
    command = (
        *(_program("aiperf"), "profile", "-m", "llama", "--url", url),
        *("--endpoint-type", "chat", "--streaming"),
        *("--tokenizer", str(made_model(folder / "model")), "--use-server-token-count", "--ui", "none"),
        *("--synthetic-input-tokens-mean", str(_PROMPT_TOKENS), "--output-tokens-mean", str(_TOKENS)),
        *("--concurrency", str(tenant.streams), "--benchmark-duration", str(seconds)),
        *(word for name, value in tenant.headers.items() for word in ("-H", f"{name}:{value}")),
        *("--output-artifact-dir", str(out)),
    )

    def read() -> _Counts:
        found = _read(out / "profile_export_aiperf.json")
        errors = (found.get("error_request_count") or {"avg": 0})["avg"]
        return {tenant.name: (int(found["request_count"]["avg"]), int(errors))}

    return command, read


def _inference_perf(url: str, seconds: int, folder: Path, tenant: _Tenant) -> _Job:
    out = folder / tenant.name
    requests = round(seconds * tenant.streams * _ANSWERS_PER_S)
    options = {
        "server.type": "vllm",
        "server.model_name": "llama",
        "server.base_url": url,
        "api.type": "completion",  # inference-perf makes prompts of a given length only for completions
        "api.streaming": "true",
        "api.headers": json.dumps(tenant.headers),
        "tokenizer.pretrained_model_name_or_path": str(made_model(folder / "model")),
        "data.type": "synthetic",
        "data.input_distribution.type": "fixed",
        "data.input_distribution.mean": str(_PROMPT_TOKENS),
        "data.output_distribution.type": "fixed",
        "data.output_distribution.mean": str(_TOKENS),
        "load.type": "concurrent",
        "load.stages": json.dumps([{"concurrency_level": tenant.streams, "num_requests": requests}]),
        "load.num_workers": "1",
        "storage.local_storage.path": str(out),
    }
    program = _program("inference-perf", find_python(12))
    command = (program, *(word for name, value in options.items() for word in (f"--{name}", value)))

    def read() -> _Counts:
        found = _read(out / "summary_lifecycle_metrics.json")
        return {tenant.name: (found["successes"]["count"], found["failures"]["count"])}

    return command, read


def _locust(url: str, seconds: int, folder: Path) -> _Job:
    """Run Locust in one process, because its scenario `NoisyNeighbourUser` has its own two tenants."""
    users = sum(tenant.streams for tenant in _TENANTS)
    command = (
        *(str(Path(sys.executable).with_name("locust")), "-f", str(_LOCUSTFILE), "--host", url),
        *("--headless", "--only-summary", "-u", str(users), "-r", str(users), "-t", f"{seconds}s"),
        *("--csv", str(folder / "locust"), "NoisyNeighbourUser"),
    )

    def read() -> _Counts:
        with (folder / "locust_stats.csv").open(encoding="utf-8", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["Type"] not in ("", "TTFT")]
        failed = {row["Name"]: int(row["Failure Count"]) for row in rows}
        return {
            row["Name"]: (int(row["Request Count"]) - failed[row["Name"]], failed[row["Name"]])
            for row in rows
        }

    return command, read


# The tools that run one process per tenant.
_TOOLS = {"guidellm": _guidellm, "aiperf": _aiperf, "inference-perf": _inference_perf}
_NAMES = ("locust", *_TOOLS)
_LOCUST_SEES = {("noisy", "Default"), ("quiet", "Default")}  # Locust's scenario has no objectives
_SEES = {(tenant.name, tenant.band) for tenant in _TENANTS}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="Envoy (default: %(default)s)")
    parser.add_argument("--admin", default="http://127.0.0.1:8081", help="admin API (default: %(default)s)")
    parser.add_argument("--seconds", type=int, default=30, help="seconds of load (default: %(default)s)")
    parser.add_argument("--tool", choices=_NAMES, action="append", help="run only this tool; may be repeated")


def run(options: argparse.Namespace, findings: Findings) -> None:
    for name in options.tool or _NAMES:
        check_tool(name, options.url, options.admin, options.seconds, findings)


def check_tool(name: str, url: str, admin: str, seconds: int, findings: Findings) -> None:
    """Run one tool for `seconds`, and check the tool's report and the admin API's flows and bands."""
    pairs: set[tuple[str, str]] = set()
    try:
        counts = asyncio.run(_load(name, url, admin, seconds, pairs))
    except Exception as fault:  # for example, no request was answered, so a report is incomplete
        causes = fault.exceptions if isinstance(fault, ExceptionGroup) else (fault,)
        findings.check(f"{name} runs", False, "; ".join(map(repr, causes)))
        return
    seen = ", ".join(
        f"{tenant} {served} answers, {errors} errors" for tenant, (served, errors) in counts.items()
    )
    well = all(served and not errors for served, errors in counts.values())
    findings.check(f"{name} has answers and no error", well, seen)
    wanted = _LOCUST_SEES if name == "locust" else _SEES
    findings.check(f"{name}: tenants are in their flows and bands", pairs == wanted, str(sorted(pairs)))


async def _load(
    name: str, url: str, admin: str, seconds: int, pairs: set[tuple[str, str]]
) -> dict[str, tuple[int, int]]:
    with tempfile.TemporaryDirectory(prefix="load-tools-") as place:
        folder = Path(place)
        jobs = [_locust(url, seconds, folder)] if name == "locust" else []
        for tenant in _TENANTS if name != "locust" else ():
            jobs.append(await asyncio.to_thread(_TOOLS[name], url, seconds, folder, tenant))
        watching = asyncio.create_task(_watch(admin, pairs))
        try:
            async with asyncio.TaskGroup() as tasks:
                for number, (command, _) in enumerate(jobs):
                    tasks.create_task(_run(command, folder / f"{number}.log"))
        finally:
            watching.cancel()
        return {tenant: counts for _, read in jobs for tenant, counts in read().items()}


async def _run(command: tuple[str, ...], log: Path) -> None:
    """Run a tool. If the tool fails, raise RuntimeError with the end of its output."""
    own = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, env=own
        )
        try:
            async with asyncio.timeout(_LIMIT_S):
                code = await process.wait()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            async with asyncio.timeout(_STOP_S):
                await process.wait()
            raise
    if code:
        said = await asyncio.to_thread(log.read_text, errors="replace")
        raise RuntimeError(f"{command[0]} ended with {code}:\n{said[-1500:]}")


async def _watch(admin: str, pairs: set[tuple[str, str]]) -> None:
    """Poll the admin API, and add flow and band of each request in flight or queued to `pairs`."""
    async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
        while True:
            with contextlib.suppress(httpx.HTTPError, KeyError, ValueError):
                for page in ("inflight", "queue"):
                    answer = await client.get(f"{admin}/api/v1/{page}", params={"limit": 200})
                    pairs |= {(row["flow"], row["band"]) for row in answer.json()["requests"]}
            await asyncio.sleep(_LOOK_S)
