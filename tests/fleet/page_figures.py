"""Compares the dashboard's figures with a snapshot from the API.

The page rounds figures: a figure is right within half of its last digit. The page shows a dash if and only if
the figure is unknown.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

Row = Sequence[str]
Thing = Mapping[str, Any]
NONE = "–"
_SLACK = 1e-9
_UNITS_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_UNITS_BYTES = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_HEALTH = {(True, False): "live", (True, None): "live", (True, True): "without Redis"}

# JavaScript: the time of the snapshot that the page shows, and all figures derived from that snapshot.
PAGE = """() => {
  const text = (id) => document.getElementById(id).textContent;
  const rows = (id) => [...document.querySelectorAll(`#rows-${id} tr`)].map(
    (row) => [...row.cells].map((cell) => cell.textContent));
  const tiles = ['stock', 'queued', 'oldest', 'rate', 'endpoints', 'replicas'];
  return {
    at: Number(document.getElementById('main').dataset.at),
    tiles: Object.fromEntries(tiles.map((id) => [id, [text(`tile-${id}`), text(`note-${id}`)]])),
    stock: text('text-stock'),
    facts: [...document.querySelectorAll('#facts dd')].map((each) => each.textContent),
    bands: rows('bands'), flows: rows('flows'), workloads: rows('workloads'),
    endpoints: rows('endpoints'), replicas: rows('replicas'),
  };
}"""


def all_of(shown: Mapping[str, Any], shot: Thing) -> None:
    """Assert that all figures from the script `PAGE` agree with the snapshot `shot`."""
    for name, compare in (
        ("tiles", tiles), ("stock", stock), ("facts", facts), ("bands", bands), ("flows", flows),
        ("workloads", workloads), ("endpoints", endpoints), ("replicas", replicas),
    ):  # fmt: skip
        compare(shown[name], shot)


def count(text: str, value: float | None, digits: int = 1) -> None:
    """Assert that the text `text` is the number `value` rounded to at most `digits` decimals."""
    if value is None:
        assert text == NONE
    else:
        assert abs(float(text.replace("\u202f", "")) - value) <= 0.5 * 10**-digits + _SLACK, (text, value)


def duration(text: str, value_s: float | None) -> None:
    """Assert that `text` is a duration such as `40 ms` or `2 m 05 s`; its last unit may be truncated."""
    if value_s is None:
        assert text == NONE
        return
    parts = re.findall(r"([\d.]+) (ms|s|m|h|d)\b", text)
    assert " ".join(f"{amount} {unit}" for amount, unit in parts) == text.removeprefix("−"), text
    said_s = sum(float(amount) * _UNITS_S[unit] for amount, unit in parts)
    amount, unit = parts[-1]
    last_s = _UNITS_S[unit] / (10 if "." in amount else 1)
    within_s = last_s if unit in "mhd" else 0.5 * last_s
    assert abs(said_s * (-1 if text.startswith("−") else 1) - value_s) <= within_s + _SLACK, (text, value_s)


def share(text: str, value: float | None) -> None:
    """Assert that `text` is the share `value` (0 to 1) as a percentage."""
    if value is None:
        assert text == NONE
    else:
        count(text.removesuffix(" %"), 100 * value, 1 if value < 0.0995 else 0)


def size(text: str, value: int, most: int | None) -> None:
    """Assert that `text` is `value` in bytes, such as `7.2 kB`, followed by ` of ` and the limit, if any."""
    said = text.split(" of ")
    assert len(said) == (1 if most is None else 2), text
    for each, wanted in zip(said, (value, most), strict=False):
        amount, unit = each.split(" ")
        count(amount, wanted / _UNITS_BYTES[unit], 1 if float(amount) < 10 else 0)


def tiles(shown: Mapping[str, Row], shot: Thing) -> None:
    state = shot["state"]
    count(shown["stock"][0], state["stock"])
    assert shown["stock"][1].startswith("of ")
    count(shown["stock"][1].split()[1], state["bounds"]["upper"])
    count(shown["queued"][0], state["queued"], 0)
    assert shown["queued"][1].split()[0] == str(state["active_flows"])
    duration(shown["oldest"][0], oldest_s(shot))
    assert shown["oldest"][1] == f"{state['overdue'] or 'none'} overdue"
    count(shown["rate"][0].removesuffix("/s"), state["drain_rate"])
    count(shown["rate"][1].split()[0], state["guard_dispatches_total"], 0)
    ready = [each for each in shot["endpoints"] if each["status"] == "ready"]
    assert shown["endpoints"][0] == f"{len(ready)} of {len(shot['endpoints'])}"
    live = [each for each in shot["replicas"] if each["live"]]
    assert shown["replicas"][0] == f"{len(live)} of {len(shot['replicas'])}"


def oldest_s(shot: Thing) -> float | None:
    """The age in seconds of the longest-waiting request."""
    ages = [each["oldest_s"] for each in shot["state"]["bands"] if each["queued"]]
    return max((age for age in ages if age is not None), default=None)


def stock(caption: str, shot: Thing) -> None:
    """Assert that the chart's caption gives the stock and its bounds."""
    now, lower, aim, upper = re.fullmatch(
        r"([\d.]+) \w+ now; .+\. Dispatch below ([\d.]+), aim ([\d.]+), never above ([\d.]+) \(red\)\.",
        caption,
    ).groups()  # type: ignore[union-attr]
    count(now, shot["state"]["stock"])
    for said, bound in ((lower, "lower"), (aim, "watermark"), (upper, "upper")):
        count(said, shot["state"]["bounds"][bound])


def facts(shown: Row, shot: Thing) -> None:
    age, dispatched, ended, _, changes = shown
    duration(age, shot["state"]["pool_age_s"])
    count(dispatched, shot["state"]["dispatched_total"], 0)
    count(ended, shot["state"]["ended_total"], 0)
    version = shot["state"]["tuned_version"]
    assert changes == (f"version {version}" if version else "none")


def bands(rows: Sequence[Row], shot: Thing) -> None:
    for (name, queued, bodies, flows, oldest, weight), band in zip(rows, shot["state"]["bands"], strict=True):
        assert name == band["band"]
        count(queued, band["queued"], 0)
        size(bodies, band["queued_bytes"], band["bytes"])
        count(flows, band["active_flows"], 0)
        duration(oldest, band["oldest_s"] if band["queued"] else None)
        if band["weight"] is None:
            assert weight == "strict"
        else:
            count(weight, band["weight"])


def flows(rows: Sequence[Row], shot: Thing) -> None:
    for row, flow in zip(rows, shot["flows"], strict=True):
        name, band, queued, oldest, in_flight, service, rate, state = row
        assert (name, band) == (flow["flow"], flow["band"])
        count(queued, flow["queued"], 0)
        duration(oldest, flow["oldest_s"])
        count(in_flight, flow["in_flight"], 0)
        has, due = service.split(" of ")
        share(has, flow["share"])
        share(due, flow["fair_share"])
        count(rate, flow["served_cost_per_s"])
        turn = "in turn" if flow["weight"] == 1 else f"in turn, weight {flow['weight']:g}"
        assert state == ("at its limit" if flow["throttled"] else turn)


def workloads(rows: Sequence[Row], shot: Thing) -> None:
    for (name, active, rate, wait, score), workload in zip(rows, shot["workloads"], strict=True):
        assert name == workload["id"]
        assert active.replace("\u202f", "") == f"{workload['active']} of {workload['total']}"
        count(rate.removesuffix("/s"), workload["rate"], 2)
        duration(wait, workload["average_wait_s"])
        parts = workload["score"]
        if parts is None or parts["total"] is not None:
            count(score, parts and parts["total"], 3)
        else:  # the score's other parts depend on the request
            count(score.removeprefix("rate "), parts["rate"], 3)


def endpoints(rows: Sequence[Row], shot: Thing) -> None:
    for row, endpoint in zip(rows, shot["endpoints"], strict=True):
        name, status, in_flight, limit, _, why, load, kv, latency, _ = row
        loaded = endpoint["adapters"]
        said = f"{len(loaded)} of {endpoint['max_adapters']} adapters: {', '.join(loaded)}" if loaded else ""
        assert name == endpoint["address"] + said
        assert status == endpoint["status"]
        count(in_flight, endpoint["in_flight"], 0)
        count(limit, endpoint["limit"], 0)
        reason, age = re.fullmatch(r"(.*?)(?:, ([^,]+) ago)?", why).groups()  # type: ignore[union-attr]
        assert reason == (endpoint["limit_reason"] or NONE)
        duration(age or NONE, endpoint["limit_changed_s"])
        if endpoint["scrape_fault"]:
            assert load == "not known"
        else:
            runs, waits = load.split(" + ")
            count(runs, endpoint["running"], 0)
            count(waits, endpoint["waiting"], 0)
        share(kv, endpoint["kv_utilisation"])
        if endpoint.get("latency_mean_s") is None:
            assert latency == NONE
        else:
            mean, deviation = latency.split(" ± ")
            duration(mean, endpoint["latency_mean_s"])
            duration(deviation, endpoint["latency_std_s"])


def replicas(rows: Sequence[Row], shot: Thing) -> None:
    for row, replica in zip(rows, shot["replicas"], strict=True):
        name, health, heartbeat, holds, admin, age, version = row
        assert name == replica["id"] + (" (this one)" if replica["this"] else "")
        assert health == _HEALTH.get((replica["live"], replica["degraded"]), "silent")
        duration(heartbeat.removesuffix(" ago"), replica["heartbeat_s_ago"])
        count(holds.removesuffix(" waiting"), replica["waiting"], 0)
        assert (admin, version) == (replica["admin"] or NONE, replica["version"] or NONE)
        duration(age, replica["started_s_ago"])


def queue(rows: Sequence[Row], answer: Thing) -> bool:
    """Whether the rows list the requests of `answer`; if the ids agree, assert that every figure agrees."""
    requests = answer["requests"]
    if [row[1] for row in rows] != [each["id"] for each in requests]:
        return False
    for row, request in zip(rows, requests, strict=True):
        position, _, flow, band, age, deadline, cost, score, owner, _ = row
        count(position, request["position"], 0)
        assert (flow, band, owner) == (request["flow"], request["band"], request["owner"])
        if not _is_duration(age.removesuffix(" overdue"), request["age_s"]):
            return False  # the answer lists the same requests at another time
        assert age.endswith(" overdue") == request["overdue"]
        duration(deadline, request["deadline_in_s"])
        count(cost, request["cost"])
        count(score, request["score"] and request["score"]["total"], 3)
    return True


def _is_duration(text: str, value_s: float) -> bool:
    try:
        duration(text, value_s)
    except AssertionError:
        return False
    return True
