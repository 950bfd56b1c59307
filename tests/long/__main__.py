"""`make long ARGS='NAME OPTIONS'` runs one long test and reports each check; exit status 1 if a check failed.

    chaos            audit 200 000 requests during kills and changes; 500 fault schedules; 2000 random runs
    cluster-changes  how soon changes of a Kubernetes cluster take effect, on a real API server
    compose          the real Dockerfile and compose file on Docker or podman, under load
    hostile          every attack at once for ten minutes, while honest clients send requests
    load-tools       Locust, GuideLLM, AIPerf, inference-perf on a running fleet (installs 7 GB once)
    mutations        which test or fault schedule finds each fault that is put into the code
    outliers         model servers that fail in every way, in every mode and pools of 2, 4 and 8
    pulses           replicas and Valkey are stopped and continued at random
    sdks             calls of official SDKs, through the fleet and directly (installs 400 MB once)
    soak             an hour of steady load: memory, keys, drift
    stage-kills      prefill and decode apart: kills in each stage, in every mode
    tenant-shares    shares and limits of tenants on three levels, for ten simulated minutes with kills
    tenants          two tenants with API keys and official SDKs, one over its limit (installs as sdks)
    time-lapse       a simulated week of a fleet, on a clock that jumps to the next event
    vllm             real vLLM servers on the CPU behind the fleet (installs 6 GB once)
    vllm-prefixes    prefix hits of real vLLM servers: capacity fixed or learnt, or by KV events
    vllm-limits      limits found for real vLLM servers, beside static bounds and vLLM alone

`NAME --help` lists the options. `--out DIR` writes the report to DIR/NAME.md.
"""

import argparse
import importlib
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from long.findings import Findings


def main(arguments: Sequence[str]) -> int:
    names = re.findall(r"(?m)^    ([a-z-]+)  ", __doc__ or "")
    if not arguments or arguments[0] not in names:
        print(__doc__)
        return 2
    name, *rest = arguments
    module = importlib.import_module(f"long.{name.replace('-', '_')}")
    parser = argparse.ArgumentParser(prog=f"make long ARGS='{name} …'", description=module.__doc__)
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the report to DIR")
    module.add_options(parser)
    # `make` forwards SIGTERM. Treat SIGTERM as Ctrl-C, so that each test ends the processes that it started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options = parser.parse_args(rest)
    findings = Findings(f"make long ARGS='{' '.join(arguments)}'")
    try:
        module.run(options, findings)
    except KeyboardInterrupt:
        return 130
    except Exception as fault:
        causes = fault.exceptions if isinstance(fault, ExceptionGroup) else (fault,)
        for cause in causes:
            findings.check("the run finished", False, f"{type(cause).__name__}: {cause}")
    text = findings.text(module.__doc__.partition("\n")[0].rstrip("."))
    print(text)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"{name}.md").write_text(text, encoding="utf-8")
    return 0 if findings.all_held else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
