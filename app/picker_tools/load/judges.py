"""Every promise that a run is judged by."""

from picker_tools.load.evidence import Evidence
from picker_tools.load.judges_always import ALWAYS, objective_latency, objective_ttft
from picker_tools.load.judges_shown import SHOWN
from picker_tools.load.promise import Promise


def judged(run: Evidence) -> tuple[Promise, ...]:
    """What its scenario is to show first, then objectives that were given, then what always holds."""
    wanted = [(name, *SHOWN[name]) for name in run.scenario.promises]
    parameters = run.parameters
    if parameters.slo_ttft_p95_s is not None:
        says = f"95 % of first tokens come within {parameters.slo_ttft_p95_s:g} s"
        wanted.append(("slo-ttft", says, objective_ttft))
    if parameters.slo_latency_p95_s is not None:
        says = f"95 % of answers are whole within {parameters.slo_latency_p95_s:g} s"
        wanted.append(("slo-latency", says, objective_latency))
    wanted += [(name, *judge) for name, judge in ALWAYS.items()]
    promises = []
    for name, says, judge in wanted:
        finding = judge(run)
        promises.append(Promise(name, says, finding.verdict, finding.evidence, finding.cases))
    return tuple(promises)
