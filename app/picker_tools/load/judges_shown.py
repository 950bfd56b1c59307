"""Promises that a scenario is made to show. Pure."""

import math
from collections.abc import Callable, Mapping

from picker_fleet.request import Band
from picker_tools.load.answer import Kind
from picker_tools.load.evidence import Evidence, latest_before
from picker_tools.load.figures import fair, mean
from picker_tools.load.judges_always import EXPIRED, RECOUNTED_S
from picker_tools.load.promise import Finding, Verdict, held_if, not_judged, unless
from picker_tools.load.scenario import Fault, Source

_NEAR = 0.9  # of a fair share counts as it,
_EDGE = 3  # less so many requests: they may wait when the counting begins or ends
_SHORTER = 0.25  # of the other's mean wait is at most what a client within its share waits
_AT_ONCE_S = 1.0  # a refusal after a longer time is of one that had been let in, and made way
_STAY = 0.6  # of later turns go where an earlier one went
_GOES_ON = (
    0.5  # of what was served before is served without Redis: each replica has its share of the bound (G8)
)
_AGAIN_S = 5.0  # after Redis is back, the fleet shares again (G8)
_OVER_S = 1.0  # after Redis went: who was in the middle of a call has been told


def no_errors(run: Evidence) -> Finding:
    if run.scenario.fault is Fault.KILL_REPLICAS and run.parameters.mode == "standard":
        return not_judged("in standard mode the answers that a killed replica passes on are cut (G7)")
    asked = [answer for answer in run.answers if not answer.left]
    bad = [answer for answer in asked if answer.kind is not Kind.SERVED]
    return unless(bad, f"{len(asked) - len(bad)} of {len(asked)} requests were served")


def only_overload(run: Evidence) -> Finding:
    failed = [answer for answer in run.answers if answer.kind is Kind.FAILED]
    refused = sum(answer.kind is Kind.REFUSED for answer in run.answers)
    return unless(failed, f"{len(run.answers)} requests, {refused} refused, {len(failed)} failed")


def nothing_expires(run: Evidence) -> Finding:
    return unless([each for each in run.answers if each.reason == EXPIRED], f"{len(run.answers)} requests")


def overloaded(run: Evidence) -> Finding:
    half_s = run.parameters.duration_s / 2
    seen = [each for each in run.samples if half_s <= each.at_s <= run.parameters.duration_s]
    if not seen:
        return not_judged("the queue was not seen")
    waiting = sum(each.total_queued > 0 for each in seen) / len(seen)
    text = f"requests waited in {waiting:.0%} of the samples of the second half"
    return unless([], text) if waiting >= 0.5 else not_judged(f"{text}: what depends on a queue says little")


def queue_drains(run: Evidence) -> Finding:
    wave = next((source.wave for source in run.sources if source.wave), None)
    if wave is None or not run.samples:
        return not_judged("the queue was not seen")
    peaks: list[int] = []
    stuck: list[str] = []
    for number in range(int(run.parameters.duration_s // wave.period_s)):
        begin_s, end_s = number * wave.period_s, (number + 1) * wave.period_s
        seen = [each.total_queued for each in run.samples if begin_s <= each.at_s < end_s]
        peaks.append(max(seen, default=0))
        if seen and min(seen[seen.index(peaks[-1]) :]) > 0:
            stuck.append(f"burst {number + 1}: {seen[-1]} were still queued when the next began")
    return unless(stuck, f"{len(peaks)} bursts; the longest queue of each was {peaks}")


def keeps_share(name: str) -> Callable[[Evidence], Finding]:
    """Source `name` is served about what it is due."""

    def judge(run: Evidence) -> Finding:
        service, total = run.service(), sum(run.service().values())
        flow = _source(run, name).flow
        due = fair(run.sources, run.demand(), total).get(flow, 0.0)
        if due <= 0:
            return not_judged(f"{name} asked for nothing")
        text = f"{name} had {service[flow] / total:.1%} of the service; its fair share was {due / total:.1%}"
        largest = max((run.cost(answer) for answer in run.answers_of(_source(run, name))), default=0.0)
        return held_if(service[flow] >= _NEAR * due - _EDGE * largest, text)

    return judge


def waits_less(name: str, than: str) -> Callable[[Evidence], Finding]:
    """Source `name`, which asks for less than its share, waits far less than the source `than`."""

    def judge(run: Evidence) -> Finding:
        mine, others = (mean(_lengths(run, _source(run, each))) for each in (name, than))
        if not mine >= 0 or not others > 0:
            return not_judged("one of the two was not served")
        text = f"mean waits: {name} {mine:.3f} s, {than} {others:.3f} s"
        queue = overloaded(run)
        if queue.verdict is not Verdict.HELD:
            return not_judged(queue.evidence)
        return held_if(mine <= _SHORTER * others, text)

    return judge


def not_refused(name: str) -> Callable[[Evidence], Finding]:
    """Every request of source `name` is served, while others are refused."""

    def judge(run: Evidence) -> Finding:
        mine = [answer for answer in run.answers_of(_source(run, name)) if not answer.left]
        bad = [answer for answer in mine if answer.kind is not Kind.SERVED]
        others = sum(each.kind is Kind.REFUSED and each.source != name for each in run.answers)
        text = f"{len(mine)} {name} requests, {len(bad)} not served; {others} of others were refused"
        return unless(bad, text) if mine else not_judged(f"no {name} requests")

    return judge


def waits_by_band(run: Evidence) -> Finding:
    queue = overloaded(run)
    if queue.verdict is not Verdict.HELD:
        return not_judged(queue.evidence)
    waits = {
        band: mean([wait for source in run.sources if source.band is band for wait in _lengths(run, source)])
        for band in Band
    }
    unseen = [band.label for band, wait in waits.items() if math.isnan(wait)]
    if unseen:
        return not_judged(f"nobody of {', '.join(unseen)} was seen to wait and be served")
    text = ", ".join(f"{band.label} {wait:.3f} s" for band, wait in waits.items())
    pairs = zip(waits.values(), list(waits.values())[1:], strict=False)
    wrong = [f"{higher:.3f} s before {lower:.3f} s" for higher, lower in pairs if higher > lower]
    return unless(wrong, f"mean waits: {text}")


def low_not_starved(run: Evidence) -> Finding:
    """G3's words about clients: what was let into the queue is served within its TTL."""
    low = [each for each in run.sources if each.band is Band.SHEDDABLE or each.criticality == 1]
    cases: list[object] = []
    text: list[str] = []
    for source in low:
        answers = run.answers_of(source)
        served = sum(answer.kind is Kind.SERVED for answer in answers)
        cases += [each for each in answers if each.kind is Kind.FAILED or each.reason == EXPIRED]
        longest = max(_lengths(run, source), default=0.0)
        refused = [each for each in answers if each.kind is Kind.REFUSED and each.reason != EXPIRED]
        evicted = sum((each.head_s or 0) > _AT_ONCE_S for each in refused)
        text.append(
            f"{source.name}: {served} served, {len(refused) - evicted} refused at once, {evicted} evicted "
            f"after a wait, longest wait {longest:.2f} s of {source.ttl_s:g} s"
        )
        if not served and not run.interrupted:
            cases.append(f"{source.name}: nothing was served")
    return unless(cases, "; ".join(text))


def faults_happened(run: Evidence) -> Finding:
    kills, outages = run.harm.kills, run.harm.outages
    told = [f"{name} killed at {at_s:.1f} s" for at_s, name in kills]
    told += [f"Redis away from {a:.1f} s to {'the end' if b is None else f'{b:.1f} s'}" for a, b in outages]
    return unless([], "; ".join(told)) if told else not_judged("nothing was done to the fleet")


def outage_serves(run: Evidence) -> Finding:
    if not run.harm.outages:
        return not_judged("there was no outage")
    began_s, ended_s = run.harm.outages[0]
    end_s = run.parameters.duration_s if ended_s is None else ended_s
    before = _served_per_s(run, 0.0, began_s)
    if not before:
        return not_judged("nothing was served before Redis went away")
    away = _served_per_s(run, began_s + _OVER_S, end_s)
    if away is None:
        return not_judged("nothing was sent while Redis was away")
    return held_if(
        away >= _GOES_ON * before,
        f"{away:.1f} requests a second were served without Redis, {before:.1f} before it went",
    )


def _served_per_s(run: Evidence, from_s: float, to_s: float) -> float | None:
    """Of what was sent in a time, how much was served within it; None if nothing was sent."""
    sent = [each for each in run.answers if from_s <= each.sent_s < to_s]
    served = [each for each in sent if each.kind is Kind.SERVED and each.sent_s + (each.head_s or 0) < to_s]
    return len(served) / (to_s - from_s) if sent else None


def outage_bound(run: Evidence) -> Finding:
    if not run.harm.outages:
        return not_judged("there was no outage")
    began_s, ended_s = run.harm.outages[0]
    before = latest_before(run.samples, began_s)
    end_s = run.parameters.duration_s if ended_s is None else ended_s
    # Also while the shared state is filled again: it could let others in before it knows who runs.
    every = max((each.answered for each in run.on_endpoints), default=0)
    seen = [
        each
        for each in run.on_endpoints
        if began_s <= each.at_s <= end_s + RECOUNTED_S and each.answered == every > 0
    ]
    if before is None or not seen:
        return not_judged("the bound or the endpoints were not seen")
    over = [f"at {each.at_s:.2f} s: {each.requests}" for each in seen if each.requests > int(before.upper)]
    highest = max(each.requests for each in seen)
    return unless(
        over, f"the endpoints had at most {highest} requests; the last upper bound was {before.upper:g}"
    )


def shared_again(run: Evidence) -> Finding:
    if not run.harm.outages or run.harm.outages[0][1] is None:
        return not_judged("Redis did not come back while the load ran")
    back_s = run.harm.outages[0][1]
    before = latest_before(run.samples, run.harm.outages[0][0])
    wanted = before.replicas if before else 1
    seen = [
        each for each in run.samples if each.at_s > back_s and not each.degraded and each.replicas >= wanted
    ]
    if not seen:
        return held_if(False, f"no sample after {back_s:.1f} s shows {wanted} replicas that share")
    return held_if(
        seen[0].at_s - back_s <= _AGAIN_S,
        f"{wanted} replicas shared again {seen[0].at_s - back_s:.2f} s after Redis was back",
    )


def turns_stay(run: Evidence) -> Finding:
    places: dict[tuple[str, int], set[str]] = {}
    later = stayed = 0
    known = 0  # places that later turns could have found by chance, one in `endpoints` each
    for answer in sorted(run.answers, key=lambda each: each.turn):
        if answer.kind is not Kind.SERVED or not answer.served_by:
            continue
        been = places.setdefault((answer.source, answer.number), set())
        later += bool(been)
        known += len(been)
        stayed += answer.served_by in been
        been.add(answer.served_by)
    if not later:
        return not_judged("no conversation had a second turn, or endpoints do not say who they are")
    endpoints = len({place for been in places.values() for place in been})
    if endpoints < 2:
        return not_judged("there is one endpoint only")
    text = f"{stayed} of {later} later turns ({stayed / later:.0%}) went where an earlier one had been; "
    chance = known / endpoints / later
    return held_if(
        stayed >= max(_STAY, (1 + chance) / 2) * later,
        f"{text}{endpoints} endpoints, of which chance finds one in {chance:.0%}",
    )


SHOWN: Mapping[str, tuple[str, Callable[[Evidence], Finding]]] = {
    "no-errors": ("every request is served", no_errors),
    "no-errors-but-overload": ("no request fails; what cannot be served is refused", only_overload),
    "only-overload-errors": ("no request fails; what cannot be served is refused", only_overload),
    "nothing-expires": ("no request waits past its TTL", nothing_expires),
    "overloaded": ("the load was more than the fleet could serve", overloaded),
    "queue-drains": ("the queue is empty again before the next burst", queue_drains),
    "quiet-share": ("the quiet client has what it asks for, up to its fair share", keeps_share("quiet")),
    "quiet-wait": ("the quiet client does not wait for the noisy one", waits_less("quiet", "noisy")),
    "quiet-not-refused": ("the quiet client is never refused", not_refused("quiet")),
    "critical-not-refused": (
        "critical requests are not refused while lower ones are served",
        not_refused("critical"),
    ),
    "waits-by-band": ("a higher band waits less than a lower one", waits_by_band),
    "low-not-starved": ("who is let in at the lowest rank is served within its TTL", low_not_starved),
    "urgent-first": (
        "of one flow, the workload of the highest criticality waits far less",
        waits_less("urgent", "busy-1"),
    ),
    "seldom-first": (
        "of workloads alike in criticality, one that asks seldom waits far less",
        waits_less("quiet", "busy-1"),
    ),
    "short-share": ("short prompts have their fair share of tokens", keeps_share("short")),
    "short-wait": ("short prompts do not wait for long ones", waits_less("short", "long")),
    "faults-happened": ("the fleet was harmed as planned", faults_happened),
    "outage-serves": ("without Redis the fleet goes on serving (G8)", outage_serves),
    "outage-bound": (
        "without Redis, and just after, no more are in flight than the last upper bound (G8)",
        outage_bound,
    ),
    "shared-again": ("within 5 s of Redis's return the fleet shares again (G8)", shared_again),
    "turns-stay": ("a conversation's turns go where its earlier ones are cached", turns_stay),
}


def _source(run: Evidence, name: str) -> Source:
    return next(source for source in run.sources if source.name == name)


def _lengths(run: Evidence, source: Source) -> list[float]:
    return [length for _, length in run.waits(source)]
