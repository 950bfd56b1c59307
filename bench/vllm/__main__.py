"""`python -m bench.vllm`: the fleet before real vLLM servers on the CPU. Writes bench/results/vllm.md.

Installs vLLM beside the project (6 GB, once), starts servers with random weights, measures bounds of the
queue (bench/results/vllm-throughput.md), and runs each check in each mode. Exit 1 if a check fails.
"""

import asyncio
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import httpx

from bench.rig.environments import InstallFault
from bench.rig.machine import describe_machine
from bench.rig.page import options_parser, table, write_page
from bench.vllm.checks import ADAPTER_CHECKS, BASE_CHECKS, Failed, fleet_up
from bench.vllm.engine import EngineFault, Server, installed, made_model, servers
from bench.vllm.throughput import measured, page
from picker_fleet.errors import PickerError

_MODES = ("standard", "lean", "http")
Row = tuple[str, str, bool, str]  # check, mode, whether it holds, what was seen


async def _checked(running: Sequence[Server], mode: str, folder: Path, *, adapters: bool) -> list[Row]:
    rows: list[Row] = []
    async with fleet_up(list(running), mode, folder) as fleet:
        for name, check in ADAPTER_CHECKS if adapters else BASE_CHECKS:
            try:
                holds, seen = True, await check(fleet)
            except httpx.RequestError as fault:
                holds, seen = False, f"{type(fault).__name__}: {fault}, {fault.request.url}"
            except (Failed, httpx.HTTPError, TimeoutError, KeyError) as fault:
                holds, seen = False, f"{type(fault).__name__}: {fault}"
            rows.append((name, mode, holds, seen))
            print(f"{'holds' if holds else 'FAILS'}: {mode}, {name}: {seen}", file=sys.stderr, flush=True)
    return rows


async def _all_checks(modes: Sequence[str], folder: Path, rounds: int, out: Path) -> list[Row]:
    python, model = await asyncio.to_thread(installed), made_model(folder / "model")
    rows: list[Row] = []
    # The last check kills a server, so each mode has a second server of its own.
    async with servers(python, model, folder, count=1 + max(1, len(modes))) as (first, *others):
        if rounds:
            samples = await measured([first, others[0]], rounds, folder)
            write_page(out / "vllm-throughput.md", page(samples, rounds))
        for mode, other in zip(modes, others, strict=bool(modes)):
            rows += await _checked([first, other], mode, folder, adapters=False)
    if not modes:
        return rows
    async with servers(python, model, folder, count=2, with_adapters=True) as pair:
        for mode in modes:
            rows += await _checked(pair, mode, folder, adapters=True)
    return rows


def _page(rows: Sequence[Row], modes: Sequence[str]) -> str:
    here = describe_machine("bench.vllm", sys.argv[1:])
    failed = sum(not holds for _, _, holds, _ in rows)
    order = [name for name, _ in (*BASE_CHECKS, *ADAPTER_CHECKS)]
    ordered = sorted(rows, key=lambda row: (order.index(row[0]), modes.index(row[1])))
    head = (
        f"`{here.command}`, {here.date}, {here.cores} cores that other work shares. Two vLLM 0.32\n"
        "servers on the CPU with random weights, `--max-num-seqs 4`; two replicas, "
        "`watermark_per_backend: 12`.\n"
        "What each check does and what follows: [docs/vllm.md](../../docs/vllm.md)."
    )
    cells = [
        [name, mode, "yes" if holds else "**no**", seen.replace("|", "/").replace("\n", " ")]
        for name, mode, holds, seen in ordered
    ]
    checks = table(["check", "mode", "holds", "seen"], cells)
    return (
        f"# A real vLLM behind the fleet\n\n{head}\n\n{checks}\n\n{len(rows) - failed} of {len(rows)} hold.\n"
    )


def main() -> int:
    parser = options_parser("python -m bench.vllm")
    parser.add_argument("--mode", choices=_MODES, action="append", help="only this one; may be repeated")
    parser.add_argument("--rounds", type=int, default=3, help="of the measurement; 0: only the checks")
    parser.add_argument("--no-checks", action="store_true", help="only the measurement")
    options = parser.parse_args()
    modes = () if options.no_checks else options.mode or _MODES
    # `make` passes SIGTERM on; what was started is ended.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="picker-vllm-") as name:
        try:
            rows = asyncio.run(_all_checks(modes, Path(name), options.rounds, options.out))
        except (InstallFault, EngineFault, PickerError, Failed) as fault:
            print(f"bench.vllm: {fault}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
    if options.no_checks:
        return 0
    write_page(options.out / "vllm.md", _page(rows, modes))
    return 0 if all(holds for _, _, holds, _ in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
