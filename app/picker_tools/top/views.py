"""The views, in the order of their keys. Shapes are those of the admin API."""

import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from rich.text import Text

from picker_tools.top.feed import News
from picker_tools.top.tables import Column, Thing, View
from picker_tools.top.words import NONE, bar, number, percent, plain, seconds

_BAR_CELLS = 12
_LESS = 0.8  # a flow below this part of its fair share stands out
_STYLES = {"ready": "green", "live": "green", "draining": "yellow", "drained": "yellow", "down": "bold red"}
_UNKIND = frozenset(
    {"refused", "expired", "preempted", "evicted", "abandoned", "reclaimed", "upstream_failed", "client_gone"}
)


def _flow(flow: Thing, scale: float) -> list[str | Text]:
    share, fair = flow.get("share"), flow.get("fair_share")
    less = share is not None and fair is not None and share < _LESS * fair
    service = Text(bar(share, scale, _BAR_CELLS, fair), style="yellow" if less else "cyan")
    service.append(f" {percent(share):>5} of {percent(fair)}", style="default")
    return [
        Text(plain(flow["flow"]) or "(the whole band)"),
        flow["band"],
        number(flow["queued"], 0),
        seconds(flow.get("oldest_s")),
        service,
        number(flow.get("weight"), 2),
        number(flow.get("in_flight"), 0),
        number(flow.get("served_cost_per_s")),
        Text("at its limit", "yellow") if flow.get("parked") else "in turn",
    ]


def _workload(workload: Thing, _: float) -> list[str | Text]:
    score = workload.get("score")
    return [
        Text(plain(workload["id"])),
        number(workload.get("active"), 0),
        number(workload.get("total"), 0),
        f"{number(workload.get('rate'), 2)}/s",
        seconds(workload.get("average_wait_s")),
        number(score.get("total") if isinstance(score, Mapping) else score, 3),
    ]


def _endpoint(endpoint: Thing, _: float) -> list[str | Text]:
    mean, status = endpoint.get("latency_mean_s"), endpoint["status"]
    latency = NONE if mean is None else f"{seconds(mean)} ± {seconds(endpoint.get('latency_std_s'))}"
    return [
        endpoint["address"],
        Text(status, _STYLES.get(status, "yellow")),
        number(endpoint.get("in_flight"), 0),
        f"{number(endpoint.get('running'), 0)} + {number(endpoint.get('waiting'), 0)}",
        percent(endpoint.get("kv_utilisation")),
        latency,
        Text(plain(", ".join(endpoint.get("adapters") or []) or NONE)),
    ]


def _replica(replica: Thing, _: float) -> list[str | Text]:
    health = "silent" if not replica["live"] else "without Redis" if replica.get("degraded") else "live"
    return [
        Text(plain(replica["id"]) + (" (this one)" if replica.get("this") else "")),
        Text(health, _STYLES.get(health, "bold red")),
        f"{seconds(replica.get('heartbeat_s_ago'))} ago",
        number(replica.get("waiting"), 0),
        plain(replica.get("admin") or NONE),
        seconds(replica.get("started_s_ago")),
        plain(replica.get("version") or NONE),
    ]


def _request(request: Thing, _: float) -> list[str | Text]:
    score, age = request.get("score"), seconds(request.get("age_s"))
    return [
        number(request.get("position"), 0),
        Text(plain(request["flow"])),
        request["band"],
        Text(age, "yellow") if request.get("overdue") else age,
        seconds(request.get("deadline_in_s")),
        Text(plain(request["id"])),
        Text(plain(request.get("workload") or NONE)),
        number(request.get("cost")),
        number(score.get("total") if isinstance(score, Mapping) else None, 3),
        Text("nobody" if request.get("state") == "held" else plain(request.get("owner") or NONE)),
    ]


def _decision(entry: Thing, _: float) -> list[str | Text]:
    at = datetime.datetime.fromtimestamp(entry["at"])
    event = plain(entry["event"])
    return [
        f"{at:%H:%M:%S}.{at.microsecond // 100_000}",
        Text(event, "yellow" if event in _UNKIND else ""),
        Text(plain(entry.get("flow") or NONE)),
        Text(plain(entry.get("endpoint") or NONE)),
        number(entry.get("stock")),
        number(entry.get("queued"), 0),
        entry.get("band") or NONE,
        Text(plain(entry.get("by") or NONE)),
        Text(plain(entry.get("note") or NONE)),
        Text(plain(entry.get("request") or NONE)),
    ]


def _no_queue(news: News) -> str:
    if news.page is None:
        return "reading"
    return plain(news.page.fault) or "nothing waits"


def _no_log(news: News) -> str:
    return "no decision yet" if news.logs else "the decision log is off: decision_log: {enabled: true}"


def _listed(news: News, key: str) -> Sequence[Thing]:
    return () if news.shot is None else cast(Sequence[Thing], news.shot[key])


def _total(key: str) -> Callable[[News], int]:
    return lambda news: int((news.shot or {}).get(f"{key}_total") or len(_listed(news, key)))


VIEWS: tuple[View, ...] = (
    View(
        "flows",
        (
            Column("Flow", least=10, most=24),
            Column("Band", least=9),
            Column("Waits", right=True),
            Column("Oldest", right=True, least=7),
            Column("Service, │ its fair share", least=27),
            Column("Weight", right=True, wide=True),
            Column("In flight", right=True, wide=True),
            Column("Cost/s", right=True, wide=True),
            Column("State", wide=True),
        ),
        lambda news: _listed(news, "flows"),
        _flow,
        _total("flows"),
    ),
    View(
        "workloads",
        (
            Column("Workload", least=12, most=30),
            Column("Active", right=True),
            Column("Ever", right=True),
            Column("Rate", right=True),
            Column("Average wait", right=True),
            Column("Score", right=True),
        ),
        lambda news: _listed(news, "workloads"),
        _workload,
        _total("workloads"),
    ),
    View(
        "endpoints",
        (
            Column("Endpoint", least=14, most=28),
            Column("Status", least=8),
            Column("In flight", right=True),
            Column("Runs + waits", right=True, least=7),
            Column("KV", right=True, least=4),
            Column("Latency", right=True, least=16),
            Column("Adapters", wide=True),
        ),
        lambda news: _listed(news, "endpoints"),
        _endpoint,
        _total("endpoints"),
    ),
    View(
        "replicas",
        (
            Column("Replica", least=14, most=26),
            Column("Health", least=8),
            Column("Heartbeat", right=True),
            Column("Holds", right=True),
            Column("Admin", least=12),
            Column("Up for", right=True),
            Column("Version", wide=True),
        ),
        lambda news: _listed(news, "replicas"),
        _replica,
        _total("replicas"),
    ),
    View(
        "queue",
        (
            Column("#", right=True, least=3),
            Column("Flow", least=10, most=20),
            Column("Band", least=9),
            Column("Age", right=True, least=7),
            Column("Deadline in", right=True),
            Column("Request", least=10),
            Column("Workload", wide=True),
            Column("Cost", right=True, wide=True),
            Column("Score", right=True, wide=True),
            Column("Held by", wide=True),
        ),
        lambda news: news.page.requests if news.page else (),
        _request,
        lambda news: int((news.page and news.page.total) or 0),
        named=5,
        none=_no_queue,
    ),
    View(
        "log",
        (
            Column("Time", least=10),
            Column("Decision", least=9),
            Column("Flow", least=10, most=18),
            Column("Endpoint", least=10),
            Column("In flight", right=True),
            Column("Waits", right=True),
            Column("Band", wide=True),
            Column("By", wide=True),
            Column("Note", wide=True),
            Column("Request", wide=True),
        ),
        lambda news: news.decisions or (),
        _decision,
        lambda news: len(news.decisions or ()) + news.skipped,
        named=9,
        none=_no_log,
    ),
    View("stock", (), lambda _: (), lambda _, __: (), lambda _: 0),
)
