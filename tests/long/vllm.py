"""The fleet before real vLLM servers on the CPU, each check in each mode (docs/vllm.md).

Installs vLLM beside the project (6 GB, once) and starts servers with random weights, `--max-num-seqs 4`,
behind two replicas.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

import httpx

from long.findings import Findings
from long.vllm_checks import ADAPTER_CHECKS, BASE_CHECKS, Checks, Failed, fleet_up
from long.vllm_servers import Server, installed, made_model, servers

_MODES = ("standard", "lean", "http")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mode", choices=_MODES, action="append", help="only this one; may be repeated")


def run(options: argparse.Namespace, findings: Findings) -> None:
    with tempfile.TemporaryDirectory(prefix="picker-vllm-") as name:
        asyncio.run(_all_checks(options.mode or _MODES, Path(name), findings))


async def _all_checks(modes: Sequence[str], folder: Path, findings: Findings) -> None:
    python, model = await asyncio.to_thread(installed), made_model(folder / "model")
    # The last check kills a server, so each mode gets its own second server.
    async with servers(python, model, folder, count=1 + len(modes)) as (first, *others):
        for mode, other in zip(modes, others, strict=True):
            await _check([first, other], mode, folder, BASE_CHECKS, findings)
    async with servers(python, model, folder, count=2, with_adapters=True) as pair:
        for mode in modes:
            await _check(pair, mode, folder, ADAPTER_CHECKS, findings)


async def _check(
    running: Sequence[Server], mode: str, folder: Path, checks: Checks, findings: Findings
) -> None:
    async with fleet_up(list(running), mode, folder) as fleet:
        for name, check in checks:
            try:
                holds, seen = True, await check(fleet)
            except (Failed, httpx.HTTPError, TimeoutError, KeyError) as fault:
                holds, seen = False, f"{type(fault).__name__}: {fault}"
            findings.check(f"`{mode}`: {name}", holds, seen)
