"""`make load-tools`: Locust, GuideLLM, AIPerf and inference-perf on a running fleet, two tenants at once.

Each tool sends as two tenants, by headers: `bulk` with 12 requests at a time, and `chat` with 4 and the
objective `premium`. Prints what the tool itself reports of each tenant, and what the admin API saw of them.
Installs all but Locust once, beside the project; without Python 3.12 inference-perf is skipped. Exit status 1
if a tool fails, counts an error, or its headers did not reach flow and band.
"""

import argparse
import asyncio
import contextlib
import csv
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench.rig.environments import InstallFault, environment, find_python
from bench.rig.machine import describe_machine
from bench.rig.page import table
from bench.vllm.engine import made_model

_RESULT = Path(__file__).parent / "results" / "load-tools.md"
_LOCUSTFILE = Path(__file__).parents[1] / "deploy" / "locust" / "locustfile.py"
_VERSIONS = {"guidellm": "0.8.1", "aiperf": "0.13.0", "inference-perf": "0.7.0"}
_INFERENCE_PERF_MINOR = 12  # it needs Python 3.12
_FLOW, _OBJECTIVE = "x-gateway-inference-fairness-id", "x-gateway-inference-objective"
_PROMPT_TOKENS, _TOKENS = 200, 40
_ANSWERS_PER_S = 2.0  # of one stream: inference-perf is told a number of requests, not a time
_LOOK_S = 0.25
_LIMIT_S = 420.0  # of a tool, which may take a minute and more to start
_STOP_S = 20.0


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant, its requests at a time, and the band that its objective stands for."""

    name: str
    streams: int
    objective: str = ""
    band: str = "Default"

    @property
    def headers(self) -> dict[str, str]:
        return {_FLOW: self.name} | ({_OBJECTIVE: self.objective} if self.objective else {})


_TENANTS = (Tenant("bulk", 12), Tenant("chat", 4, "premium", "Critical"))


@dataclass(frozen=True, slots=True)
class Report:
    """What a tool reports of a tenant. Times in ms."""

    tenant: str
    answers: int
    errors: int
    per_s: float
    first_ms: tuple[float, float]  # median, p95
    whole_ms: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Job:
    """A process of a tool; `read` gets its reports once it has ended."""

    command: tuple[str, ...]
    read: Callable[[], list[Report]]


class ToolFault(Exception):
    """A tool failed; the message has its last lines."""


class Skipped(Exception):
    """A tool cannot run on this machine; the message says why."""


def _program(name: str, python: str = sys.executable) -> str:
    version = _VERSIONS[name]
    return str(environment(name, version, [f"{name}=={version}"], python=python) / "bin" / name)


def guidellm(url: str, seconds: int, folder: Path, tenant: Tenant) -> Job:
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

    def read() -> list[Report]:
        found = json.loads(out.read_text(encoding="utf-8"))["benchmarks"][0]["metrics"]
        first, whole = (found[name]["successful"] for name in ("time_to_first_token_ms", "request_latency"))
        return [
            Report(
                tenant.name,
                found["request_totals"]["successful"],
                found["request_totals"]["errored"],
                found["requests_per_second"]["successful"]["mean"],
                (first["median"], first["percentiles"]["p95"]),
                (1000 * whole["median"], 1000 * whole["percentiles"]["p95"]),
            )
        ]

    return Job(command, read)


def aiperf(url: str, seconds: int, folder: Path, tenant: Tenant) -> Job:
    out = folder / tenant.name
    command = (
        *(
            _program("aiperf"),
            "profile",
            "-m",
            "llama",
            "--url",
            url,
            "--endpoint-type",
            "chat",
            "--streaming",
        ),
        *("--tokenizer", str(made_model(folder / "model")), "--use-server-token-count", "--ui", "none"),
        *("--synthetic-input-tokens-mean", str(_PROMPT_TOKENS), "--output-tokens-mean", str(_TOKENS)),
        *("--concurrency", str(tenant.streams), "--benchmark-duration", str(seconds)),
        *(word for name, value in tenant.headers.items() for word in ("-H", f"{name}:{value}")),
        *("--output-artifact-dir", str(out)),
    )

    def read() -> list[Report]:
        found = json.loads((out / "profile_export_aiperf.json").read_text(encoding="utf-8"))
        first, whole = found["time_to_first_token"], found["request_latency"]
        return [
            Report(
                tenant.name,
                int(found["request_count"]["avg"]),
                int((found.get("error_request_count") or {"avg": 0})["avg"]),
                found["request_throughput"]["avg"],
                (first["p50"], first["p95"]),
                (whole["p50"], whole["p95"]),
            )
        ]

    return Job(command, read)


def inference_perf(url: str, seconds: int, folder: Path, tenant: Tenant) -> Job:
    python = find_python(_INFERENCE_PERF_MINOR)
    if python is None:
        raise Skipped(f"it needs Python 3.{_INFERENCE_PERF_MINOR}, and none is on the PATH or in pyenv")
    out = folder / tenant.name
    requests = round(seconds * tenant.streams * _ANSWERS_PER_S)
    stages = [{"concurrency_level": tenant.streams, "num_requests": requests}]
    options = {
        "server.type": "vllm",
        "server.model_name": "llama",
        "server.base_url": url,
        "api.type": "completion",  # its prompts of a given length are for completions only
        "api.streaming": "true",
        "api.headers": json.dumps(tenant.headers),
        "tokenizer.pretrained_model_name_or_path": str(made_model(folder / "model")),
        "data.type": "synthetic",
        "data.input_distribution.type": "fixed",
        "data.input_distribution.mean": str(_PROMPT_TOKENS),
        "data.output_distribution.type": "fixed",
        "data.output_distribution.mean": str(_TOKENS),
        "load.type": "concurrent",
        "load.stages": json.dumps(stages),
        "load.num_workers": "1",
        "storage.local_storage.path": str(out),
    }
    program = _program("inference-perf", python)
    command = (program, *(word for name, value in options.items() for word in (f"--{name}", value)))

    def read() -> list[Report]:
        found = json.loads((out / "summary_lifecycle_metrics.json").read_text(encoding="utf-8"))
        served = found["successes"]
        first, whole = (served["latency"][name] for name in ("time_to_first_token", "request_latency"))
        return [
            Report(
                tenant.name,
                served["count"],
                found["failures"]["count"],
                served["throughput"]["requests_per_sec"],
                (1000 * first["median"], 1000 * first["p95"]),
                (1000 * whole["median"], 1000 * whole["p95"]),
            )
        ]

    return Job(command, read)


def locust(url: str, seconds: int, folder: Path) -> Job:
    """One process: a scenario of `picker load` has both tenants."""
    users = sum(tenant.streams for tenant in _TENANTS)
    command = (
        *(str(Path(sys.executable).with_name("locust")), "-f", str(_LOCUSTFILE), "--host", url),
        *("--headless", "--only-summary", "-u", str(users), "-r", str(users), "-t", f"{seconds}s"),
        *("--csv", str(folder / "locust"), "NoisyNeighbourUser"),
    )

    def read() -> list[Report]:
        with (folder / "locust_stats.csv").open(encoding="utf-8", newline="") as file:
            rows = {(row["Type"], row["Name"]): row for row in csv.DictReader(file)}
        return [
            Report(
                name,
                int(row["Request Count"]) - int(row["Failure Count"]),
                int(row["Failure Count"]),
                float(row["Requests/s"]),
                (float(rows["TTFT", name]["50%"]), float(rows["TTFT", name]["95%"])),
                (float(row["50%"]), float(row["95%"])),
            )
            for (kind, name), row in rows.items()
            if kind not in ("", "TTFT")
        ]

    return Job(command, read)


_TOOLS = {"guidellm": guidellm, "aiperf": aiperf, "inference-perf": inference_perf}  # a process a tenant
_NAMES = ("locust", *_TOOLS)
_LOCUST_SEES = {("noisy", "Default"), ("quiet", "Default")}  # its scenario has flows and no objectives
_SEES = {(tenant.name, tenant.band) for tenant in _TENANTS}


def _jobs(name: str, url: str, seconds: int, folder: Path) -> list[Job]:
    if name == "locust":
        return [locust(url, seconds, folder)]
    return [_TOOLS[name](url, seconds, folder, tenant) for tenant in _TENANTS]


async def _run(job: Job, log: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *job.command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, env=environment
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
        raise ToolFault(f"{job.command[0]} ended with {code}:\n{said[-1500:]}")


@dataclass(slots=True)
class Seen:
    """What the admin API saw: pairs of flow and band of requests in flight or waiting, how often it looked
    while any was, and how often while both tenants had some."""

    pairs: set[tuple[str, str]]
    looks: int = 0
    both: int = 0


async def _watch(admin: str, seen: Seen) -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
        while True:
            with contextlib.suppress(httpx.HTTPError, KeyError, ValueError):
                rows = []
                for page in ("inflight", "queue"):
                    answer = await client.get(f"{admin}/api/v1/{page}", params={"limit": 200})
                    rows += answer.json()["requests"]
                pairs = {(row["flow"], row["band"]) for row in rows}
                seen.pairs |= pairs
                seen.looks += bool(pairs)
                seen.both += len(pairs) > 1
            await asyncio.sleep(_LOOK_S)


async def _measure(name: str, url: str, admin: str, seconds: int) -> tuple[list[Report], Seen]:
    seen = Seen(set())
    with tempfile.TemporaryDirectory(prefix="load-tools-") as place:
        folder = Path(place)
        jobs = await asyncio.to_thread(_jobs, name, url, seconds, folder)
        watching = asyncio.create_task(_watch(admin, seen))
        try:
            async with asyncio.TaskGroup() as tasks:
                for number, job in enumerate(jobs):
                    tasks.create_task(_run(job, folder / f"{number}.log"))
        finally:
            watching.cancel()
        try:
            return [report for job in jobs for report in job.read()], seen
        except (OSError, ValueError, LookupError, TypeError) as fault:  # as where no request was answered
            raise ToolFault(f"its report is incomplete: {fault!r}") from fault


def _faults(name: str, reports: Sequence[Report], seen: Seen) -> list[str]:
    faults = [f"{each.errors} errors of {each.tenant}" for each in reports if each.errors]
    faults += [f"no answer for {each.tenant}" for each in reports if not each.answers]
    expected = _LOCUST_SEES if name == "locust" else _SEES
    if seen.pairs != expected:
        faults.append(f"the admin API saw {sorted(seen.pairs)}, not {sorted(expected)}")
    return faults


def _section(name: str, reports: Sequence[Report], seen: Seen, faults: Sequence[str]) -> str:
    rows = [
        [each.tenant, f"{each.answers}", f"{each.errors}", f"{each.per_s:.1f}",
         *(f"{median:.0f} / {p95:.0f}" for median, p95 in (each.first_ms, each.whole_ms))]
        for each in reports
    ]  # fmt: skip
    head = ["tenant", "answers", "errors", "requests/s", "TTFT p50 / p95, ms", "answer p50 / p95, ms"]
    bands = ", ".join(f"flow `{flow}` in band {band}" for flow, band in sorted(seen.pairs))
    verdict = "; ".join(f"**{fault}**" for fault in faults) or "no others"
    saw = f"The admin API saw {bands}, {verdict}; both at once in {seen.both} of {seen.looks} looks."
    return f"## {name}\n\n{table(head, rows)}\n\n{saw}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.load_tools")
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="Envoy (default: %(default)s)")
    parser.add_argument("--admin", default="http://127.0.0.1:8081", help="admin API (default: %(default)s)")
    parser.add_argument("--seconds", type=int, default=30, help="of load (default: %(default)s)")
    parser.add_argument("--tool", choices=_NAMES, action="append", help="only this one; may be repeated")
    parser.add_argument("--out", type=Path, default=_RESULT, help="default: bench/results/load-tools.md")
    options = parser.parse_args()
    sections, failed = [], False
    for name in options.tool or _NAMES:
        try:
            reports, seen = asyncio.run(_measure(name, options.url, options.admin, options.seconds))
        except Skipped as why:
            sections.append(f"## {name}\n\nSkipped: {why}.")
            print(sections[-1], flush=True)
            continue
        except (InstallFault, ToolFault, TimeoutError, ExceptionGroup) as fault:
            text = "\n".join(map(str, getattr(fault, "exceptions", (fault,))))
            print(f"{name}: {text or 'the time ran out'}", file=sys.stderr)
            failed = True
            continue
        faults = _faults(name, reports, seen)
        failed = failed or bool(faults)
        sections.append(_section(name, reports, seen, faults))
        print(sections[-1], flush=True)
    here = describe_machine("bench.load_tools")
    head = (
        f"# Load tools with two tenants\n\n`make load-tools`, {here.date}, {here.cores} cores that the tools "
        f"share with the fleet, load average {here.load:.1f} at the end. Figures are the tools' own."
    )
    options.out.write_text("\n\n".join([head, *sections]) + "\n", encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
